"""The reasons of a rule, beside the whole rule; and answers that are right and certain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.filters.decisions import Thresholds, decided
from pipeline.filters.ideal_answers import (
    drop_probabilities,
    dropping_labels,
    ideal_rows,
    reasons_of,
)
from pipeline.filters.rule import FilterRule
from pipeline.ledger.columns import ANSWER_COLUMNS, answers_type
from pipeline.spec.filters import FilterSpec
from pipeline.spec.tasks import QuestionTask

TASKS = {
    "toxic": QuestionTask(name="toxic", question="?", labels=["toxic", "clean"]),
    "topic": QuestionTask(
        name="topic", question="?", labels=["art/film", "law"], separator="/", top_k=1
    ),
}
SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("row", pa.int64()),
        ("n_chars", pa.int64()),
        ("status", pa.string()),
        ("toxic", answers_type(ANSWER_COLUMNS, ["toxic", "clean"])),
        ("topic", answers_type(("label", "top", "levels", "mass", "status"), ["art/film", "law"])),
    ]
)


def rows_of(*p: float | None) -> pa.RecordBatch:
    rows = [
        {
            "doc_id": str(number),
            "row": number,
            "n_chars": number,
            "status": "ok",
            "toxic": None
            if each is None
            else {
                "label": "toxic" if each > 0.5 else "clean",
                "p": {"toxic": each, "clean": 1 - each},
                "n_tokens": 7,
                "status": "ok",
            },
            "topic": {"label": ["law", "art/film", None][number % 3], "status": "ok"},
        }
        for number, each in enumerate(p)
    ]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


ABOVE = Thresholds(0.7, {"law": 0.2})
TOP = {"share": 0.3, "of": "toxic.p.toxic", "smallest": 1}


def rule_of(**rule: Any) -> FilterRule:
    return FilterRule.of(FilterSpec(**rule), TASKS, SCHEMA)


@pytest.mark.parametrize(
    "rule",
    [
        {"keep": "toxic.p.toxic < 0.5 and topic.label = 'law' and n_chars > 2"},
        {"keep": "toxic.p.toxic < 0.5 or topic.label = 'law'", "drop_top": TOP},
        {"drop_top": {**TOP, "of": "n_chars"}},
        {"keep": "topic.label <> 'law'", "drop_top": {**TOP, "by": "topic.label"}},
    ],
)
def test_a_rule_drops_a_document_exactly_if_one_of_its_reasons_does(rule: dict[str, Any]) -> None:
    rows, bound = rows_of(*np.random.default_rng(0).random(40)), rule_of(**rule)
    with decided(bound, [rows], "keep") as table:
        dropped = table.of_shard(0)["dropped"].to_pylist()
        reasons = reasons_of(bound, table.thresholds)
    assert np.any([reason.drops(rows) for reason in reasons], axis=0).tolist() == dropped
    assert 0 < sum(dropped) < 40


def test_a_reason_reads_the_tasks_of_its_condition_and_not_of_its_groups() -> None:
    keep = "topic.label = 'law' and n_chars > 2"
    reasons = reasons_of(rule_of(keep=keep, drop_top={**TOP, "by": "topic.label"}), ABOVE)
    assert [(each.words, each.tasks) for each in reasons] == [
        ("topic.label = 'law'", ("topic",)),
        ("n_chars > 2", ()),
        ("drop_top: toxic.p.toxic", ("toxic",)),
    ]


def test_ideal_answers_are_certain_and_leave_all_else() -> None:
    rows = rows_of(0.2, 0.9, 0.4)
    truth = {"toxic": ["toxic", None, "clean"], "topic": ["art/film", "law", None]}
    ideal = ideal_rows(rows, truth, TASKS)
    assert ideal.select(["doc_id", "n_chars"]) == rows.select(["doc_id", "n_chars"])
    first, second, third = ideal.column("toxic").to_pylist()
    assert second is None and third["p"] == {"toxic": 0.0, "clean": 1.0}
    assert first == {
        "label": "toxic",
        "p": {"toxic": 1.0, "clean": 0.0},
        "margin": 1.0,
        "mass": 1.0,
        "n_tokens": 7,
        "n_chunks": None,
        "status": "ok",
    }
    art, law, none = ideal.column("topic").to_pylist()
    assert none is None and art["top"] == [{"label": "art/film", "p": 1.0}]
    assert art["levels"] == [{"label": "art", "p": 1.0}, {"label": "art/film", "p": 1.0}]
    assert [each["label"] for each in law["levels"]] == ["law"]


@pytest.mark.parametrize(
    ("rule", "toxic", "topic"),
    [
        ({"keep": "toxic.p.toxic < 0.5 and topic.label = 'law'"}, [0], [0]),
        ({"keep": "toxic.p.toxic < 0.5 or topic.label = 'law'"}, [], []),
        ({"keep": "topic.label <> 'law' and doc_id <> 'x'", "drop_top": TOP}, [0], [1]),
        ({"keep": "toxic.p.clean < 0.5"}, [1], []),
        # — of a task alone, whatever a condition of another one makes of a missing answer
        ({"keep": "toxic.margin > 0.5 and coalesce(topic.mass, 0) > 1"}, [], [0, 1]),
    ],
)
def test_the_labels_that_alone_are_a_reason_to_drop(
    rule: dict[str, str], toxic: list[int], topic: list[int]
) -> None:
    reasons = reasons_of(rule_of(**rule), ABOVE)
    assert dropping_labels(reasons, SCHEMA, TASKS["toxic"]).tolist() == toxic
    assert dropping_labels(reasons, SCHEMA, TASKS["topic"]).tolist() == topic


KINDS = {
    "about": QuestionTask(name="about", kind="multi", question="{label}?", labels=["law", "tax"]),
    "quality": QuestionTask(name="quality", kind="score", question="?", labels=["0", "1", "4"]),
}
LABELS = pa.list_(pa.field("element", pa.string()))
P = {name: [(label, pa.float32()) for label in task.labels] for name, task in KINDS.items()}
KINDS_SCHEMA = pa.schema(
    [
        ("about", pa.struct([("labels", LABELS), ("p", pa.struct(P["about"]))])),
        (
            "quality",
            pa.struct(
                [
                    ("label", pa.string()),
                    ("p", pa.struct(P["quality"])),
                    ("score", pa.float32()),
                ]
            ),
        ),
    ]
)


def test_ideal_answers_of_several_labels_and_of_scores() -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.nulls(3, field.type) for field in KINDS_SCHEMA], schema=KINDS_SCHEMA
    )
    truth = {"about": [["tax", "law"], (), None], "quality": ["4", "0", None]}
    ideal = ideal_rows(rows, truth, KINDS)
    assert ideal.column("about").to_pylist() == [
        {"labels": ["law", "tax"], "p": {"law": 1.0, "tax": 1.0}},
        {"labels": [], "p": {"law": 0.0, "tax": 0.0}},
        None,
    ]
    assert [row and row["score"] for row in ideal.column("quality").to_pylist()] == [4, 0, None]


@pytest.mark.parametrize(
    ("keep", "task", "expected"),
    [
        ("not list_contains(about.labels, 'law')", "about", 0.3),
        ("about.p.law < 0.9 and about.p.tax < 0.9", "about", 1 - 0.7 * 0.4),
        ("list_contains(about.labels, 'tax')", "about", 0.4),
        ("len(about.labels) > 0", "about", 0.7 * 0.4),
        ("quality.score >= 1", "quality", 0.2),
    ],
)
def test_the_probability_of_an_answer_that_is_a_reason_to_drop(
    keep: str, task: str, expected: float
) -> None:
    p = {"about": np.array([[0.3, 0.6]]), "quality": np.array([[0.2, 0.5, 0.3]])}[task]
    reasons = reasons_of(FilterRule.of(FilterSpec(keep=keep), KINDS, KINDS_SCHEMA), None)
    [estimate] = drop_probabilities(p, reasons, KINDS_SCHEMA, KINDS[task])
    assert estimate == pytest.approx(expected)
