"""The current labels joined with the documents, as flat tables.

Entry points: `export` writes all rows, `head` returns some, with the start of their texts.

There is one row for each document, in the input's order. A single file appears in one step. A
folder has one file for each shard, and a manifest: the same command writes the missing files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Annotated, Any, get_args

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pydantic import InstanceOf, PlainSerializer, computed_field

from pipeline.errors import Option, option_error
from pipeline.filters.excerpts import excerpts
from pipeline.filters.labelled import (
    current_labels,
    identity_of,
    labelled_shards,
    labelled_texts,
    warn_of_older_answers,
    with_text,
    with_text_schema,
)
from pipeline.filters.layout import refuse_own_places, relative_paths, shard_file
from pipeline.filters.run import SHARDS_AT_ONCE
from pipeline.filters.writers import row_groups
from pipeline.hashes import canonical_json, sha256_hex
from pipeline.ledger.columns import LABELS_TYPE
from pipeline.ledger.flat import (
    FlatColumn,
    defuse_formulas,
    flat_columns,
    flat_schema,
    flatten,
    joined_labels,
    json_rows,
)
from pipeline.ledger.rows import aligned_batches, asked_rows, read_shard, wide_schema
from pipeline.ledger.snapshot_files import NamedShard
from pipeline.ledger.snapshots import Contents
from pipeline.options import ExportOptions, TableFormat
from pipeline.sources.rule import Rule
from pipeline.sources.shards import Shard
from pipeline.spec.schema import JobSpec
from pipeline.stores.named_files import Target, new_file, open_target
from pipeline.stores.store import Store, open_store

FORMATS: tuple[TableFormat, ...] = get_args(TableFormat)
# The manifest of a folder. Readers of tables skip names that begin with an underscore.
MANIFEST = "_export.json"
FORMAT = 1
TEXT_CHARS = 500  # of the text of an example row; a text may be very long


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote, and where."""

    to: str
    glob: str  # of all files
    format: TableFormat
    snapshot: int
    rows: int
    files: int
    created: int  # files; 0 if everything existed
    columns: tuple[FlatColumn, ...]
    missing_rows: int  # rows of the input that the snapshot does not have
    missing_files: int
    new_files: int  # files that the input has now and the snapshot does not know

    @computed_field
    @property
    def complete(self) -> bool:
        return not self.missing_rows and not self.missing_files


