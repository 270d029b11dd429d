"""Gold values that are not labels, and what a gold set says of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import SpecError
from pipeline.gold.labels import read_gold
from pipeline.spec.parse import load_spec


def test_values_that_are_not_labels_are_listed_with_the_labels(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    gold = tmp_path / "numbers.csv"
    gold.write_text("id,topic\na,Art\nb,7\nc,7\nd,\n")
    task = {"name": "topic", "question": "Which?", "labels": ["art", "law", "sport"]}
    with pytest.raises(SpecError) as refused:
        read_gold(str(gold), load_spec(write_spec(tasks=[task])))
    for problem, (value, row, rows) in zip(
        refused.value.problems, [("Art", 1, 1), ("7", 2, 2)], strict=True
    ):
        assert problem.place == f"{gold}, row {row}, column topic" and problem.value == value
        for part in (
            "art, law, sport",
            f"write {value}: LABEL below gold.values",
            "--task",
            f"it: {rows})",
        ):
            assert part in problem.fix


def test_a_column_that_no_task_reads_is_named(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    gold = tmp_path / "gold.csv"
    gold.write_text("id,text,topic,mood\na,b,art,good\n")
    task = {"name": "topic", "question": "Which?", "labels": ["art", "law"]}
    assert read_gold(str(gold), load_spec(write_spec(tasks=[task]))).counts.unused == ("mood",)
