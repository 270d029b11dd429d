"""The rows that travel between the stages of the Ray graph. One block of rows is one shard.

Entry points: `work_rows` for what enters the graph, `TokenisedShard` and `LabelledShard` for what
the stages exchange, `ShardCounts` for what leaves it. No other module names their columns.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.ledger.cells import ReusableShard, WorkItem
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS
from pipeline.ledger.failed_rows import FileCounts
from pipeline.sources.shards import Shard, fields_of

Reuse = Sequence[Sequence[ReusableShard]]  # the lists that work rows name by their index


def work_rows(work_items: Sequence[WorkItem]) -> tuple[list[dict[str, Any]], Reuse]:
    """A row for each work item, and the reusable shards that the rows name by index.

    The work items of one input path share a long list of reusable shards: it is sent once to each
    worker instead of once a row.
    """
    reuse = {id(item.reuse): item.reuse for item in work_items}
    index = {identity: number for number, identity in enumerate(reuse)}
    rows = [{"work": _work_to_json(item), "reuse": index[id(item.reuse)]} for item in work_items]
    return rows, list(reuse.values())


def work_items_of(block: pa.Table, reuse: Reuse) -> Iterator[WorkItem]:
    """The work items that `work_rows` wrote."""
    for row in block.to_pylist():
        yield replace(_work_from_json(row["work"]), reuse=tuple(reuse[row["reuse"]]))


@dataclass(frozen=True, slots=True)
class TokenisedShard:
    """A shard's documents as token ids, and the answers that they already have."""

    work: WorkItem  # without its reusable shards
    documents: pa.Table  # with the columns of a documents file
    chunks: pa.Array  # [docs] lists of chunks of int32 token ids; none: nothing to ask
    status: Sequence[str]  # [docs]: of the reading and tokenising, or of the reused answer
    known: Mapping[str, pa.StructArray]  # by task: rows of label files, or null
    sources: pa.Array  # [docs]: the shard that the known row is of, or null
    # By task: [docs, labels] log-probabilities that a classifier gave to each label; NaN: none.
    classified: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    # [docs] large binary: of rows that are asked about and have an image; None: of texts
    images: pa.Array | None = None

    def to_table(self) -> pa.Table:
        columns = {
            "chunks": self.chunks,
            "label_status": pa.array(self.status, pa.string()),
            "source": self.sources,
            **{f"known:{task}": answers for task, answers in self.known.items()},
            **{f"classified:{task}": _to_column(each) for task, each in self.classified.items()},
            **({} if self.images is None else {"image": self.images}),
        }
        return _with_columns(self.documents, columns, self.work)

    @classmethod
    def from_table(cls, block: pa.Table) -> TokenisedShard:
        return cls(
            work=_only_work(block),
            documents=block.select(DOCUMENTS_FILE_COLUMNS),
            chunks=block.column("chunks").combine_chunks(),
            status=block.column("label_status").to_pylist(),
            known=_by_task(block, "known"),
            sources=block.column("source").combine_chunks(),
            classified={t: _from_column(c) for t, c in _by_task(block, "classified").items()},
            images=block.column("image") if "image" in block.column_names else None,
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
    """What labelling one shard took."""

    label_seconds: float
    asked_rows: int  # rows that the model was asked about; others were known, empty or unreadable
    prefix_tokens_computed: int
    question_tokens_computed: int
    tokens_saved: int


@dataclass(frozen=True, slots=True)
class LabelledShard:
    """A shard's answers, ready to commit."""

    work: WorkItem  # without its reusable shards
    labelled: LabelledDocuments
    known: Mapping[str, pa.StructArray]  # by task: rows that replace the computed ones, or null
    sources: pa.Array  # [docs]: the shard that the known row is of, or null
    cost: LabelCost
    # By task: its label, text and tokens, or null; of a job that continues answers.
    continuations: Mapping[str, pa.StructArray] = field(default_factory=dict)

    @property
    def taken_over(self) -> dict[str, int]:
        """How many rows have the answers of each other shard."""
        counts = Counter(sid for sid in self.sources.to_pylist() if sid is not None)
        del counts[self.work.shard.id]
        return dict(counts)

    def to_table(self) -> pa.Table:
        labelled = self.labelled
        columns = {
            "n_tokens": pa.array(labelled.n_tokens),
            "n_chunks": pa.array(labelled.n_chunks),
            "label_status": pa.array(labelled.status, pa.string()),
            "source": self.sources,
            "cost": _constant(json.dumps(asdict(self.cost)), labelled.documents.num_rows),
            **{f"known:{task}": answers for task, answers in self.known.items()},
            **{f"continuation:{task}": each for task, each in self.continuations.items()},
        }
        for task, scores in labelled.scores.items():
            for kind, values in fields_of(scores).items():
                if values is not None:
                    columns[f"{kind}:{task}"] = _to_column(values)
        return _with_columns(labelled.documents, columns, self.work)

    @classmethod
    def from_table(cls, block: pa.Table) -> LabelledShard:
        kinds = {each.name: _by_task(block, each.name) for each in fields(TaskScores)}
        scores = {
            task: TaskScores(**{kind: _from_column(of.get(task)) for kind, of in kinds.items()})
            for task in kinds["log_probs"]
        }
        labelled = LabelledDocuments(
            documents=block.select(DOCUMENTS_FILE_COLUMNS),
            n_tokens=block.column("n_tokens").to_numpy(),
            n_chunks=block.column("n_chunks").to_numpy(),
            status=block.column("label_status").to_pylist(),
            scores=scores,
        )
        cost = LabelCost(**json.loads(block.column("cost")[0].as_py()))
        sources = block.column("source").combine_chunks()
        known, continuations = _by_task(block, "known"), _by_task(block, "continuation")
        return cls(_only_work(block), labelled, known, sources, cost, continuations)


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """The counts of one committed shard."""

    sid: str
    rows: int
    created: int  # objects
    status: Mapping[str, int]  # rows by status
    labels: Mapping[str, Mapping[str, int]]  # rows by label, by task
    cost: LabelCost
    outside: int = 0  # rows of the input that were read and are not in the slice
    taken_over: int = 0  # rows with the answers of other shards
    # Of tasks with a cascade: rows by the stage that decided, by task.
    stages: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    files: Mapping[str, FileCounts] = field(default_factory=dict)  # that were created, by task

    def to_table(self) -> pa.Table:
        return pa.table({"counts": [json.dumps(asdict(self))]})

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> ShardCounts:
        content = json.loads(row["counts"])
        files = {task: FileCounts(*counts) for task, counts in content["files"].items()}
        return cls(**{**content, "cost": LabelCost(**content["cost"]), "files": files})


def _work_to_json(work: WorkItem) -> str:
    texts = base64.b64encode(work.texts).decode()
    content = {"shard": work.shard.to_json(), "reuse": (), "texts": texts}
    return json.dumps(fields_of(work) | content)


def _work_from_json(text: str) -> WorkItem:
    content = json.loads(text)
    parts = {
        "shard": Shard.from_json(content["shard"]),
        "tasks": tuple(content["tasks"]),
        "reuse": (),
        "texts": base64.b64decode(content["texts"]),
    }
    return WorkItem(**content | parts)


def _only_work(block: pa.Table) -> WorkItem:
    """The block's work item; StorageError unless all rows have the same."""
    texts = set(block.column("work").to_pylist())
    if len(texts) != 1:
        raise StorageError(
            f"a block holds {len(texts)} shards instead of one; nothing was committed, run again"
        )
    return _work_from_json(texts.pop())


def _with_columns(documents: pa.Table, columns: Mapping[str, pa.Array], work: WorkItem) -> pa.Table:
    table = documents.append_column("work", _constant(_work_to_json(work), documents.num_rows))
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def _by_task(block: pa.Table, kind: str) -> dict[str, pa.Array]:
    """The columns `<kind>:<task>`, by task."""
    names = [name for name in block.column_names if name.startswith(f"{kind}:")]
    return {name.partition(":")[2]: block.column(name).combine_chunks() for name in names}


def _to_column(values: NDArray[Any]) -> pa.Array:
    """[docs, width] as one fixed-size list a document, or [docs] as a plain column."""
    column = pa.array(values.ravel())
    if values.ndim == 1:
        return column
    return pa.FixedSizeListArray.from_arrays(column, values.shape[1])


def _from_column(column: pa.Array | None) -> Any:
    """The array of such a column: [docs, width] or [docs]; None without a column."""
    if not isinstance(column, pa.FixedSizeListArray):
        return None if column is None else column.to_numpy(zero_copy_only=False)
    values = column.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(values).reshape(len(column), column.type.list_size)


def _constant(value: str, rows: int) -> pa.Array:
    """The same string in every row, stored once."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), [value])
