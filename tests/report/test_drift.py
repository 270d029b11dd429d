"""Differences between snapshots, as people see them: with many labels, the most frequent."""

from __future__ import annotations

import io

import numpy as np
from json_outputs import validator
from rich.console import Console

from pipeline.integrity.diff import Comparison, TaskChange
from pipeline.report.console import json_value
from pipeline.report.drift import SHOWN_LABELS, comparison_json, show_comparison


def compared(labels: int) -> Comparison:
    """Label i has i documents before, and one document of each label moved to the next."""
    names = tuple(f"label-{index}" for index in range(labels))
    counts = np.arange(labels, dtype=np.int64)
    flips = np.diag(counts) + np.eye(labels, k=1, dtype=np.int64)
    change = TaskChange("t", names, ("f", "f"), counts, counts, 0, (), flips)
    whole = int(counts.sum())
    return Comparison("1", "2", (whole, whole), (0, whole, 0), (change,), (), ())


def shown(labels: int) -> list[list[str]]:
    """The words of each line that begins with a label."""
    stream = io.StringIO()
    show_comparison(compared(labels), Console(file=stream, width=400, soft_wrap=True))
    lines = [line.split() for line in stream.getvalue().splitlines()]
    return [line for line in lines if line and line[0].startswith("label-")]


def test_with_few_labels_every_flip_count_is_shown() -> None:
    assert [line[0] for line in shown(3)] == ["label-0", "label-1", "label-2"]
    assert shown(3)[1][3:] == ["0", "1", "1"]
    value = json_value(comparison_json(compared(3)))
    validator("diff").validate(value)
    assert value["tasks"]["t"]["flips"] == [[0, 1, 0], [0, 1, 1], [0, 0, 2]]


def test_with_many_labels_only_the_most_frequent_are_shown() -> None:
    rows = shown(2_000)
    assert [line[0] for line in rows] == [f"label-{1999 - n}" for n in range(SHOWN_LABELS)]
    assert {len(line) for line in rows} == {3}
    value = json_value(comparison_json(compared(2_000)))
    validator("diff").validate(value)
    (task,) = value["tasks"].values()
    assert "flips" not in task and len(task["flipped"]) == 1_999
    assert task["flipped"][5] == {"from": "label-5", "to": "label-6", "documents": 1}
