"""How labels are scored and kept: the keys of a task, their rules and their one-line refusals."""

from __future__ import annotations

import pytest
import yaml

from pipeline.errors import SpecError
from pipeline.spec.fingerprint import fingerprints
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import MOST_COLUMNS

MANY = [f"label{i}" for i in range(MOST_COLUMNS + 1)]


def spec(**more: object) -> JobSpec:
    task = {"name": "a", "question": "Why?", "labels": ["x/1", "x/2", "y"], **more}
    content = {
        "name": "job",
        "model": {"path": "m"},
        "input": {"path": "in"},
        "output": "out",
        "tasks": [task, {"name": "b", "question": "B?", "labels": ["p", "q"]}],
    }
    return parse_spec(yaml.safe_dump(content, sort_keys=False))


def refusal(**more: object) -> str:
    with pytest.raises(SpecError) as caught:
        spec(**more)
    return str(caught.value)


def test_without_a_choice_first_tokens_are_scored_where_they_suffice_and_all_labels_kept() -> None:
    task = spec().tasks[0]
    assert (task.scoring, task.length_penalty) == ("auto", 0)
    assert (task.beam, task.top_k, task.separator) == (None, None, None)


@pytest.mark.parametrize(
    "more, line",
    [
        ({"scoring": "last"}, "tasks.0.scoring: write 'auto', 'first_token' or 'full'"),
        ({"length_penalty": -1}, "tasks.0.length_penalty: "),
        ({"beam": 0}, "tasks.0.beam: "),
        ({"top_k": 0}, "tasks.0.top_k: "),
        (
            {"scoring": "first_token", "beam": 8},
            "tasks.0.beam: a first token has neither length nor beams; write scoring: full (got 8)",
        ),
        ({"scoring": "first_token", "length_penalty": 1}, "tasks.0.length_penalty: a first token"),
        ({"separator": ">"}, "tasks.0.separator: no label contains it; write the text between"),
        *(
            ({"readout": "r", key: value}, f"tasks.0.{key}: a trained readout reads no label's")
            for key, value in (("scoring", "full"), ("beam", 8), ("length_penalty", 0.5))
        ),
        (
            {"top_k": 2, "calibration": {"method": "batch", "file": "f"}},
            "tasks.0.calibration: a calibration changes the probabilities of all labels, and top_k",
        ),
        (
            {"labels": MANY},
            "tasks.0.top_k: 1,001 labels are too many for a column each; keep the likeliest: "
            "top_k: 10",
        ),
    ],
)
def test_what_cannot_be_scored_or_kept_is_one_line(more: dict[str, object], line: str) -> None:
    said = refusal(**more)
    assert said.startswith(line) and "\n" not in said


def test_a_readouts_likeliest_labels_may_be_kept_and_a_beams_answers_calibrated_by_a_file() -> None:
    assert spec(readout="r", top_k=2, separator="/").tasks[0].top_k == 2
    by_file = {"method": "batch", "file": "f"}
    assert spec(beam=8, calibration=by_file).tasks[0].calibration is not None


def test_a_thousand_labels_have_columns_and_more_are_kept_by_rank() -> None:
    assert spec(labels=MANY[:-1]).tasks[0].top_k is None
    assert spec(labels=MANY, top_k=3).tasks[0].top_k == 3


def of(job: JobSpec) -> dict[str, str]:
    found = fingerprints(job, weights={"w": "1"}, dtype="float32")
    return {task: fingerprint.id for task, fingerprint in found.items()}


@pytest.mark.parametrize(
    "more",
    [
        {"scoring": "full"},
        {"length_penalty": 0.5},
        {"beam": 8},
        {"top_k": 2},
        {"separator": "/"},
    ],
)
def test_a_choice_changes_the_tasks_fingerprint_and_no_others(more: dict[str, object]) -> None:
    before, after = of(spec()), of(spec(**more))
    assert before["a"] != after["a"] and before["b"] == after["b"]


def test_answers_given_before_there_was_a_choice_still_stand() -> None:
    assert of(spec(scoring="auto", length_penalty=0, beam=None, top_k=None)) == of(spec())
    assert of(spec(scoring="first_token")) == of(spec())
    content = fingerprints(spec(), weights={"w": "1"}, dtype="float32")["a"].content
    assert content["task"] == {
        "question": "Why?",
        "labels": [[label, [label]] for label in ("x/1", "x/2", "y")],
        "scoring": "first_token",
    }
