"""Differences between snapshots, as people see them: with many labels, the most frequent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from json_outputs import validator
from reports import change_of, printed

from pipeline.integrity.diff import USUAL_LIMITS, Comparison, TaskChange, exceeded
from pipeline.report.console import json_value
from pipeline.report.drift import SHOWN_LABELS, drift_line, show_comparison


def compared(labels: int) -> Comparison:
    """Label i has i documents before, and one document of each label moved to the next."""
    names = tuple(f"label-{index}" for index in range(labels))
    counts = np.arange(labels, dtype=np.int64)
    flips = np.diag(counts) + np.eye(labels, k=1, dtype=np.int64)
    return comparison_of(change_of(names, counts, counts, flips), int(counts.sum()))


def comparison_of(change: TaskChange, rows: int) -> Comparison:
    texts: Any = {"before_alone": 0, "both": rows, "after_alone": 0}
    return Comparison("1", "2", {"before": rows, "after": rows}, texts, {"t": change}, (), ())


def shown(labels: int) -> list[list[str]]:
    """The words of each line of the shares of labels, which begins with one."""
    lines = [line.split() for line in printed(show_comparison, compared(labels)).splitlines()]
    return [line for line in lines if len(line) == 5 and line[0].startswith("label-")]


def test_with_few_labels_every_label_and_change_is_shown() -> None:
    assert [line[0] for line in shown(3)] == ["label-0", "label-1", "label-2"]
    assert shown(3)[1][3:] == ["1", "1"]  # gained and lost
    value = json_value(compared(3))
    validator("diff").validate(value)
    moves = [
        (move["before"], move["after"], move["texts"]) for move in value["tasks"]["t"]["moves"]
    ]
    assert moves == [("label-0", "label-1", 1), ("label-1", "label-2", 1)]


def test_with_many_labels_only_the_most_frequent_are_shown() -> None:
    rows = shown(2_000)
    assert [line[0] for line in rows] == [f"label-{1999 - n}" for n in range(SHOWN_LABELS)]
    value = json_value(compared(2_000))
    validator("diff").validate(value)
    (task,) = value["tasks"].values()
    assert len(task["moves"]) == 1_999
    assert task["moves"][5] == {"before": "label-5", "after": "label-6", "texts": 1}


def changed(flipped: int = 0, failing: int = 0, gained: int = 0) -> TaskChange:
    """Of 1,000 documents, half with each label; flips go both ways, so the shares stay."""
    stay = 500 - flipped // 2
    flips = np.array([[stay, flipped // 2], [flipped // 2, stay]])
    before, after = np.array([500, 500]), np.array([500 + gained, 500 - gained])
    return change_of("ab", before, after, flips, failing=failing)


SHIFTED, FLIPPED = "the labels of t shifted: PSI 0.", "the answers of t flipped: those of "


@pytest.mark.parametrize(
    ("change", "verdict", "reasons"),
    [
        (changed(), "stable", []),
        (changed(flipped=48), "stable", []),
        (changed(failing=50), "stable", []),
        (changed(flipped=52), "changed", [f"{FLIPPED}5.20% of the shared texts differ, and at mo"]),
        (changed(flipped=500), "changed", [FLIPPED]),
        (changed(flipped=1_000), "changed", [FLIPPED]),
        (changed(failing=51), "changed", ["51 rows of t had an answer and fail now: 5.10% of all"]),
        (changed(failing=1_000), "changed", ["1,000 rows of t had an answer and fail now: 100"]),
        (changed(gained=200), "shifted", [SHIFTED]),
        (changed(gained=200, flipped=500), "shifted", [SHIFTED, FLIPPED]),
    ],
)
def test_a_task_is_stable_only_if_it_exceeds_no_limit(
    change: TaskChange, verdict: str, reasons: list[str]
) -> None:
    comparison = comparison_of(change, 1_000)
    assert drift_line("t", comparison).partition(":")[0] == verdict
    for reason, start in zip(exceeded(comparison, USUAL_LIMITS), reasons, strict=True):
        assert reason.startswith(start)
    assert f"\n{verdict}: PSI" in printed(show_comparison, comparison)


def test_of_a_reworded_task_both_questions_are_shown_and_no_fingerprint() -> None:
    counts = np.array([5, 5])
    change = change_of("ab", counts, counts, np.diag(counts), questions=("Is it?", "Was it?"))
    shown = printed(show_comparison, comparison_of(change, 10))
    assert "t, reworded\n" in shown
    assert "question before  Is it?\nquestion after   Was it?\n" in shown
