"""The rows that travel between the stages of the Ray graph. One block of rows is one shard.

Entry points: `work_rows` for what enters the graph, `ReadShard` and `LabelledShard` for what the
stages exchange, `ShardCounts` for what leaves it. No other module names their columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import TypeAdapter

from pipeline.errors import AssayError, UnavailableError, one_line
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.failed_rows import FileCounts
from pipeline.ledger.label_files import LabelFile

Bools = NDArray[np.bool_]
# The columns with what is of the whole shard, as JSON: its work item, and the rest.
_WORK, _HEADER = "work", "header"
_WORK_ITEM = TypeAdapter(WorkItem)
_READ = TypeAdapter(tuple[Mapping[str, Mapping[str, int]], int])


def work_rows(work_items: Sequence[WorkItem]) -> list[dict[str, str]]:
    """A row for each work item."""
    return [{_WORK: _WORK_ITEM.dump_json(item).decode()} for item in work_items]


def work_items_of(block: pa.Table) -> Iterator[WorkItem]:
    """The work items that `work_rows` wrote, or that of the shard in the block."""
    for text in block.column(_WORK).unique().to_pylist():
        yield _WORK_ITEM.validate_json(text)


@dataclass(frozen=True, slots=True)
class ReadShard:
    """A shard's documents as they were read, and the answers that they already have."""

    work: WorkItem
    # With the columns of a documents file; also with the texts and images, if some may be asked.
    documents: pa.Table
    inside: Bools  # [docs]: whether the document is in the slice
    # By version of a task: [docs] rows of label files, null without an answer.
    answers: Mapping[str, pa.StructArray]
    # By version: how many rows are of which other shard.
    reused: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    undecided: int = 0  # rows on which `--where` cannot be computed

    def to_table(self) -> pa.Table:
        # — a version has a slash in its name
        columns = {"inside": pa.array(self.inside), **self.answers}
        header = _READ.dump_json((self.reused, self.undecided))
        return _with_columns(self.documents, columns, self.work, header)

    @classmethod
    def from_table(cls, block: pa.Table) -> ReadShard:
        work, header, documents, columns = _parts(block)
        reused, undecided = _READ.validate_json(header)
        return cls(
            work=work,
            documents=documents,
            inside=np.array(columns.pop("inside").to_numpy(zero_copy_only=False), np.bool_),
            answers=columns,
            reused=reused,
            undecided=undecided,
        )


@dataclass(frozen=True, slots=True)
class TaskScores:
    """One task's answers as log-probabilities; a row of NaN is a document without an answer."""

    status: Sequence[str]  # [docs]
    log_probs: NDArray[np.float32]  # [docs, kept]
    log_mass: NDArray[np.float32]  # [docs]: of all labels that were scored
    label_ids: NDArray[np.int32] | None  # [docs, kept]: which labels; None: every label in order
    levels: NDArray[np.float32] | None  # [docs, levels]: of the best path; NaN below its end


@dataclass(frozen=True, slots=True)
class LabelledDocuments:
    """The model's answers about documents, before they become rows of label files."""

    n_tokens: NDArray[np.int32]  # [docs]
    n_chunks: NDArray[np.int16]  # [docs]
    scores: Mapping[str, TaskScores]  # by task


