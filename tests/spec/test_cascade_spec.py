"""The cascade of a task in a spec: its stages fit together, and what does not is named."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import SpecError
from pipeline.spec.model import NO_MODEL
from pipeline.spec.parse import spec_of


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        ([{"question": "one"}], "tasks.0.cascade.stages: write at least 2"),
        (
            [{"question": "one"}, {}],
            "tasks.0.cascade.stages.1.question: a task needs a question, a readout or a classifier",
        ),
        (
            [{"question": "one", "labels": ["no", "yes"]}, {"question": "two"}],
            "tasks.0.cascade: stage 1 has the labels ['no', 'yes']; write those of the task in the"
            " same order, ['yes', 'no']",
        ),
        (
            [{"question": "one", "readout": "r", "classifier": {"kind": "onnx", "path": "c"}}] * 2,
            "tasks.0.cascade: stage 1: a task has a readout or a classifier; remove one of the two",
        ),
        (
            [{"question": "one", "exit": {"layer": 1}}, {"question": "two"}],
            "tasks.0.cascade.stages.0.exit: only a readout reads a layer before the last",
        ),
        (
            [{"readout": "r", "exit": {"layers": [1, 2], "confidence": 0.9}}, {"question": "two"}],
            "tasks.0.cascade.stages.0.exit: layers and confidence are not supported any more",
        ),
        (
            [{"question": "one", "model": {"path": "m", "kind": "encoder"}}, {"question": "two"}],
            "tasks.0.cascade.stages.0.question: an encoder answers by its own head",
        ),
    ],
)
def test_stages_that_do_not_fit_are_named(stages: list[dict[str, Any]], line: str) -> None:
    task = {"name": "a", "labels": ["yes", "no"], "cascade": {"stages": stages, "file": "f"}}
    assert any(each.startswith(line) for each in problems(task)), problems(task)


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ({"question": "Why?"}, "tasks.0.cascade: its stages answer; remove the task's question"),
        (
            {"calibration": {"method": "batch", "file": "f"}},
            "tasks.0.cascade: its stages answer; remove the task's calibration",
        ),
        (
            {"labels": ["a", "b", "c"]},
            "tasks.0.cascade: a cascade decides between two labels, and the task has 3",
        ),
    ],
)
def test_a_task_that_cannot_have_stages_is_named(others: dict[str, Any], line: str) -> None:
    stages = [{"question": "one"}, {"question": "two"}]
    task = {"name": "a", "labels": ["yes", "no"], "cascade": {"stages": stages, "file": "f"}}
    assert any(each.startswith(line) for each in problems(task | others)), problems(task | others)


def problems(task: dict[str, Any]) -> list[str]:
    content = {"name": "job", "model": {"path": "m"}, "input": {"path": "i"}, "output": "o"}
    with pytest.raises(SpecError) as caught:
        spec_of({**content, "tasks": [task]})
    return str(caught.value).splitlines()


def test_a_spec_whose_stages_bring_their_own_models_needs_none() -> None:
    classifier = {"classifier": {"kind": "fasttext", "path": "c"}}
    asked = {"question": "one", "model": {"path": "m"}}
    task = {"name": "a", "labels": ["yes", "no"]}
    content = {"name": "job", "input": {"path": "i"}, "output": "o"}
    cascade = {"stages": [classifier, asked], "file": "f"}
    spec = spec_of({**content, "tasks": [{**task, "cascade": cascade}]})
    assert spec.model == NO_MODEL
    assert [[each.model.path for each in of] for of in spec.stage_specs()] == [[""], ["m"]]
    for stages in ([classifier, {"question": "one"}], "none"):
        with pytest.raises(SpecError, match="model: missing; add it"):
            spec_of({**content, "tasks": [{**task, "cascade": {**cascade, "stages": stages}}]})


def test_stages_of_one_model_are_answered_together_and_the_first_with_the_other_tasks() -> None:
    own = {"path": "own"}
    layer = {"readout": "r", "exit": {"layer": 4}}
    asked, of_own = {"question": "one"}, {"question": "two", "model": own}
    classifier = {"classifier": {"kind": "onnx", "path": "c"}}
    tasks: list[dict[str, Any]] = [{"name": "plain", "question": "three"}]
    for name, stages in {
        "a": [asked, of_own],
        "b": [layer, asked],
        "c": [classifier, layer, of_own],
    }.items():
        tasks.append({"name": name, "cascade": {"stages": stages, "file": "f"}})
    spec = spec_of(
        {
            "name": "job",
            "model": {"path": "m"},
            "input": {"path": "i"},
            "output": "o",
            "tasks": [{"labels": ["yes", "no"], **task} for task in tasks],
        }
    )
    found = [
        [
            (each.model.path, each.exit and each.exit.layer, [t.name for t in each.tasks])
            for each in of
        ]
        for of in spec.stage_specs()
    ]
    assert found == [
        [("m", None, ["plain", "a", "c"]), ("m", 4, ["b"])],
        [("m", None, ["b"]), ("own", None, ["a"]), ("m", 4, ["c"])],
        [("own", None, ["c"])],
    ]
