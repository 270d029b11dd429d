"""The current labels joined with the documents, as flat tables.

Entry points: `export` writes all rows, `head` returns some, with the start of their texts.

There is one row for each document, in the input's order. A single file appears in one step. A
folder has one Parquet file for each shard, and a manifest: the same command writes the missing
files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from glob import escape
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, get_args

import duckdb
import pyarrow as pa
from pydantic import InstanceOf, PlainSerializer

from pipeline.errors import Option, StorageError, option_error
from pipeline.filters.excerpts import excerpts
from pipeline.filters.labelled import LabelledRows, with_text
from pipeline.filters.layout import refuse_own_places, relative_paths, shard_file
from pipeline.filters.older_answers import warn_of_older_answers
from pipeline.filters.run import SHARDS_AT_ONCE
from pipeline.hashes import canonical_json
from pipeline.ledger.flat import csv_rows, flat_columns, flat_schema, flatten, json_values
from pipeline.ledger.rows import INPUT
from pipeline.ledger.snapshot_files import NamedShard
from pipeline.options import ExportOptions
from pipeline.runtime.progress import Send, ignore
from pipeline.sources.rule import Rule, fields_in, named, quoted
from pipeline.spec.schema import JobSpec
from pipeline.stores.named_files import Target, new_file, open_target
from pipeline.verbs.export_layouts import FIRST, SUFFIX, TableFile, layout_files
from pipeline.verbs.label_table import FORMAT, ExportResult, LabelTable, TableFormat, own_errors

# The manifest of a folder. Readers of tables skip names that begin with an underscore.
MANIFEST = "_export.json"
TEXT_CHARS = 500  # of the text of an example row; a text may be very long
_PREPARED: Mapping[TableFormat, Callable[[pa.RecordBatch], pa.RecordBatch]] = {
    "parquet": lambda rows: rows,
    "jsonl": json_values,
    "csv": csv_rows,
}
_ROW_GROUP = 20_480  # rows, which may have texts


def _flat_rows(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    return list(json_values(flatten(rows, flat_columns(rows.schema))).to_pylist())


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a continuation."""

    text: str
    p: float  # of all tokens of the vocabulary


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the model would say to one question about one document."""

    question: str  # the name of the task, or `TASK.LABEL`
    tokens: tuple[Token, ...]  # the likeliest ones, one after the other
    none: str | None  # why there are no tokens


@dataclass(frozen=True, slots=True)
class Examples:
    """Some rows of a snapshot, in the input's order. The JSON form has flat columns."""

    spec: str
    snapshot: int
    documents: int  # of the snapshot
    # Of `open_labels`, with the start of each text.
    rows: Annotated[InstanceOf[pa.RecordBatch], PlainSerializer(_flat_rows)]
    # [rows] with `--why`: what the model would say to each question.
    why: tuple[tuple[Continuation, ...], ...] = ()


def export(spec: JobSpec, options: ExportOptions, *, cache_dir: Path) -> ExportResult:
    """Writes the labels of the spec's last snapshot as one file, or as a folder of files.

    SpecError if the target exists and `overwrite` is not set, or its name has no format.
    StorageError if the export has columns or texts of the input, which changed after it was
    labelled.
    """
    to = options.to
    assert to is not None, options
    format = format_of_file(to)
    if options.layout is not None:
        if format is not None:
            raise option_error("layout", "is for a folder; write --to FOLDER/", options.layout)
        options = replace(options, with_text=True)
    refuse_own_places(spec, to)
    target = open_target(to, spec.storage_options)
    if format is not None:
        new_file(to, spec.storage_options, overwrite=options.overwrite)
    table = LabelTable.of(spec, options, cache_dir)
    files = 1
    if format is None:
        files, created = _write_folder(table, target)
    else:
        write_table(target, format, flat_schema(table.columns), table.rows())
        created = 1
    glob = "" if format else "/**/*.parquet"
    if options.layout is not None:
        glob, format = f"/{FIRST[options.layout]}/**/*{SUFFIX}", "jsonl"
    glob = escape(target.url.rstrip("/")) + glob
    return table.result(target.url, glob, format or "parquet", files, created)


