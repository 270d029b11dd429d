"""The rows of an export, as flat columns, and its report.

Entry points: `LabelTable.of`, and `own_errors` for libraries that take the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import computed_field

from pipeline.errors import Option
from pipeline.filters.labelled import LabelledRows, identity_of, labelled_documents, with_text
from pipeline.filters.older_answers import warn_of_older_answers
from pipeline.hashes import canonical_json, sha256_hex
from pipeline.ledger.flat import FlatColumn, flat_columns, flatten
from pipeline.ledger.snapshot_files import NamedShard
from pipeline.options import ExportOptions
from pipeline.sources.shards import Shard
from pipeline.spec.locations import TableKind
from pipeline.spec.schema import JobSpec

TableFormat = Literal["parquet", "jsonl", "csv"]
FORMAT = 2  # of an export of several files


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote, and where."""

    to: str
    glob: str  # of all files
    format: TableFormat | TableKind
    snapshot: int
    rows: int
    files: int  # or one table
    created: int  # files, or versions of the table; 0 if everything existed
    columns: tuple[FlatColumn, ...]
    missing_rows: int  # rows of the input that the snapshot does not have
    missing_files: int
    new_files: int  # files of the input that are not in the snapshot

    @computed_field
    @property
    def complete(self) -> bool:
        return not self.missing_rows and not self.missing_files


@dataclass(frozen=True, slots=True)
class LabelTable:
    """The rows of one export, and their columns."""

    labelled: LabelledRows
    options: ExportOptions
    columns: tuple[FlatColumn, ...]
    shards: Mapping[str, Shard]  # of the input; {} where it is not read
    new_files: int

    @classmethod
    def of(cls, spec: JobSpec, options: ExportOptions, cache_dir: Path) -> LabelTable:
        """The table of the spec's last snapshot.

        StorageError if the export has columns or texts of the input, which changed after it was
        labelled.
        """
        labelled = LabelledRows.of(spec, dict.fromkeys(options.columns, Option("columns")))
        warn_of_older_answers(spec, labelled.store, labelled.contents, cache_dir)
        rows = pa.RecordBatch.from_pylist([], labelled.schema)
        if options.with_text:
            rows = with_text(rows, pa.array([], pa.large_string()))
        reads_input = options.with_text or options.columns
        shards, new_files = labelled.shards(cache_dir) if reads_input else ({}, 0)
        return cls(labelled, options, flat_columns(rows.schema), shards, new_files)

    @property
    def asked(self) -> dict[str, Any]:
        """The options that the rows depend on."""
        layout = {} if self.options.layout is None else {"layout": self.options.layout}
        own = {"with_text": self.options.with_text, "inputs": list(self.options.columns)}
        return own | layout

    @property
    def id(self) -> str:
        """A hash that changes with each answer, input file and option."""
        content = [FORMAT, self.asked, identity_of(self.labelled.contents)]
        return sha256_hex(canonical_json(content), 16)

    def rows(self) -> Iterator[pa.RecordBatch]:
        """All rows in the input's order, as flat columns."""
        pairs = zip(self.labelled.contents.shards, self.labelled.batches(self.shards), strict=True)
        return (flat for named, batch in pairs for flat in self.flat(batch, named))

    def flat(self, rows: pa.RecordBatch, shard: NamedShard) -> Iterator[pa.RecordBatch]:
        """The rows of a shard as flat columns, with their texts if the options have `with_text`."""
        if not self.options.with_text:
            yield flatten(rows, self.columns)
            return
        start, options = 0, self.labelled.spec.input.storage_options
        hashes, numbers = rows.column("content_hash"), rows.column("row")
        for documents in labelled_documents(self.shards[shard.sid], options, hashes, numbers):
            part = rows.slice(start, len(documents))
            yield flatten(with_text(part, documents["text"].combine_chunks()), self.columns)
            start += len(documents)

    def result(
        self, to: str, glob: str, format: TableFormat | TableKind, files: int, created: int
    ) -> ExportResult:
        """The report of an export that wrote these rows."""
        contents = self.labelled.contents
        return ExportResult(
            to=to,
            glob=glob,
            format=format,
            snapshot=contents.number,
            rows=contents.asked,
            files=files,
            created=created,
            columns=self.columns,
            missing_rows=contents.missing_rows,
            missing_files=contents.missing_files,
            new_files=self.new_files,
        )


@contextmanager
def own_errors(rows: Iterator[pa.RecordBatch]) -> Iterator[Iterator[pa.RecordBatch]]:
    """The rows for a library that replaces their errors by its own; these are raised instead."""
    stopped: list[BaseException] = []

    def watched() -> Iterator[pa.RecordBatch]:
        try:
            yield from rows
        except GeneratorExit:  # — the library takes no more rows
            raise
        except BaseException as error:
            stopped.append(error)
            raise

    try:
        yield watched()
    except BaseException as error:
        if stopped and error is not stopped[0]:
            raise stopped[0] from error
        raise
