"""Labels in tables of other tools: Delta, Iceberg and Lance. Entry point: `export_to_table`.

A Delta or an Iceberg table gets the rows of the snapshot in place of all rows with their `doc_id`;
its other rows stay. A Lance dataset gets columns with the labels; its other columns are not written
again. Each export is one commit, which also records which labels it has: a second export of the
same snapshot changes nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from pipeline.errors import AssayError, StorageError, UnavailableError, one_line, option_error
from pipeline.filters.layout import real_path, refuse_own_places
from pipeline.ledger.columns import cast_rows
from pipeline.ledger.flat import flat_schema
from pipeline.options import ExportOptions
from pipeline.sources.id_text import id_text, plain_values
from pipeline.sources.lance_dataset import ids_of
from pipeline.sources.table_files import lance_folder
from pipeline.spec.locations import table_at
from pipeline.spec.schema import JobSpec
from pipeline.stores.file_systems import native_options
from pipeline.verbs.label_table import ExportResult, LabelTable, own_errors

_ATTEMPTS = 3  # of a commit, while others commit to the same table
# In the metadata of a commit, or of a column of a Lance dataset: the spec, and which labels.
_KEY = "assay.export"
_BATCH_ROWS = 131_072  # of a Lance dataset
_SMALL = (pa.int8(), pa.int16())
# In an entry of Delta's history: its operation, or its mode, may take rows away, or change them.
_TAKES = re.compile("'(Overwrite|DELETE|MERGE|RESTORE|TRUNCATE|UPDATE)'|REPLACE TABLE")
_KEEP = ("append", "replace")  # operations of Iceberg after which all rows are there
# Names of errors of pyiceberg, and words of object stores and of their clients.
_DENIED = re.compile("Forbidden|Unauthorized|AccessDenied|permission denied|lacked", re.IGNORECASE)


class _Conflict(Exception):
    """Another program has changed the table meanwhile."""


def export_to_table(spec: JobSpec, options: ExportOptions, *, cache_dir: Path) -> ExportResult:
    """Writes the labels of the spec's last snapshot to the table that the option `to` names.

    Raises:
        SpecError: There is no such table, its columns are not those of the labels, or the
            credentials may not write there.
        StorageError: The table cannot be written.
        UnavailableError: Its catalog does not answer, or others keep changing the table.
    """
    to, table = str(options.to), table_at(str(options.to))
    assert table is not None, to
    kind, place = table.kind, table.place
    if table.version is not None:
        raise option_error("to", "an export makes the next version; leave out the version", to)
    if options.layout is not None:
        raise option_error("layout", "is for a folder; write --to FOLDER/", options.layout)
    if options.overwrite:
        raise option_error("overwrite", "is for files; a table keeps its other rows and columns")
    if kind == "lance" and (options.columns or options.with_text):
        name = "columns" if options.columns else "with_text"
        raise option_error(name, "a Lance dataset gets labels only; leave it out")
    source = table_at(spec.input.path) or lance_folder(spec.input.path, spec.input.storage_options)
    own = None if source is None else (source.kind, real_path(source.place))
    is_input = own == (kind, real_path(place))
    if is_input and kind != "lance":
        raise option_error("to", "is the input of the spec; name another table", to)
    if not is_input and kind != "iceberg":
        refuse_own_places(spec, place)
    write = {"delta": _write_delta, "iceberg": _write_iceberg, "lance": _write_lance}[kind]
    labels = LabelTable.of(spec, options, cache_dir)
    for _ in range(_ATTEMPTS):
        try:
            written = write(to, place, labels)
        except _Conflict:
            continue
        except ImportError as missing:
            fix = f"needs a package ({one_line(missing)}); pip install 'corpus-assay[{kind}]'"
            raise option_error("to", fix, to) from missing
        return labels.result(to, to, kind, 1, int(written))
    raise UnavailableError(f"{to}: others keep changing the table; run again")


def _unwritten(to: str, error: Exception) -> AssayError:
    """The error of a library that cannot write, or of a place that does not answer."""
    line = f"cannot be written: {one_line(error)}"
    if _DENIED.search(f"{type(error).__name__}: {error}"):
        fix = "use credentials that may write there, or another place"
        return option_error("to", f"{line}; {fix}", to)
    if isinstance(error, ValueError | NotImplementedError):
        return option_error("to", f"{line}; name another table, or change its configuration", to)
    if "://" in to:
        return UnavailableError(f"{to}: {line}; check its configuration, or run again")
    return StorageError(f"{to}: {line}; check the path")


def _columns(to: str, existing: pa.Schema, own: pa.Schema) -> pa.Schema:
    """The columns of the table, and then those of the labels that it does not have.

    SpecError if it has others, or one of another type.
    """
    if "doc_id" not in existing.names:
        fix = "has no column doc_id, by which its rows are found; name another table"
        raise option_error("to", fix, to)
    for field in existing:
        if field.name not in own.names:
            fix = f"has the column {field.name}, and the export does not; drop the column"
            raise option_error("to", f"{fix}, or name another table", to)
        own_type, table_type = _shown(own.field(field.name).type), _shown(field.type)
        if own_type != table_type:
            fix = f"has the column {field.name} as {table_type}, and the export as {own_type}; "
            fix += "name another table, or change the type of the column"
            raise option_error("to", fix, to)
    added = [field for field in own if field.name not in existing.names]
    same = (own.field(field.name).with_nullable(field.nullable) for field in existing)
    return pa.schema([*same, *added])


def _shown(kind: pa.DataType) -> str:
    """The type as it is called in each format."""
    return str(kind).replace("large_", "").replace(" not null", "")


def _upserted(
    labels: LabelTable, old: Iterable[pa.RecordBatch], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of the labels, and then the table's rows of other documents."""
    ids = []
    for rows in labels.rows():
        ids.append(rows.column("doc_id"))
        yield _cast(rows, schema)
    written = pa.chunked_array(ids, pa.string()).cast(schema.field("doc_id").type)
    # — one scan makes one hash table of the ids, and `pc.is_in` one for each batch
    others = ds.Scanner.from_batches(
        (_cast(batch, schema) for batch in old),
        schema=schema,
        filter=~pc.field("doc_id").isin(written),
        batch_readahead=1,
        use_threads=False,
    )
    yield from others.to_batches()


