"""Gold values that are not labels, and what a gold set says of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from judged import with_gold

from pipeline.errors import SpecError
from pipeline.gold.labels import gold_hash, read_gold
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


def test_scores_that_differ_have_different_hashes_also_where_their_labels_are_equal(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    task = {"name": "toxic", "question": "Toxic?", "labels": ["toxic", "clean"]}
    spec = load_spec(write_spec(tasks=[task]))
    hashes = []
    for name, score in (("a", 0.8), ("b", 0.9)):
        file = tmp_path / f"{name}.csv"
        file.write_text(f"id,s\n1,{score}\n2,0.1\n")
        gold = read_gold(str(file), with_gold(spec, scores={"toxic": "s"}))
        assert gold.tasks["toxic"].truth.tolist() == [0, 1] and gold.kind("toxic") == "scores"
        hashes.append(gold_hash(gold, "toxic"))
    assert hashes[0] != hashes[1]
