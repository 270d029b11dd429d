"""The rows of label files, from a model's scores. Entry point: `answer_rows`.

A row has the best label, the probabilities and how sure the answer is, or null without an answer.
A task of kind `multi` has a row, too: the answers to its parts are put together here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.ledger.columns import (
    CHUNK,
    CHUNK_TYPE,
    LABELS_TYPE,
    RANKED,
    STAGE,
    answer_columns,
    answers_type,
    has_chunk,
)
from pipeline.sources.documents import is_failed_status
from pipeline.spec.stages import DocumentsSpec
from pipeline.spec.tasks import TaskSpec

if TYPE_CHECKING:
    from pipeline.inference.shard_answers import ShardAnswers, TaskAnswers

# Probabilities are quotients of float32 sums; a larger difference from 1 is not rounding.
P_SUM_TOLERANCE = 1e-3
# A whole label can be less probable than float32 can represent; 0 would mean impossible.
SMALLEST_MASS = np.finfo(np.float32).smallest_subnormal


def answer_rows(
    answers: ShardAnswers,
    task: TaskSpec,
    as_read: Sequence[str],
    documents: DocumentsSpec | None = None,
    spans: Callable[[int], Sequence[tuple[int, int]]] = lambda _row: (),
) -> pa.StructArray:
    """[docs] the rows of the task's label file, without what is added to the answers.

    `as_read` is the status of each document before it was asked about, `documents` how it was read,
    and `spans` where the chunks of a document begin and end.
    """
    by_name = {own.task.name: own for own in answers.by_task}
    scores = [by_name[part.name] for part in task.parts]
    columns = _of_parts(scores, task) if task.kind == "multi" else _of_scores(scores[0], task)
    # — NaN where a part has none
    mass = np.min([_mass(own) for own in scores], axis=0)
    # — a document without the answer to a part is a failed one
    status = [
        next(filter(is_failed_status, of_parts), of_parts[0])
        for of_parts in zip(*(own.status(as_read) for own in scores), strict=True)
    ]
    n_tokens = np.array([sum(map(len, chunks)) for chunks in answers.chunks], np.int32)
    n_chunks = np.array([*map(len, answers.chunks)], np.int16)
    columns |= reading_columns(mass, n_tokens, n_chunks, status)
    if has_chunk(task, documents):
        columns[CHUNK] = _deciding_chunks(scores, spans)
    names = [name for name in answer_columns(task, documents) if name != STAGE]
    return pa.StructArray.from_arrays([columns[name] for name in names], names=names)


def _of_scores(scores: TaskAnswers, task: TaskSpec) -> dict[str, pa.Array]:
    """The columns of an answer that is one of the labels."""
    log_mass = scores.log_mass  # [docs]
    p = np.exp(scores.log_probs - log_mass[:, None])  # [docs, kept]
    if scores.labels is None or task.top_k is None:
        columns = value_columns(p, task)
    else:
        columns = _ranked_answers(p, scores.labels, list(task.labels), task.top_k)
    if task.separator and scores.levels is not None:
        path_p = np.exp(scores.levels - log_mass[:, None])  # [docs, levels]
        columns["levels"] = _levels(columns["label"].to_pylist(), path_p, task.separator)
    return columns


def _of_parts(scores: Sequence[TaskAnswers], task: TaskSpec) -> dict[str, pa.Array]:
    """The columns of an answer to each of the labels, from the scores of yes and no."""
    p = [np.exp(own.log_probs[:, 0] - own.log_mass) for own in scores]
    return value_columns(np.stack(p, axis=1), task)


def _deciding_chunks(
    scores: Sequence[TaskAnswers], spans: Callable[[int], Sequence[tuple[int, int]]]
) -> pa.StructArray:
    """[docs] the chunk whose answer it is; of several labels, that of the most probable one."""
    p = np.stack([own.log_probs[:, 0] - own.log_mass for own in scores])  # [parts, docs]
    best = p.argmax(axis=0)  # [docs], of NaN where a part has no answer
    number = np.stack([own.deciding for own in scores])[best, np.arange(p.shape[1])]
    places = [spans(row)[n] if n >= 0 else (0, 0) for row, n in enumerate(number)]
    columns = [pa.array(side, pa.int32()) for side in np.array(places, np.int32).reshape(-1, 2).T]
    return pa.StructArray.from_arrays(columns, fields=list(CHUNK_TYPE), mask=pa.array(number < 0))


def unanswered_rows(
    status: Sequence[str], task: TaskSpec, documents: DocumentsSpec | None = None
) -> pa.StructArray:
    """[docs] the same without any answer."""
    names = [name for name in answer_columns(task, documents) if name != STAGE]
    kind, none = answers_type(names, list(task.labels)), np.zeros(len(status), np.int32)
    columns = {field.name: pa.nulls(len(status), field.type) for field in kind}
    columns |= reading_columns(np.full(len(status), np.nan, np.float32), none, none, status)
    return pa.StructArray.from_arrays([columns[name] for name in names], fields=list(kind))


def value_columns(p: NDArray[np.float32], task: TaskSpec) -> dict[str, pa.Array]:
    """The columns of an answer that follow from [docs, labels]; null in a row with NaN.

    These are p and margin, and the column label, of a score also its expected value, or labels.
    """
    if task.kind == "multi":
        return _independent_columns(p, list(task.labels))
    columns = probability_columns(p, list(task.labels))
    if task.kind == "score":
        score = p.astype(np.float64) @ np.array(task.values)  # [docs]
        columns["score"] = pa.array(score, pa.float32(), mask=np.isnan(score))
    return columns


def probability_columns(p: NDArray[np.float32], labels: Sequence[str]) -> dict[str, pa.Array]:
    """The columns label, p and margin of [docs, labels]; null where p is NaN."""
    _docs, label_count = p.shape
    unanswered = np.asarray(np.isnan(p).any(axis=1))  # [docs]
    answered = p[~unanswered]
    assert label_count == len(labels) >= 2, (label_count, labels)
    assert np.allclose(answered.sum(axis=1), 1, atol=P_SUM_TOLERANCE), answered
    best = pa.array(np.where(unanswered, 0, p.argmax(axis=1)).astype(np.int32), mask=unanswered)
    largest = np.partition(p, label_count - 2, axis=1)[:, -2:]  # [docs, 2]: second, first
    return {
        "label": pa.array(list(labels), pa.string()).take(best),
        "p": _p_column(p, labels, unanswered),
        "margin": pa.array(largest[:, 1] - largest[:, 0], pa.float32(), mask=unanswered),
    }


def _independent_columns(p: NDArray[np.float32], labels: Sequence[str]) -> dict[str, pa.Array]:
    """The columns labels, p and margin of [docs, labels], the probability of each label alone."""
    unanswered = np.asarray(np.isnan(p).any(axis=1))  # [docs]
    applies = (p >= 0.5) & ~unanswered[:, None]  # [docs, labels]
    offsets = np.concatenate([[0], np.cumsum(applies.sum(axis=1))]).astype(np.int32)
    names = pa.array(list(labels), pa.string()).take(pa.array(np.nonzero(applies)[1]))
    return {
        "labels": pa.ListArray.from_arrays(
            pa.array(offsets), names, type=LABELS_TYPE, mask=pa.array(unanswered)
        ),
        "p": _p_column(p, labels, unanswered),
        "margin": pa.array(np.abs(2 * p - 1).min(axis=1), pa.float32(), mask=unanswered),
    }


def _p_column(
    p: NDArray[np.float32],  # [docs, labels]
    labels: Sequence[str],
    unanswered: NDArray[np.bool_],  # [docs]
) -> pa.StructArray:
    return pa.StructArray.from_arrays(
        [pa.array(np.ascontiguousarray(column), pa.float32()) for column in p.T],
        fields=[pa.field(label, pa.float32()) for label in labels],
        mask=pa.array(unanswered),
    )


def _ranked_answers(
    p: NDArray[np.float32],  # [docs, kept], falling; a row of NaN is a document without an answer
    label_ids: NDArray[np.int32],  # [docs, kept]
    labels: Sequence[str],
    top_k: int,
) -> dict[str, pa.Array]:
    """The columns label, top and margin."""
    names = pa.array(labels, pa.string())
    unanswered = np.asarray(np.isnan(p).any(axis=1))  # [docs]
    scored = np.where(unanswered[:, None], False, p > 0)[:, :top_k]  # [docs, top_k]
    best = names.take(pa.array(label_ids[:, 0], mask=unanswered))
    top = names.take(pa.array(label_ids[:, :top_k][scored]))
    return {
        "label": best,
        "top": _ranked(top, p[:, :top_k][scored], scored.sum(axis=1), unanswered),
        "margin": pa.array(p[:, 0] - p[:, 1], pa.float32(), mask=unanswered),
    }


def reading_columns(
    mass: NDArray[np.float32],  # [docs]; NaN where there is none
    n_tokens: NDArray[np.integer],  # [docs]
    n_chunks: NDArray[np.integer],  # [docs]
    status: Sequence[str],  # [docs]
) -> dict[str, pa.Array]:
    """The columns mass, n_tokens, n_chunks and status."""
    return {
        "mass": pa.array(mass, pa.float32(), mask=np.isnan(mass)),
        "n_tokens": pa.array(n_tokens, pa.int32()),
        "n_chunks": pa.array(n_chunks, pa.int16()),
        "status": pa.array(status, pa.string()),
    }


def _mass(scores: TaskAnswers) -> NDArray[np.float32]:  # [docs]
    # — a length penalty makes scores that are no probabilities; a readout has only its labels
    if scores.task.length_penalty or scores.task.readout is not None:
        return np.full_like(scores.log_mass, np.nan)
    # — float32 sums can exceed 1 by an ulp, and a label that is a prefix of another counts twice
    return np.clip(np.exp(scores.log_mass), SMALLEST_MASS, 1)


def _levels(
    best: Sequence[str | None],
    p: NDArray[np.float32],  # [docs, levels]: of the best label's path; NaN below its end
    separator: str,
) -> pa.ListArray:
    """For each level of the best label's path its name, `a`, `a/b`, ..., and its probability."""
    parts = [[] if label is None else label.split(separator) for label in best]
    counts = np.array([len(path) for path in parts], np.int64)
    names = [separator.join(path[:end]) for path in parts for end in range(1, len(path) + 1)]
    is_level = np.arange(p.shape[1]) < counts[:, None]  # [docs, levels]
    unanswered = np.array([label is None for label in best])
    return _ranked(pa.array(names, pa.string()), np.minimum(p[is_level], 1), counts, unanswered)


def _ranked(
    names: pa.Array,
    p: NDArray[np.float32],  # [names]
    counts: NDArray[np.integer],  # [docs]: the number of names of each document
    unanswered: NDArray[np.bool_],  # [docs]
) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    pair = RANKED.value_type
    pairs = pa.StructArray.from_arrays([names, pa.array(p, pa.float32())], fields=list(pair))
    return pa.ListArray.from_arrays(
        pa.array(offsets), pairs, type=RANKED, mask=pa.array(np.asarray(unanswered, dtype=bool))
    )
