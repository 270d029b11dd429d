"""Values of gold of the kinds `multi` and `score`, in every form in which people have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judged import with_gold, write_rows

from pipeline.errors import SpecError
from pipeline.gold.labels import read_gold
from pipeline.gold.values import UNLABELLED
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec

TASKS = [
    {
        "name": "topic",
        "kind": "multi",
        "question": "About {label}?",
        "labels": ["law", "tax", "sport"],
    },
    {"name": "quality", "kind": "score", "question": "How good?", "labels": [0, 1, 2, 3]},
]
PARTS = ["topic.law", "topic.tax", "topic.sport"]
TRUTH = [[0, 0, 1], [1, 1, 1], [UNLABELLED] * 3, [1, 1, 0]]  # [rows, labels]: yes is 0


@pytest.fixture
def spec(write_spec: Callable[..., Path]) -> JobSpec:
    return load_spec(write_spec(tasks=TASKS))


@pytest.mark.parametrize(
    "name, values",
    [
        ("g.csv", ["law;tax", "-", "", " sport "]),
        ("g.csv", ['["law", "tax"]', "[]", "", '["sport"]']),
        ("g.jsonl", [["tax", "law"], [], None, ["sport"]]),
        ("g.parquet", [["tax", "law"], [], None, ["sport"]]),
    ],
)
def test_a_column_lists_the_labels_of_each_row(
    name: str, values: list[Any], spec: JobSpec, tmp_path: Path
) -> None:
    rows = [{"id": f"d{n}", "topic": value} for n, value in enumerate(values)]
    gold = read_gold(write_rows(tmp_path / name, rows), spec)
    assert list(gold.tasks) == PARTS
    read = [gold.tasks[part].truth.tolist() for part in PARTS]
    assert [list(row) for row in zip(*read, strict=True)] == TRUTH
    assert all(gold.tasks[part].labels == ("yes", "no") for part in PARTS)
    one = read_gold(gold.source, spec, ("topic.tax",))
    assert list(one.tasks) == ["topic.tax"]


@pytest.mark.parametrize(
    "yes, no", [("yes", "no"), (True, False), (1, 0), (1.0, 0.0), ("true", "false")]
)
@pytest.mark.parametrize("name", ["g.csv", "g.jsonl", "g.parquet"])
def test_a_column_for_each_label_says_yes_or_no(
    name: str, yes: Any, no: Any, spec: JobSpec, tmp_path: Path
) -> None:
    rows = [
        {"id": "d0", "is_law": yes, "topic.tax": yes},
        {"id": "d1", "is_law": no, "topic.tax": None},
    ]
    spec = with_gold(spec, columns={"topic.law": "is_law"})
    gold = read_gold(write_rows(tmp_path / name, rows), spec)
    assert {task: of.truth.tolist() for task, of in gold.tasks.items()} == {
        "topic.law": [0, 1],
        "topic.tax": [0, UNLABELLED],
    }


@pytest.mark.parametrize("asked", [("topic.sport",), ("topic.law", "topic.sport")])
def test_a_label_that_is_asked_for_and_has_no_gold_is_named(
    asked: tuple[str, ...], spec: JobSpec, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "g.jsonl", [{"id": "d0", "topic.law": "yes"}])
    with pytest.raises(SpecError, match=r"g.jsonl: has no labels for topic.sport; name other"):
        read_gold(file, spec, asked)


def test_scores_of_one_label_are_soft_targets(spec: JobSpec, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "g.jsonl", [{"id": "d0", "s": 0.7}, {"id": "d1", "s": 0.2}])
    gold = read_gold(file, with_gold(spec, scores={"topic.law": "s"}))
    task = gold.tasks["topic.law"]
    assert task.truth.tolist() == [0, 1] and task.soft is not None
    assert task.soft[:, 0].tolist() == [0.7, 0.2]


@pytest.mark.parametrize("name", ["g.csv", "g.jsonl"])
def test_a_score_may_be_any_form_of_its_number(name: str, spec: JobSpec, tmp_path: Path) -> None:
    values = [3, 2.0, "1", "0.0"]
    rows = [{"id": f"d{n}", "quality": value} for n, value in enumerate(values)]
    gold = read_gold(write_rows(tmp_path / name, rows), spec)
    assert gold.tasks["quality"].truth.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(
    "column, value, gold, place, fix",
    [
        ("topic", "law;art", {}, "row 1, column topic", "which has law, tax, sport"),
        ("topic", "no", {}, "row 1, column topic", "write no: LABEL below gold.values"),
        ("quality", 2.5, {}, "row 1, column quality", "round the column"),
        ("quality", 7, {}, "row 1, column quality", "is outside 0 to 3"),
        ("quality", "good", {}, "row 1, column quality", "write good: LABEL below"),
        ("c", "x", {"columns": {"topic.art": "c"}}, "gold.columns.topic.art", "no such task"),
        (
            "topic",
            "law",
            {"columns": {"topic": "topic", "topic.law": "topic"}},
            "gold.columns.topic.law",
            "topic also has a column for all of its labels; remove one",
        ),
        ("s", 0.5, {"scores": {"topic": "s"}}, "gold.scores.topic", "topic.law: s"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_the_fix(
    column: str,
    value: Any,
    gold: dict[str, Any],
    place: str,
    fix: str,
    spec: JobSpec,
    tmp_path: Path,
) -> None:
    with pytest.raises(SpecError) as refused:
        file = write_rows(tmp_path / "g.jsonl", [{"id": "d0", column: value}])
        read_gold(file, with_gold(spec, **gold))
    [problem] = refused.value.problems
    assert place in str(problem.place) and fix in problem.fix, problem