def _cast(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows with the columns of the schema; null where they have none."""
    return pa.RecordBatch.from_struct_array(cast_rows(rows.to_struct_array(), pa.struct(schema)))


def _write_delta(to: str, place: str, labels: LabelTable) -> bool:
    """Whether a version of the table was written: not if the last export has these labels."""
    from deltalake import CommitProperties, DeltaTable, Transaction, exceptions, write_deltalake

    contents = labels.labelled.contents
    key, number = f"assay {contents.spec} {labels.id}", contents.number
    own, value = flat_schema(labels.columns), _value(labels)
    native = native_options(place, labels.labelled.spec.storage_options)
    try:
        try:
            table = DeltaTable(place, storage_options=native)
        except exceptions.TableNotFoundError:
            if "://" not in place and Path(place).is_dir() and any(Path(place).iterdir()):
                fix = "is a folder of other files, and no Delta table; name another folder"
                raise option_error("to", fix, to) from None
            table = DeltaTable.create(place, own, mode="ignore", storage_options=native)
        if table.transaction_version(key) == number:
            ends = (each for each in table.history() if _KEY in each or _TAKES.search(str(each)))
            if next(ends, {}).get(_KEY) == value:
                return False
        configuration = table.metadata().configuration
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            raise option_error("to", "has column mapping; name a table without it", to)
        if configuration.get("delta.appendOnly") == "true":
            raise option_error("to", "is append-only; name a table that is not", to)
        schema = _columns(to, pa.schema(table.schema().to_arrow()), own)
        few = {"batch_size": 16_384, "batch_readahead": 1, "fragment_readahead": 1}
        old = table.to_pyarrow_dataset().to_batches(**few)
        # — of two commits at the same time that both have the transaction `assay`, one is refused
        done = [Transaction(key, number), Transaction("assay", 1)]
        with own_errors(_upserted(labels, old, schema)) as rows:
            write_deltalake(
                table,
                pa.RecordBatchReader.from_batches(schema, rows),
                mode="overwrite",
                schema_mode="merge",
                commit_properties=CommitProperties({_KEY: value}, app_transactions=done),
            )
    except exceptions.CommitFailedError as error:
        raise _Conflict from error
    except exceptions.DeltaProtocolError as error:
        fix = f"cannot be written: {one_line(error)}; name a table without these features"
        raise option_error("to", fix, to) from error
    except (exceptions.DeltaError, OSError) as error:
        raise _unwritten(to, error) from error
    return True


def _value(labels: LabelTable) -> str:
    """The text that a commit, or a column, has of these labels."""
    contents = labels.labelled.contents
    return f"{contents.spec} {contents.number} {labels.id}"


def _write_iceberg(to: str, place: str, labels: LabelTable) -> bool:
    """Whether a version of the table was written: not if the last export has these labels."""
    from pyiceberg.exceptions import CommitFailedException, ValidationException

    catalog, _, name = place.partition("/")
    if not catalog or "." not in name:
        raise option_error("to", "write iceberg://CATALOG/NAMESPACE.TABLE", to)
    try:
        return _upsert_iceberg(to, catalog, name, labels)
    except (CommitFailedException, ValidationException) as error:
        raise _Conflict from error
    except (AssayError, ImportError):
        raise
    except Exception as error:  # — each kind of catalog has a client with errors of its own
        raise _unwritten(to, error) from error


def _upsert_iceberg(to: str, catalog: str, name: str, labels: LabelTable) -> bool:
    """As `_write_iceberg`, with the errors of pyiceberg."""
    from pyiceberg.io.pyarrow import ArrowScan
    from pyiceberg.table.snapshots import ancestors_of

    value = _value(labels)
    # — Iceberg has no integers of 8 or 16 bits
    fields = ((f.name, pa.int32() if f.type in _SMALL else f.type) for f in labels.columns)
    schema = pa.schema([*fields])
    old: Iterable[pa.RecordBatch] = ()
    transaction, table = _begun(to, catalog, name, schema)
    if table is not None:
        snapshots = ancestors_of(table.current_snapshot(), table.metadata)
        summaries = (each.summary for each in snapshots if each.summary is not None)
        ends = (of[_KEY] for of in summaries if of[_KEY] or of.operation.value not in _KEEP)
        if next(ends, None) == value:
            return False
        if not table.spec().is_unpartitioned():
            raise option_error("to", "is partitioned; name a table without partitions", to)
        schema = _columns(to, table.schema().as_arrow(), schema)
        scan = table.scan()
        read = ArrowScan(table.metadata, table.io, scan.projection(), scan.row_filter)
        # — one file at a time: pyiceberg holds all rows of all files that it is given
        old = (batch for task in scan.plan_files() for batch in read.to_record_batches([task]))
        with transaction.update_schema() as update:
            update.union_by_name(schema)
    with own_errors(_upserted(labels, old, schema)) as rows, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # — an empty table has nothing to replace
        # — unlike `append`, it is refused after another commit, so that no row is there twice
        transaction.overwrite(
            pa.RecordBatchReader.from_batches(schema, rows), snapshot_properties={_KEY: value}
        )
    transaction.commit_transaction()
    return True


def _begun(to: str, catalog: str, name: str, schema: pa.Schema) -> tuple[Any, Any]:
    """A transaction, and the table as it is; None if the transaction makes it."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchTableError

    try:
        opened = load_catalog(catalog)
    except ValueError as error:
        fix = f"check the catalog {catalog} in pyiceberg's configuration: {one_line(error)}"
        raise option_error("to", fix, to) from error
    try:
        table = opened.load_table(name)
    except NoSuchTableError:
        opened.create_namespace_if_not_exists(name.rpartition(".")[0])
        return opened.create_table_transaction(name, schema), None
    return table.transaction(), table


def _write_lance(to: str, place: str, labels: LabelTable) -> bool:
    """Whether a version of the dataset was written: not if it has columns of these labels."""
    import lance
    from lance.commit import CommitConflictError

    native = native_options(place, labels.labelled.spec.storage_options)
    try:
        dataset = lance.dataset(place, storage_options=native or None)
    except ValueError as error:
        raise option_error("to", f"there is no Lance dataset: {one_line(error)}", to) from error
    except OSError as error:
        raise _unwritten(to, error) from error
    contents = labels.labelled.contents
    key, value = _KEY.encode(), _value(labels).encode()
    marks = {field.name: (field.metadata or {}).get(key, b"") for field in dataset.schema}
    before = [name for name, mark in marks.items() if mark.split(b" ")[0] == value.split(b" ")[0]]
    names = [each.name for each in labels.columns if each.source[0] in contents.tasks]
    if all(marks.get(name) == value for name in names) and _has_all(dataset, names):
        return False
    if odd := [name for name in names if {".", "`"} & {*name}]:
        fix = f"Lance has no columns with a dot or a backtick in their names, such as {odd[0]}"
        raise option_error("to", f"{fix}; export a file", to)
    if foreign := [name for name in names if name in marks and name not in before]:
        fix = f"has the column {foreign[0]}, which is not of an export of {contents.spec}"
        raise option_error("to", f"{fix}; rename it", to)
    id = labels.labelled.spec.input.id or "doc_id"
    if id not in marks:
        fix = f"has no column {id}, by which its rows are found; name it in input.id of the spec"
        raise option_error("to", fix, to)
    try:
        added = _joined(to, dataset, id, labels, names, before)
        lance.LanceDataset.commit(dataset, added, read_version=dataset.version, max_retries=0)
    except CommitConflictError as error:
        raise _Conflict from error
    except OSError as error:
        raise _unwritten(to, error) from error
    return True


def _has_all(dataset: Any, names: Sequence[str]) -> bool:
    """Whether these columns are in the files of all fragments; not in those appended since."""
    columns = (of for of in dataset.lance_schema.fields() if of.name() in names)
    ids = {of.id() for of in columns if not of.children()}
    files = (fragment.metadata.files for fragment in dataset.get_fragments())
    return all(ids <= {id for file in own for id in file.fields} for own in files)


def _joined(
    to: str, dataset: Any, id: str, labels: LabelTable, names: list[str], before: list[str]
) -> Any:
    """The operation that puts these columns in place of those before: null in other rows."""
    import lance

    flat = flat_schema(tuple(column for column in labels.columns if column.name in names))
    mark = {_KEY.encode(): _value(labels).encode()}
    # — Lance has no new column with the name, or the number, of one that is there; until it has its
    # own, a name has as many bytes, which occur nowhere before it in the bytes of a column
    new = {chr(ord(n[0]) & 31) + n[1:] if n[1:] else n.upper(): n for n in names}
    schema = pa.schema([f.with_name(n).with_metadata(mark) for n, f in zip(new, flat, strict=True)])
    ids, parts, lack_ids = list[pa.Array](), list[pa.RecordBatch](), False
    for batch in labels.rows():
        ids.append(batch.column("doc_id"))
        parts.append(batch.select(names))
        # — the id of a document without one is the hash of its text
        same = pc.equal(batch.column("doc_id"), batch.column("content_hash"))
        lack_ids |= labels.labelled.spec.input.id is not None and pc.any(same).as_py() is True
    values = pa.Table.from_batches(parts, flat).rename_columns([*new]).cast(schema).combine_chunks()
    parts.clear()  # — all labels are held, and only once
    known = pa.chunked_array(ids, pa.string())
    distinct, counts = known.value_counts().flatten()
    if twins := distinct.filter(pc.greater(counts, 1)).to_pylist():
        fix = f"several documents have the id {twins[0]!r}; give each an id of its own"
        raise option_error("to", fix, to)
    matched = without = 0

    def of_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
        nonlocal matched, without
        own = plain_values(rows.column(id))
        texts = [id_text(each) if each is not None and each == each else None for each in own]
        places = pc.index_in(pa.array(texts, pa.string()), value_set=known)
        matched, without = matched + len(places) - places.null_count, without + texts.count(None)
        columns = values.take(places).combine_chunks().columns
        return pa.record_batch([column.chunk(0) for column in columns], schema=schema)

    merged = lance.batch_udf(output_schema=schema)(of_rows)
    merges = [
        fragment.merge_columns(merged, columns=[id], batch_size=_BATCH_ROWS)
        for fragment in dataset.get_fragments()
    ]
    if not matched:
        fix = f"no value of its column {id} is the id of a labelled document; name another dataset"
        raise option_error("to", fix, to)
    if without and lack_ids:
        fix = f"{without} rows have no {id}, by which their labels are found; give each one"
        raise option_error("to", fix, to)
    fragments, schemas = zip(*merges, strict=True)
    old = {of for each in schemas[-1].fields() if each.name() in before for of in ids_of(each)}
    for fragment in fragments:
        fragment.files = [file for file in fragment.files if not old.issuperset(file.fields)]
    return lance.LanceOperation.Merge([*fragments], _exchanged(schemas[-1], before, new))


def _exchanged(schema: Any, before: Sequence[str], new: Mapping[str, str]) -> Any:
    """A Lance schema without the columns before, and with the new ones under their own names."""
    make, (metadata, *fields) = schema.__reduce__()  # — no other method has the numbers
    values = iter(fields)
    kept = []
    for field in schema.fields():
        first, *others = islice(values, sum(1 for _ in ids_of(field)))
        name = field.name()
        renamed = first.replace(name.encode(), new.get(name, name).encode(), 1)
        kept += [] if name in before else [renamed, *others]
    return make(metadata, *kept)
