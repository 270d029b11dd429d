"""The documents that a spec's last snapshot has labels of, joined with their texts in the input.

Entry points: `LabelledRows` for the rows with columns of the input; `labelled_documents` for the
texts. A text is read again only if it is the text that was labelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import StorageError
from pipeline.filters.inputs import check_columns_of, doc_field, with_inputs
from pipeline.ledger.cuts import CutLog
from pipeline.ledger.rows import (
    DOCUMENT_SCHEMA,
    TEXT_COLUMN,
    aligned_batches,
    asked_rows,
    read_shard,
    wide_schema,
)
from pipeline.ledger.snapshot_files import NamedShard
from pipeline.ledger.snapshots import Contents, last_contents
from pipeline.sources.shards import Shard
from pipeline.sources.source import find_objects, read_documents
from pipeline.sources.streams import Options
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """The rows of a spec's last snapshot, with columns of the input beside the answers.

    The columns of the input are the fields of the column `doc`.
    """

    spec: JobSpec
    store: Store
    contents: Contents
    inputs: Mapping[str, str]  # names of columns, each with the option or key that names it

    @classmethod
    def of(cls, spec: JobSpec, inputs: Mapping[str, str] | None = None) -> LabelledRows:
        """StorageError if the snapshot has other tasks or labels than the spec."""
        store = open_store(spec.output, spec.storage_options)
        contents = last_contents(store, spec.name)
        own = {task.name: tuple(task.labels) for task in spec.tasks}
        if {name: task.labels for name, task in contents.tasks.items()} != own:
            raise StorageError(
                f"{store.url}: snapshot {contents.number} of {spec.name} has other tasks or labels "
                f"than the spec has now; run `assay run` first"
            )
        return cls(spec, store, contents, inputs or {})

    @property
    def answers_schema(self) -> pa.Schema:
        """The columns of `open_labels`."""
        return wide_schema(self.contents, list(self.contents.tasks))

    @property
    def schema(self) -> pa.Schema:
        """The columns of `open_labels`, and `doc` if there are columns of the input."""
        doc = [doc_field([*self.inputs])] if self.inputs else []
        return pa.schema([*self.answers_schema, *doc])

    def shards(self, cache_dir: Path) -> tuple[dict[str, Shard], int]:
        """The snapshot's shards in the input by id, and the number of files that it does not have.

        Raises:
            SpecError: The input does not have the columns.
            StorageError: The input has another version of a labelled file by now.
        """
        source, contents = self.spec.input, self.contents
        options = source.storage_options
        objects = find_objects(source.path, cache_dir, options, output=self.store.url)
        cut = CutLog(self.store).cuts_of([item.version(source.columns) for item in objects]).shards
        shards = {shard.id: shard for shard in cut}
        for named in contents.shards:
            if named.sid not in shards:
                raise StorageError(
                    f"{named.path}: is gone, or differs from what snapshot {contents.number} "
                    f"labelled; run `assay run` to label the input as it is now"
                )
        read = [shards[named.sid] for named in contents.shards]
        for place in dict.fromkeys(self.inputs.values()):
            names = [name for name, own in self.inputs.items() if own == place]
            check_columns_of(read, options, names, place=place)
        paths = {item.path for item in objects}
        empty = paths - {shard.path for shard in cut}
        return shards, len(paths - {*contents.files["path"].unique().to_pylist()} - empty)

    def read(self, named: NamedShard, shards: Mapping[str, Shard]) -> pa.RecordBatch:
        """The rows of one shard, without those that the run's condition left out."""
        tasks = list(self.contents.tasks)
        rows = read_shard(self.store, named, schema=self.answers_schema, tasks=tasks)
        return self._joined(rows, named, shards)

    def batches(
        self, shards: Mapping[str, Shard], contents: Contents | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of each shard; of `contents`, the same snapshot in another order."""
        own = contents or self.contents
        batches = aligned_batches(self.store, own, self.answers_schema)
        for named, rows in zip(own.shards, batches, strict=True):
            yield self._joined(rows, named, shards)

    def _joined(
        self, rows: pa.RecordBatch, named: NamedShard, shards: Mapping[str, Shard]
    ) -> pa.RecordBatch:
        asked = asked_rows(self.contents, rows)
        if not self.inputs:
            return asked
        options = self.spec.input.storage_options
        return with_inputs(asked, shards[named.sid], options, [*self.inputs])


def identity_of(contents: Contents) -> dict[str, Any]:
    """JSON that changes with each answer and input file, and not with the snapshot's number."""
    return {
        "tasks": {name: task.fp for name, task in contents.tasks.items()},
        "shards": [
            [shard.path, shard.start_row, shard.rows]
            + [file.hash or file.key for file in (shard.documents, *shard.labels.values())]
            for shard in contents.shards
        ],
    }


def labelled_documents(
    shard: Shard,
    options: Options,
    hashes: pa.Array,  # [docs]: of the texts that were labelled
    rows: pa.Array | None = None,  # [docs]: in the input object; None: all rows of the shard
) -> Iterator[pa.Table]:
    """These documents of the shard in order, a part at a time, with images if they have any.

    StorageError if a document is not the one that was labelled.
    """
    done, start = 0, shard.piece.start_row
    # — read with the id column, as for labelling: a damaged id page made its rows unreadable too
    for documents in read_documents(shard, options):
        end = start + len(documents)
        if rows is not None:
            own = rows.slice(done)
            places = pc.subtract(own.filter(pc.less(own, end)), start)
            documents = documents.take(places)
        read = documents.column("content_hash").combine_chunks()
        labelled = hashes.slice(done, len(read))
        if not read.equals(labelled):
            pairs = zip(read.to_pylist(), labelled.to_pylist(), strict=False)
            place = next((n for n, (a, b) in enumerate(pairs) if a != b), len(labelled))
            row = start + place if rows is None else rows[done + place]
            raise StorageError(
                f"{shard.path}: row {row} is not the text that was labelled; run `assay run` to "
                f"label the file as it is now"
            )
        yield documents
        done, start = done + len(read), end
    if done != len(hashes):
        raise StorageError(
            f"{shard.path}: has {done} rows, and {len(hashes)} were labelled; run `assay run` to "
            f"label the file as it is now"
        )


def with_text(rows: pa.RecordBatch, texts: pa.Array) -> pa.RecordBatch:
    """The rows of `open_labels` with the column `TEXT_COLUMN` before the tasks."""
    return rows.add_column(len(DOCUMENT_SCHEMA), pa.field(TEXT_COLUMN, pa.large_string()), texts)
