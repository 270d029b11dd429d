"""Ranked answers: the rows are what was answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.inference.shard_answers import ShardAnswers
from pipeline.ledger.columns import ANSWER_COLUMNS, answer_columns
from pipeline.ledger.label_rows import answer_rows
from pipeline.spec.stages import DocumentsSpec, QuestionTask
from pipeline.spec.tasks import TaskSpec

LABELS = ["a/x", "a/y", "b/x", "b/y", "c"]
P = [[0.5, 0.125, 0.25, 0.0625, 0.0625], [np.nan] * 5, [0.0, 0.0, 0.75, 0.25, 0.0]]
MASS = [0.5, np.nan, 0.25]


def task(**more: Any) -> TaskSpec:
    content = {"name": "topic", "question": "?", "labels": LABELS, **more}
    return QuestionTask.model_validate(content)


def rows_of(asked: TaskSpec) -> pa.StructArray:
    """The rows of three documents, of which one has no answer."""
    answers = ShardAnswers([[range(7)], [], [range(9)]], [asked])
    (own,) = answers.by_task
    p, mass = np.array(P), np.array(MASS)[:, None]
    levels = [[0.625, 0.5], [np.nan] * 2, [1.0, 0.75]]
    with np.errstate(divide="ignore"):
        log_probs = np.log(p * mass)
    if own.labels is not None:
        ranked = np.array([[0, 2, 1, 3, 4], [0] * 5, [2, 3, 0, 1, 4]])
        own.labels[:] = ranked[:, : own.labels.shape[1]]
        log_probs = np.take_along_axis(log_probs, own.labels, 1)
    if own.levels is not None:
        own.levels[:] = np.log(np.array(levels) * mass)
    own.log_probs[:], own.log_mass[:] = log_probs, np.log(MASS)
    return answer_rows(answers, asked, ["ok", "empty", "ok"])


def table_of(asked: TaskSpec) -> pa.Table:
    return pa.Table.from_struct_array(rows_of(asked))


def rounded(pairs: list[dict[str, Any]] | None) -> list[tuple[str, float]] | None:
    return None if pairs is None else [(x["label"], round(x["p"], 5)) for x in pairs]


@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_the_likeliest_labels_are_kept_in_falling_order(top_k: int) -> None:
    table = table_of(task(top_k=top_k, separator="/"))
    first = [("a/x", 0.5), ("b/x", 0.25), ("a/y", 0.125), ("b/y", 0.0625), ("c", 0.0625)]
    second = [("b/x", 0.75), ("b/y", 0.25)]  # what has no probability was never reached
    tops = [rounded(top) for top in table.column("top").to_pylist()]
    assert tops == [first[:top_k], None, second[:top_k]]
    levels = [rounded(of_row) for of_row in table.column("levels").to_pylist()]
    assert levels == [[("a", 0.625), ("a/x", 0.5)], None, [("b", 1.0), ("b/x", 0.75)]]
    other_columns = table.drop_columns(["top", "levels"]).to_pylist()
    assert [row["label"] for row in other_columns] == ["a/x", None, "b/x"]
    assert [row["margin"] for row in other_columns] == pytest.approx([0.25, None, 0.5])
    assert [row["mass"] for row in other_columns] == pytest.approx([0.5, None, 0.25])


def test_without_top_k_every_label_has_its_column_and_levels_are_beside_them() -> None:
    table = table_of(task(separator="/"))
    assert table.column("p").to_pylist()[2] == pytest.approx(dict(zip(LABELS, P[2], strict=True)))
    assert rounded(table.column("levels").to_pylist()[0]) == [("a", 0.625), ("a/x", 0.5)]
    assert tuple(table.column_names) == answer_columns(task(separator="/"))
    plain = table_of(task())
    assert tuple(plain.column_names) == ANSWER_COLUMNS


def test_scores_with_a_length_penalty_have_no_mass() -> None:
    table = table_of(task(top_k=3, length_penalty=0.5))
    assert table.column("mass").null_count == 3
    assert table.column("top").null_count == 1


def test_a_document_without_an_answer_to_a_part_has_no_chunk_that_decided() -> None:
    topics = task(kind="multi", labels=["art", "law"])
    answers = ShardAnswers([[range(4)] * 2] * 2, topics.parts)
    for number, own in enumerate(answers.by_task):
        own.log_probs[:], own.log_mass[:], own.deciding[:] = np.log([0.75, 0.25]), 0.0, number
    answers.by_task[0].log_probs[1], answers.by_task[0].deciding[1] = np.nan, -1
    documents = DocumentsSpec(max_tokens=4, too_long="chunk", overlap_tokens=0)
    rows = answer_rows(answers, topics, ["ok"] * 2, documents, lambda _row: [(0, 4), (4, 8)])
    assert rows.field("chunk").to_pylist() == [{"start": 0, "end": 4}, None]
    assert rows.field("labels").to_pylist() == [["art", "law"], None]
