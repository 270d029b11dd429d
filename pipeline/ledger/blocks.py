"""The rows that travel between the stages of the Ray graph. One block of rows is one shard.

Entry points: `work_rows` for what enters the graph, `TokenisedShard` and `LabelledShard` for what
the stages exchange, `ShardCounts` for what leaves it. No other module names their columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import StorageError, UnavailableError
from pipeline.ledger.cells import Source, WorkItem
from pipeline.ledger.columns import structs
from pipeline.ledger.failed_rows import FileCounts
from pipeline.ledger.label_files import LabelFile
from pipeline.sources.shards import Shard, fields_of

Bools = NDArray[np.bool_]
_HEADER = "header"  # the column with what is of the whole shard, as JSON
CONTINUATIONS = "continuations"


def work_rows(work_items: Sequence[WorkItem]) -> list[dict[str, str]]:
    """A row for each work item."""
    return [{"work": json.dumps(_work_to_json(item))} for item in work_items]


def work_items_of(block: pa.Table) -> Iterator[WorkItem]:
    """The work items that `work_rows` wrote."""
    for text in block.column("work").to_pylist():
        yield _work_from_json(json.loads(text))


@dataclass(frozen=True, slots=True)
class TokenisedShard:
    """A shard's documents as token ids, and the answers that they already have."""

    work: WorkItem
    documents: pa.Table  # with the columns of a documents file, and `text` if it is read again
    inside: Bools  # [docs]: whether the document is in the slice
    chunks: pa.Array  # [docs] lists of chunks of int32 token ids; none: nothing to ask
    status: Sequence[str]  # [docs]: of tokenising, or of reading if it was not tokenised
    # By version of a task: [docs] rows of label files, null without an answer.
    stored: Mapping[str, pa.StructArray]
    classified: Mapping[str, pa.StructArray]
    reused: Mapping[str, Mapping[str, int]]  # by version: how many rows are of which other shard
    # [docs] large binary: of rows that are asked about and have an image; None: of texts
    images: pa.Array | None = None

    def to_table(self) -> pa.Table:
        columns = {
            "inside": pa.array(self.inside),
            "chunks": self.chunks,
            "label_status": pa.array(self.status, pa.string()),
            **{f"stored:{version}": answers for version, answers in self.stored.items()},
            **{f"classified:{version}": answers for version, answers in self.classified.items()},
            **({} if self.images is None else {"image": self.images}),
        }
        header = {"work": _work_to_json(self.work), "reused": self.reused}
        return _with_columns(self.documents, columns, header)

    @classmethod
    def from_table(cls, block: pa.Table) -> TokenisedShard:
        header, documents, columns = _parted(block)
        return cls(
            work=_work_from_json(header["work"]),
            documents=documents,
            inside=_bools(columns.pop("inside")),
            chunks=columns.pop("chunks"),
            status=columns.pop("label_status").to_pylist(),
            reused=header["reused"],
            images=columns.pop("image", None),
            **_by_version(columns),
        )


@dataclass(frozen=True, slots=True)
class TaskScores:
    """One task's answers as log-probabilities; a row of NaN is a document without an answer."""

    log_probs: NDArray[np.float32]  # [docs, kept]
    log_mass: NDArray[np.float32]  # [docs]: of all labels that were scored
    label_ids: NDArray[np.int32] | None  # [docs, kept]: which labels; None: every label in order
    levels: NDArray[np.float32] | None  # [docs, levels]: of the best path; NaN below its end


@dataclass(frozen=True, slots=True)
class LabelledDocuments:
    """Documents with the model's answers, before they become rows of label files."""

    documents: pa.Table  # with at least the column `doc_id`
    n_tokens: NDArray[np.int32]  # [docs]
    n_chunks: NDArray[np.int16]  # [docs]
    status: Sequence[str]  # [docs]
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
    labels: Mapping[str, Mapping[str, int]]  # rows by label, by task
    # By `<stage>/<reader>`, of those that were asked. The stage is 0 without cascades, and
    # `CONTINUATIONS` where answers are continued.
    costs: Mapping[str, LabelCost]
    created: int = 0  # objects
    outside: int = 0  # rows of the input that were read and are not in the slice
    taken_over: int = 0  # rows with the answers of other shards
    # Of tasks with a cascade: rows by the stage that decided, by task.
    stages: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    cell: str = ""  # of the tasks' label files
    files: Mapping[str, FileCounts] = field(default_factory=dict)  # that were created, by task
    not_continued: int = 0  # answers that `explain` names and that could not be continued
    error: str | None = None  # of a store or the input, with its place, in one line
    unavailable: bool = False  # whether the error may be gone later

    @classmethod
    def of_failed(cls, block: pa.Table, error: StorageError) -> ShardCounts:
        """The counts of a shard whose block made a stage raise this error."""
        is_work = "work" in block.column_names
        work = next(work_items_of(block)) if is_work else _work_from_json(_parted(block)[0]["work"])
        path, piece = work.shard.path, work.shard.piece
        place = f"{path}: rows {piece.start_row} to {piece.end_row}: "
        reason = str(error).partition("\n")[0].removeprefix(place).removeprefix(f"{path}: ")
        labels: dict[str, dict[str, int]] = {task: {} for task in work.tasks}
        is_unavailable = isinstance(error, UnavailableError)
        counts = cls(work.shard.id, 0, {}, labels, {})
        return replace(counts, error=f"{place}{reason}", unavailable=is_unavailable)

    @staticmethod
    def are_in(block: pa.Table) -> bool:
        """Whether the block is a row of counts: an earlier stage failed."""
        return "counts" in block.column_names

    def to_table(self) -> pa.Table:
        return pa.table({"counts": [json.dumps(asdict(self))]})

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> ShardCounts:
        return cls.from_json(json.loads(row["counts"]))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ShardCounts:
        """The counts that `dataclasses.asdict` returned."""
        costs = {stage: LabelCost(**cost) for stage, cost in content["costs"].items()}
        files = {task: FileCounts(*counts) for task, counts in content["files"].items()}
        return cls(**{**content, "costs": costs, "files": files})