def format_of_file(to: str) -> TableFormat | None:
    """The format of a file; None of a folder; SpecError if its name has no such ending."""
    name = to.rpartition("/")[2].lstrip(".")
    _, dot, suffix = name.rpartition(".")
    if not dot:
        return None
    formats: tuple[TableFormat, ...] = get_args(TableFormat)
    for format in formats:
        if suffix.lower() == format:
            return format
    endings = ", ".join(f".{each}" for each in formats)
    fix = f"end the name of a file in one of {endings}, and the name of a folder in /"
    raise option_error("to", fix, to)


def write_table(
    target: Target,
    format: TableFormat,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    query: str = "from exported",
) -> None:
    """Writes a file of these rows, or of a query of them, in one step.

    An error of `batches` is raised as it is.
    """
    prepared = _PREPARED[format]
    written = prepared(pa.RecordBatch.from_pylist([], schema)).schema
    texts = [named(f.name) for f in written if f.type in (pa.string(), pa.large_string())]
    options = {
        "parquet": f"format parquet, compression zstd, row_group_size {_ROW_GROUP}",
        "jsonl": f"format json, compression {'gzip' if target.url.endswith('.gz') else 'none'}",
        "csv": f"format csv, header true, force_quote ({', '.join(texts)})",
    }
    with (
        own_errors(map(prepared, batches)) as rows,
        target.replaced() as path,
        duckdb.connect(config={"threads": 1}) as connection,
    ):
        connection.register("exported", pa.RecordBatchReader.from_batches(written, rows))
        copy = f"copy ({query}) to {quoted(str(path))} (use_tmp_file false, {options[format]})"
        try:
            connection.execute(copy)
        except duckdb.Error as error:
            raise StorageError(f"{target.url}: cannot be written: {error}") from error


def _write_folder(table: LabelTable, target: Target) -> tuple[int, int]:
    """Writes the folder's missing files; the numbers of all and of these."""
    labelled, shards = table.labelled, table.labelled.contents.shards
    source, schema = labelled.spec.input, flat_schema(table.columns)
    relative = relative_paths(source.path, {s.path for s in shards}, source.storage_options)
    layout = table.options.layout
    files: dict[str, tuple[TableFile, ...]] = {}
    for shard in shards:
        name = shard_file(relative[shard.path], shard, "parquet")
        files[shard.sid] = (TableFile(name),)
        if layout is not None:
            stem = name.removesuffix(".parquet")
            files[shard.sid] = layout_files(layout, stem, table.columns, labelled.spec.name)
    names = [file.name for of_shard in files.values() for file in of_shard]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "id": table.id,
        "spec": labelled.spec.name,
        "output": labelled.store.url,
        "snapshot": labelled.contents.number,
        **table.asked,
        "files": names,
        "finished": True,
    }
    existing = _existing_files(target, table, names)
    todo = [s for s in shards if not existing.issuperset(each.name for each in files[s.sid])]
    file = target.below(MANIFEST)
    if todo or MANIFEST not in existing:
        file.write(canonical_json({**manifest, "finished": False}))

    format: TableFormat = "parquet" if layout is None else "jsonl"

    def write_one(shard: NamedShard) -> None:
        rows = table.flat(labelled.read(shard, table.shards), shard)
        # — of one shard, for several files
        batches: Iterable[pa.RecordBatch] = rows if layout is None else [*rows]
        for each in files[shard.sid]:
            write_table(target.below(each.name), format, schema, batches, each.query)

    with ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="export") as pool:
        for _ in pool.map(write_one, todo):
            pass
    if file.read() != canonical_json(manifest):
        file.write(canonical_json(manifest))
    return len(names), sum(len(files[shard.sid]) for shard in todo)


