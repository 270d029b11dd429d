"""A task without a question needs a readout, and exit one in every task, at one layer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import SpecError
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

TRAINED = {"name": "a", "question": None, "labels": ["x", "y"], "readout": "r"}
ASKED = {"name": "b", "question": "B?", "labels": ["x", "y"]}


def spec(*tasks: dict[str, Any], **changes: Any) -> JobSpec:
    content = {"name": "j", "model": {"path": "m"}, "input": {"path": "i"}, "output": "o"}
    return parse_spec(json.dumps({**content, "tasks": list(tasks), **changes}))


def test_an_exit_layer_is_read_as_written() -> None:
    assert spec(TRAINED, exit={"layer": 8}).exit.layer == 8  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "tasks, way, line",
    [
        (
            [{**TRAINED, "readout": None}],
            None,
            "tasks.0.question: a task needs a question, a readout or a classifier; write one",
        ),
        ([TRAINED], {}, "exit.layer: missing; add it"),
        (
            [TRAINED, ASKED],
            {"layer": 8},
            "exit: tasks ['b'] have no readout, and only a readout reads a layer before the last; "
            "give them one, or remove exit (got {'layer': 8})",
        ),
    ],
)
def test_a_mistake_is_one_line(
    tasks: list[dict[str, Any]], way: dict[str, Any] | None, line: str
) -> None:
    with pytest.raises(SpecError) as caught:
        spec(*tasks, exit=way)
    assert str(caught.value).rpartition(" in spec")[0] == line
