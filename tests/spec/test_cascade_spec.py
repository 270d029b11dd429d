"""The cascade of a task in a spec: which specs answer its stages."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import SpecError
from pipeline.spec.model import NO_MODEL
from pipeline.spec.parse import spec_of


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