def _flat_rows(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    return list(json_rows(flatten(rows, flat_columns(rows.schema))))


@dataclass(frozen=True, slots=True)
class Examples:
    """Some rows of a snapshot, in the input's order. The JSON form has flat columns."""

    spec: str
    snapshot: int
    documents: int  # of the snapshot
    # Of `open_labels`, with the start of each text.
    rows: Annotated[InstanceOf[pa.RecordBatch], PlainSerializer(_flat_rows)]


@dataclass(frozen=True, slots=True)
class _Export:
    """One export: a snapshot, the columns, and the place that it is written to."""

    spec: JobSpec
    options: ExportOptions
    store: Store
    contents: Contents
    rows_schema: pa.Schema  # of `open_labels`
    columns: tuple[FlatColumn, ...]
    format: TableFormat
    target: Target

    def write(self, target: Target, batches: Iterable[pa.RecordBatch]) -> None:
        """Writes a file of these rows."""
        schema = flat_schema(self.columns)
        with target.replaced() as path, WRITERS[self.format](path, schema) as write:
            if self.format == "parquet":
                for table in row_groups(batches, schema):
                    write(table)
            else:
                for batch in batches:
                    write(pa.Table.from_batches([batch]))


def export(spec: JobSpec, options: ExportOptions, *, cache_dir: Path) -> ExportResult:
    """Writes the labels of the spec's last snapshot as one file, or as a folder of files.

    SpecError if the target exists and `overwrite` is not set, or its name has no format.
    StorageError if texts are wanted and the input changed after it was labelled.
    """
    assert options.to is not None, options
    format, is_folder = format_and_kind(options.to, options.format)
    refuse_own_places(spec, options.to)
    store = open_store(spec.output, spec.storage_options)
    contents = current_labels(spec, store)
    warn_of_older_answers(spec, store, contents, cache_dir)
    rows_schema = wide_schema(contents, list(contents.tasks))
    columns = flat_columns(with_text_schema(rows_schema) if options.with_text else rows_schema)
    target = open_target(options.to, spec.storage_options)
    if not is_folder:
        new_file(options.to, spec.storage_options, overwrite=options.overwrite)
    job = _Export(spec, options, store, contents, rows_schema, columns, format, target)
    created, new_files = (_write_folder if is_folder else _write_file)(job, cache_dir)
    return ExportResult(
        to=target.url,
        glob=escape(target.url.rstrip("/")) + f"/**/*.{format}" * is_folder,
        format=format,
        snapshot=contents.number,
        rows=contents.asked,
        files=len(contents.shards) if is_folder else 1,
        created=created,
        columns=columns,
        missing_rows=contents.missing_rows,
        missing_files=contents.missing_files,
        new_files=new_files,
    )


def format_and_kind(to: str, format: TableFormat | None) -> tuple[TableFormat, bool]:
    """The format, and whether the target is a folder; SpecError if its name does not say so."""
    name = to.rpartition("/")[2]
    suffix = name.lstrip(".").rpartition(".")[2] if "." in name.lstrip(".") else ""
    if not suffix:
        return format or "parquet", True
    by_suffix = next((each for each in FORMATS if each == suffix.lower()), None)
    if by_suffix is None:
        endings = ", ".join(f".{each}" for each in FORMATS)
        fix = f"end the name of a file in one of {endings}, and the name of a folder in /"
        raise option_error("to", fix, to)
    if format not in (None, by_suffix):
        fix = f"--to ends in .{suffix}; leave --format out, or change the name"
        raise option_error("format", fix, format)
    return by_suffix, False


def _write_file(job: _Export, cache_dir: Path) -> tuple[int, int]:
    """Writes one file. Returns the number of written files, and of new files in the input."""
    shards, new_files = _shards_with_text(job, cache_dir)

    def rows() -> Iterator[pa.RecordBatch]:
        answers = aligned_batches(job.store, job.contents, job.rows_schema)
        for named, batch in zip(job.contents.shards, answers, strict=True):
            yield from _flat(job, batch, shards.get(named.sid))

    job.write(job.target, rows())
    return 1, new_files


def _write_folder(job: _Export, cache_dir: Path) -> tuple[int, int]:
    """Writes the folder's missing files. Returns their number, and that of new input files."""
    source, shards = job.spec.input, job.contents.shards
    relative = relative_paths(source.path, {s.path for s in shards}, source.storage_options)
    names = {shard.sid: shard_file(relative[shard.path], shard, job.format) for shard in shards}
    manifest = _manifest(job, names)
    existing = _existing_files(job, manifest["id"])
    todo = [shard for shard in shards if names[shard.sid] not in existing]
    new_files = 0
    file = job.target.below(MANIFEST)
    finished = MANIFEST in existing and json.loads(file.read())["finished"]
    if todo or not finished:
        inputs, new_files = _shards_with_text(job, cache_dir)
        file.write(canonical_json(manifest))

        def write_one(named: NamedShard) -> None:
            schema, tasks = job.rows_schema, list(job.contents.tasks)
            batch = read_shard(job.store, named, schema=schema, tasks=tasks)
            rows = _flat(job, batch, inputs.get(named.sid))
            job.write(job.target.below(names[named.sid]), rows)

        with ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="export") as pool:
            for _ in pool.map(write_one, todo):
                pass
        file.write(canonical_json({**manifest, "finished": True}))
    return len(todo), new_files


def _manifest(job: _Export, names: Mapping[str, str]) -> dict[str, Any]:
    """What the folder holds; its id changes with each value in the files."""
    content = {"file_format": job.format, "with_text": job.options.with_text}
    identity = {"format": FORMAT, **content, **identity_of(job.contents)}
    files = [
        {"name": names[s.sid], "input": s.path, "start_row": s.start_row, "rows": s.rows}
        for s in job.contents.shards
    ]
    return {
        "format": FORMAT,
        "id": sha256_hex(canonical_json(identity), 16),
        "spec": job.spec.name,
        "output": job.store.url,
        "snapshot": job.contents.number,
        **content,
        "columns": {column.name: list(column.source) for column in job.columns},
        "rows": job.contents.asked,
        "files": files,
        "finished": False,
    }


def _existing_files(job: _Export, id: str) -> set[str]:
    """The names of the folder's files, which all belong to the export with this id.

    SpecError if there are others. With `overwrite`, the files of another export are deleted.
    """
    target = job.target
    target.drop_unfinished()
    existing = {name for name in target.files() if not name.rpartition("/")[2].startswith(".")}
    if not existing:
        return set()
    if MANIFEST not in existing:
        fix = f"is a folder with {len(existing):,} files of other programs; name another folder"
        raise option_error("to", fix, target.url)
    manifest = json.loads(target.below(MANIFEST).read())
    if manifest["id"] == id:
        return existing
    if not job.options.overwrite:
        other = f"{manifest['file_format']}, snapshot {manifest['snapshot']} of {manifest['spec']}"
        fix = f"holds another export ({other}{', with text' if manifest['with_text'] else ''}); "
        fix += "name another folder, or add --overwrite to replace its files"
        raise option_error("to", fix, target.url)
    names = {file["name"] for file in manifest["files"]} & existing
    for name in (*sorted(names), MANIFEST):
        target.below(name).delete()
    return existing - names - {MANIFEST}


