"""A mistake in a spec's file names the nearest key, the line and the task."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from pipeline.errors import Option, Problem, SpecError
from pipeline.spec.parse import load_spec, located, parse_spec

SMALLEST = """
name: job
model: {path: some/model}
input: {path: in.jsonl}
output: out
tasks:
- {name: a, question: Why, labels: [x, y]}
"""


def lines_of(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    return str(caught.value).splitlines()


MISSPELT = """name: job
model: {path: some/model, dtpe: auto}
input:
  path: in.jsonl
  txt: body
output: out
max_tokens: 9
tasks:
- name: toxic
  question: Why
  labels: [x, y]
- name: topic
  question: What
  lables: [x, y]
  calibration: {method: batch, fiel: a}
  scoring: [first]
"""


def test_a_misspelt_key_offers_the_nearest_and_names_the_line_and_the_task(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(MISSPELT)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value).splitlines() == [
        f"model.dtpe: no such key; write dtype (got 'auto') in {path}, line 2",
        f"input.txt: no such key; write text (got 'body') in {path}, line 5",
        "tasks.1.scoring: write 'auto', 'first_token' or 'full' (got ['first']) "
        f"in {path}, line 16, task 'topic'",
        "tasks.1.calibration.fiel: no such key; write file (got 'a') "
        f"in {path}, line 15, task 'topic'",
        "tasks.1.lables: no such key; write labels (got ['x', 'y']) "
        f"in {path}, line 14, task 'topic'",
        f"max_tokens: no such key; max_tokens belongs below documents (got 9) in {path}, line 7",
    ]


def test_a_key_that_resembles_none_lists_those_that_exist() -> None:
    (line,) = lines_of(SMALLEST + "filter: {keep: a, zzz: 1}\n")
    assert line == (
        "filter.zzz: no such key; remove it or correct its spelling: the keys are keep, drop_top, "
        "thresholds, policy, on_error, storage_options (got 1) in spec, line 8"
    )


def test_a_value_of_two_possible_types_is_one_line_that_names_both() -> None:
    (line,) = lines_of(SMALLEST.replace("in.jsonl", "in.jsonl, shard_bytes: big"))
    assert line == (
        "input.shard_bytes: write 'auto' or write a whole number (got 'big') in spec, line 4"
    )


def test_a_mistake_that_is_found_later_has_its_line_too(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(SMALLEST)
    with pytest.raises(SpecError) as caught, located(path):
        raise SpecError(
            [Problem("tasks.0.labels", "begin alike", 3), Problem(Option("tasks"), "no", "x")]
        )
    assert str(caught.value).splitlines() == [
        f"tasks.0.labels: begin alike (got 3) in {path}, line 7, task 'a'",
        "tasks: no (got 'x')",
    ]


def test_mistakes_of_a_worker_survive_what_others_add_to_the_error() -> None:
    error = SpecError([Problem("tasks.0.labels", "begin alike", 3)])
    error.args = (*error.args, "advice of Ray Data")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is SpecError and copy.problems == error.problems