@dataclass(frozen=True, slots=True)
class LabelledShard:
    """A shard's label files, ready to commit."""

    work: WorkItem
    documents: pa.Table  # with the columns of a documents file
    files: Sequence[LabelFile]
    counts: ShardCounts

    def to_table(self) -> pa.Table:
        columns = {}
        for number, file in enumerate(self.files):
            columns[f"file:{number}"] = structs(file.table)
            if file.inside is not None:
                columns[f"inside:{number}"] = pa.array(file.inside)
        kept = ("task", "fp", "cell", "metadata", "retry")
        header = {
            "work": _work_to_json(self.work),
            "files": [{name: getattr(file, name) for name in kept} for file in self.files],
            "counts": asdict(self.counts),
        }
        return _with_columns(self.documents, columns, header)

    @classmethod
    def from_table(cls, block: pa.Table) -> LabelledShard:
        header, documents, columns = _parted(block)
        files = []
        for number, file in enumerate(header["files"]):
            table = pa.Table.from_struct_array(columns[f"file:{number}"])
            for name in {"label", "status"}.intersection(table.column_names):
                column = table.column(name).dictionary_encode()
                table = table.set_column(table.column_names.index(name), name, column)
            inside = columns.get(f"inside:{number}")
            mask = None if inside is None else _bools(inside)
            files.append(LabelFile(**file, table=table, inside=mask))
        counts = ShardCounts.from_json(header["counts"])
        return cls(_work_from_json(header["work"]), documents, files, counts)


def _work_to_json(work: WorkItem) -> dict[str, object]:
    sources = {
        version: [[source.sid, source.key] for source in of_version]
        for version, of_version in work.sources.items()
    }
    return fields_of(work) | {"shard": work.shard.to_json(), "sources": sources}


def _work_from_json(content: Mapping[str, Any]) -> WorkItem:
    parts = {
        "shard": Shard.from_json(content["shard"]),
        "tasks": tuple(content["tasks"]),
        "sources": {
            version: tuple(Source(*source) for source in of_version)
            for version, of_version in content["sources"].items()
        },
    }
    return WorkItem(**{**content, **parts})


def _with_columns(
    documents: pa.Table, columns: Mapping[str, pa.Array], header: Mapping[str, object]
) -> pa.Table:
    # — stored once: in each row, it would be the largest column of a long shard
    rows = pa.array(np.zeros(documents.num_rows, np.int32))
    text = pa.DictionaryArray.from_arrays(rows, pa.array([json.dumps(header)], pa.large_string()))
    table = documents.append_column(_HEADER, text)
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def _parted(block: pa.Table) -> tuple[dict[str, Any], pa.Table, dict[str, pa.Array]]:
    """The header, the documents, and the other columns by name."""
    headers = block.column(_HEADER).unique()
    assert len(headers) == 1, f"a block holds {len(headers)} shards"
    at = block.column_names.index(_HEADER)
    names = block.column_names[at + 1 :]
    columns = {name: block.column(name).combine_chunks() for name in names}
    return json.loads(headers[0].as_py()), block.select(block.column_names[:at]), columns


def _by_version(columns: Mapping[str, pa.Array]) -> dict[str, dict[str, pa.Array]]:
    """The columns `<kind>:<version>`, by kind and version."""
    parts: dict[str, dict[str, pa.Array]] = {"stored": {}, "classified": {}}
    for name, column in columns.items():
        kind, _, version = name.partition(":")
        parts[kind][version] = column
    return parts


def _bools(column: pa.Array) -> Bools:
    return np.array(column.to_numpy(zero_copy_only=False), np.bool_)