@dataclass(frozen=True, slots=True)
class LabelCost:
    """What labelling some documents took."""

    label_seconds: float = 0.0
    asked_rows: int = 0  # rows that a model was asked about
    prefix_tokens_computed: int = 0
    question_tokens_computed: int = 0


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """The counts of one shard, or why it could not be read, labelled or committed."""

    sid: str
    rows: int
    status: Mapping[str, int]  # rows by status
    labels: Mapping[str, Mapping[str, int]]  # rows by label, by task; one may have several
    costs: Mapping[str, LabelCost]  # by the number of the reader, of those that were asked
    created: int = 0  # objects
    outside: int = 0  # rows of the input that were read and are not in the slice
    undecided: int = 0  # of these, rows on which `--where` cannot be computed
    reused: int = 0  # rows with the answers of other shards
    answered: Mapping[str, int] = field(default_factory=dict)  # rows with an answer, by task
    # Of tasks with a cascade: rows by the stage that decided, by task.
    stages: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # Of the documents file and the tasks' label files, if they were created, by key.
    files: Mapping[str, FileCounts] = field(default_factory=dict)
    error: str | None = None  # with the place of the shard, in one line
    unavailable: bool = False  # whether the error may be gone later
    unable: bool = False  # no worker can load what it needs to answer

    @classmethod
    def of_failed(cls, block: pa.Table, error: Exception, *, unable: bool = False) -> ShardCounts:
        """The counts of a shard whose block made a stage raise this error."""
        work = next(work_items_of(block))
        path, piece = work.shard.path, work.shard.piece
        place = f"{path}: rows {piece.start_row} to {piece.end_row}: "
        reason = str(error).partition("\n")[0].removeprefix(place).removeprefix(f"{path}: ")
        if not isinstance(error, AssayError):
            reason = f"internal error: {type(error).__name__}: {one_line(error)}"
        return cls(
            work.shard.id,
            rows=0,
            status={},
            labels={task: {} for task in work.tasks},
            costs={},
            error=f"{place}{reason}",
            unavailable=isinstance(error, UnavailableError),
            unable=unable,
        )

    @staticmethod
    def are_in(block: pa.Table) -> bool:
        """Whether the block is a row of counts: an earlier stage failed."""
        return "counts" in block.column_names

    def to_table(self) -> pa.Table:
        return pa.table({"counts": [_COUNTS.dump_json(self).decode()]})

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> ShardCounts:
        return _COUNTS.validate_json(row["counts"])


_COUNTS = TypeAdapter(ShardCounts)
_FILE = tuple[str, str, str, dict[str, str], int]
_LABELLED = TypeAdapter(tuple[list[_FILE], ShardCounts])


@dataclass(frozen=True, slots=True)
class LabelledShard:
    """A shard's label files, ready to commit."""

    work: WorkItem
    documents: pa.Table  # with the columns of a documents file
    files: Sequence[LabelFile]
    counts: ShardCounts

    def to_table(self) -> pa.Table:
        files = [(f.task, f.fp, f.cell, dict(f.metadata), f.retry) for f in self.files]
        columns = {f"file:{number}": file.rows for number, file in enumerate(self.files)}
        header = _LABELLED.dump_json((files, self.counts))
        return _with_columns(self.documents, columns, self.work, header)

    @classmethod
    def from_table(cls, block: pa.Table) -> LabelledShard:
        work, header, documents, columns = _parts(block)
        named, counts = _LABELLED.validate_json(header)
        files = [
            LabelFile(task, fp, cell, rows, metadata, retry)
            for (task, fp, cell, metadata, retry), rows in zip(named, columns.values(), strict=True)
        ]
        return cls(work, documents, files, counts)


def _with_columns(
    documents: pa.Table, columns: Mapping[str, pa.Array], work: WorkItem, header: bytes
) -> pa.Table:
    # — stored once: in each row, they would be the largest columns of a long shard
    rows = pa.array(np.zeros(documents.num_rows, np.int32))
    texts = [
        pa.DictionaryArray.from_arrays(rows, pa.array([text.decode()], pa.large_string()))
        for text in (_WORK_ITEM.dump_json(work), header)
    ]
    names = [*documents.column_names, _WORK, _HEADER, *columns]
    return pa.Table.from_arrays([*documents.columns, *texts, *columns.values()], names=names)


def _parts(block: pa.Table) -> tuple[WorkItem, str, pa.Table, dict[str, pa.Array]]:
    """The work item, the header, the documents, and the other columns by name."""
    works, headers = list(work_items_of(block)), block.column(_HEADER).unique().to_pylist()
    assert len(works) == len(headers) == 1, f"a block holds {len(works)} shards"
    at = block.column_names.index(_WORK)
    columns = {name: block.column(name).combine_chunks() for name in block.column_names[at + 2 :]}
    return works[0], headers[0], block.select(block.column_names[:at]), columns
