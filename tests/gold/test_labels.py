"""Gold values with other names than the labels: one proposal for each, or what is unmatched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import SpecError
from pipeline.gold.labels import read_gold, similar_labels
from pipeline.spec.parse import load_spec


def test_values_without_a_similar_label_are_listed_with_the_labels_that_are_free(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    gold = tmp_path / "numbers.csv"
    gold.write_text("id,topic\na,Art\nb,7\nc,9\nd,\n")
    task = {"name": "topic", "question": "Which?", "labels": ["art", "law", "sport"]}
    with pytest.raises(SpecError) as refused:
        read_gold(str(gold), load_spec(write_spec(tasks=[task])))
    first, second, third = refused.value.problems
    free = "with the label that it means (law, sport), or leave the task out with --task"
    assert first.fix.endswith("; if it means art, write --value Art=art")
    assert second.fix.endswith(f"; no label has a similar name; write --value 7=LABEL {free}")
    assert (second.value, third.value) == ("7", "9")


@pytest.mark.parametrize(
    ("values", "used", "proposed"),
    [
        (["Business", "Sports"], [], {"Business": "business", "Sports": "sports"}),
        (["sport", "sportz"], [], {"sport": "sports"}),  # one to one: the more similar value
        (["sport"], ["sports"], {}),  # the gold has this label under its own name
        (["SPORTS"], ["sports"], {"SPORTS": "sports"}),
        (["1", "2"], [], {}),
    ],
)
def test_labels_are_proposed_one_to_one(
    values: list[str], used: list[str], proposed: dict[str, str]
) -> None:
    labels = ["world", "sports", "business"]
    unmatched = [label for label in labels if label not in used]
    assert similar_labels(values, labels, unmatched) == proposed