def _existing_files(target: Target, table: LabelTable, names: list[str]) -> set[str]:
    """The names of the folder's files, which all belong to the export of this table as `names`.

    SpecError if there are others. With `overwrite`, the files of another export are deleted.
    """
    target.drop_unfinished()
    existing = {name for name in target.files() if not name.rpartition("/")[2].startswith(".")}
    if not existing:
        return existing
    if MANIFEST not in existing:
        fix = f"is a folder with {len(existing):,} files of other programs; name another folder"
        raise option_error("to", fix, target.url)
    try:
        manifest = json.loads(target.below(MANIFEST).read())
        id, files, of = (manifest[key] for key in ("id", "files", "spec"))
        replaced = {MANIFEST, *files} & existing
    except (ValueError, LookupError, TypeError, RecursionError):
        fix = f"is a folder whose {MANIFEST} no export has written; name another folder"
        raise option_error("to", fix, target.url) from None
    if (id, files) == (table.id, names):
        return existing
    if not table.options.overwrite:
        fix = f"holds another export (snapshot {manifest.get('snapshot')} of {of}); "
        fix += "name another folder, or add --overwrite to replace its files"
        raise option_error("to", fix, target.url)
    for name in sorted(replaced, key=lambda name: name == MANIFEST):  # — last: it names the others
        target.below(name).delete()
    return existing - replaced


def head(
    spec: JobSpec, options: ExportOptions, *, cache_dir: Path, announce: Send = ignore
) -> Examples:
    """At most `options.head` rows of the spec's last snapshot that satisfy `options.where`.

    The choice depends on the hashes of shards and texts alone, and is spread over shards.
    `announce` takes the phases of `why`. SpecError if the condition is wrong. StorageError if a
    text is no longer what was labelled.
    """
    assert options.head is not None, options
    place = Option("where")
    read = () if options.where is None else fields_in(options.where, INPUT, place=place)
    inputs = {**dict.fromkeys(read, place), **dict.fromkeys(options.columns, Option("columns"))}
    labelled = LabelledRows.of(spec, inputs)
    contents = labelled.contents
    warn_of_older_answers(spec, labelled.store, contents, cache_dir)
    sql = options.where
    rule = None if sql is None else Rule(sql, labelled.schema, place=place)
    rows = _chosen(labelled, rule, options.head, cache_dir)
    places = zip(rows["path"].to_pylist(), rows["row"].to_pylist(), repeat(0))
    shown = excerpts(labelled, places, chars=None)
    starts = [None if of.text is None else of.text[:TEXT_CHARS] for of in shown]
    with_starts = with_text(rows, pa.array(starts, pa.large_string()))
    why: tuple[tuple[Continuation, ...], ...] = ()
    if options.why:
        from pipeline.verbs.continuations import continuations  # — torch: other rows need no model

        why = continuations(spec, rows, shown, cache_dir=cache_dir, announce=announce)
    return Examples(spec.name, contents.number, contents.asked, with_starts, why)


def _chosen(
    labelled: LabelledRows, rule: Rule | None, most: int, cache_dir: Path
) -> pa.RecordBatch:
    """The chosen rows: of at least `most` shards, those whose texts have the smallest hashes."""
    contents = labelled.contents
    shuffled = replace(contents, files=contents.files.sort_by("sid"))
    shards = labelled.shards(cache_dir)[0] if labelled.inputs else {}
    candidates, count = [labelled.schema.empty_table()], 0
    for shards_read, rows in enumerate(labelled.batches(shards, shuffled), start=1):
        accepted = rows if rule is None else rows.filter(rule.verdicts(rows))
        candidates.append(_smallest_hashes(pa.Table.from_batches([accepted]), most))
        count += accepted.num_rows
        if count >= most and shards_read >= most:
            break
    chosen = _smallest_hashes(pa.concat_tables(candidates), most)
    in_order = chosen.sort_by([("path", "ascending"), ("row", "ascending")])
    return pa.RecordBatch.from_struct_array(in_order.to_struct_array().combine_chunks())


def _smallest_hashes(rows: pa.Table, n: int) -> pa.Table:
    keys = [(name, "ascending") for name in ("content_hash", "path", "row")]
    return rows.sort_by(keys).slice(0, n)