def _shards_with_text(job: _Export, cache_dir: Path) -> tuple[Mapping[str, Shard], int]:
    """The input's shards by id, and its new files; nothing where texts are not wanted."""
    if not job.options.with_text:
        return {}, 0
    return labelled_shards(job.spec, job.store, job.contents, cache_dir)


def _flat(job: _Export, rows: pa.RecordBatch, shard: Shard | None) -> Iterator[pa.RecordBatch]:
    """A shard's rows as flat columns, with the texts of a shard of the input."""
    rows = asked_rows(job.contents, rows)
    if shard is None:
        yield flatten(rows, job.columns)
        return
    start = 0
    hashes, options = rows.column("content_hash"), job.spec.input.storage_options
    for texts in labelled_texts(shard, options, hashes, rows.column("row")):
        part = rows.slice(start, len(texts))
        yield flatten(with_text(part, texts), job.columns)
        start += len(texts)


_Write = Callable[[pa.Table], object]


@contextmanager
def _parquet(path: Path, schema: pa.Schema) -> Iterator[_Write]:
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        yield lambda table: writer.write_table(table, row_group_size=max(1, table.num_rows))


@contextmanager
def _csv(path: Path, schema: pa.Schema) -> Iterator[_Write]:
    """Lists are JSON in a CSV file, those of labels one text; no text is a formula there."""
    lists = [i for i, field in enumerate(schema) if pa.types.is_list(field.type)]
    for index in lists:
        schema = schema.set(index, schema.field(index).with_type(pa.string()))

    def write(table: pa.Table) -> None:
        for index in lists:
            name = schema.names[index]
            if table.schema.field(index).type == LABELS_TYPE:
                texts = joined_labels(table.column(index))
                table = table.set_column(index, name, texts)
                continue
            values = [row[name] for row in json_rows(table.select([name]))]
            texts = [None if v is None else json.dumps(v, ensure_ascii=False) for v in values]
            table = table.set_column(index, name, pa.array(texts, pa.string()))
        for index, column in enumerate(table.columns):
            if table.schema.types[index] in (pa.string(), pa.large_string()):
                name = table.schema.names[index]
                table = table.set_column(index, name, defuse_formulas(column))
        writer.write_table(table)

    with pyarrow.csv.CSVWriter(path, schema) as writer:
        yield write


@contextmanager
def _jsonl(path: Path, _schema: pa.Schema) -> Iterator[_Write]:
    with path.open("wb") as file:
        yield lambda table: file.writelines(
            json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in json_rows(table)
        )


WRITERS = {"parquet": _parquet, "jsonl": _jsonl, "csv": _csv}


def head(spec: JobSpec, options: ExportOptions, *, cache_dir: Path) -> Examples:
    """At most `options.head` rows of the spec's last snapshot that satisfy `options.where`.

    The choice depends on the hashes of shards and texts alone, and is spread over shards. SpecError
    if the condition is wrong. StorageError if a text is no longer what was labelled.
    """
    assert options.head is not None, options
    store = open_store(spec.output, spec.storage_options)
    contents = current_labels(spec, store)
    warn_of_older_answers(spec, store, contents, cache_dir)
    schema = wide_schema(contents, list(contents.tasks))
    rule = None if options.where is None else Rule(options.where, schema, place=Option("where"))
    rows = _chosen(store, contents, schema, rule, options.head)
    shown = excerpts(store, contents, rows, spec.input.storage_options, chars=TEXT_CHARS)
    texts = pa.array([excerpt.text for excerpt in shown], pa.large_string())
    return Examples(spec.name, contents.number, contents.asked, with_text(rows, texts))


def _chosen(
    store: Store, contents: Contents, schema: pa.Schema, rule: Rule | None, n: int
) -> pa.RecordBatch:
    """The chosen rows: of at least `n` shards, those whose texts have the smallest hashes."""
    shuffled = replace(contents, files=contents.files.sort_by("sid"))
    candidates = [schema.empty_table()]
    count = 0
    for shards_read, batch in enumerate(aligned_batches(store, shuffled, schema), start=1):
        rows = asked_rows(contents, batch)
        rows = rows if rule is None else rows.filter(rule.verdicts(rows))
        candidates.append(_smallest_hashes(pa.Table.from_batches([rows]), n))
        count += rows.num_rows
        if count >= n and shards_read >= n:
            break
    chosen = _smallest_hashes(pa.concat_tables(candidates), n)
    in_order = chosen.sort_by([("path", "ascending"), ("row", "ascending")])
    return pa.RecordBatch.from_struct_array(in_order.to_struct_array().combine_chunks())


def _smallest_hashes(rows: pa.Table, n: int) -> pa.Table:
    keys = [(name, "ascending") for name in ("content_hash", "path", "row")]
    return rows.sort_by(keys).slice(0, n)
