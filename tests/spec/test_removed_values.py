"""What specs of earlier versions could say is refused in one line that says what to write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import SpecError
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

TASK = {"name": "a", "question": "A?", "labels": ["x", "y"]}
PRODUCTS = (
    "8-bit weights alone are not supported any more; write int8_dynamic (CPUs), or leave it out"
)
BY_CONFIDENCE = (
    "exit: layers and confidence are not supported any more; write {layer: N}, or a cascade of two "
    "stages with the same model and another exit.layer in each"
)
CONTEXTUAL = (
    "tasks.0.calibration: contextual calibration was removed; take it out, make a file with "
    "`assay calibrate --method batch`, and write {method: batch, file: FILE}"
)


def spec(changes: dict[str, Any]) -> JobSpec:
    """A spec of one task; the changes are keys of the model, of the task, or of the spec."""
    content: dict[str, Any] = {"name": "j", "model": {"path": "m"}, "input": {"path": "i"}}
    content |= {"output": "o", "tasks": [{**TASK, **changes.pop("task", {})}]}
    content["model"] |= changes.pop("model", {})
    return parse_spec(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": {"quantize": "int8"}}, f"model.quantize: {PRODUCTS} (got 'int8')"),
        (
            {"model": {"quantize": "fp8", "dtype": "float16"}},
            f"model.quantize: {PRODUCTS} (got 'fp8')",
        ),
        (
            {"model": {"quantize": "int4"}},
            "model.quantize: write 'none' or 'int8_dynamic' (got 'int4')",
        ),
        (
            {"model": {"gpus": 2}},
            "model.gpus: models above one GPU are not supported by this engine; write 1 (got 2)",
        ),
        (
            {"exit": {"layers": [8, 9], "confidence": 0.9}, "task": {"readout": "r"}},
            f"{BY_CONFIDENCE} (got {{'layers': [8, 9], 'confidence': 0.9}})",
        ),
        (
            {"exit": {"layer": 8, "confidence": 0.9}, "task": {"readout": "r"}},
            f"{BY_CONFIDENCE} (got {{'layer': 8, 'confidence': 0.9}})",
        ),
        (
            {"task": {"calibration": {"method": "contextual"}}},
            f"{CONTEXTUAL} (got {{'method': 'contextual'}})",
        ),
        (
            {"task": {"calibration": {"method": "contextual", "documents": ["N/A"]}}},
            f"{CONTEXTUAL} (got {{'method': 'contextual', 'documents': ['N/A']}})",
        ),
        (
            {"task": {"calibration": {"method": "contextual", "file": "b.json"}}},
            f"{CONTEXTUAL} (got {{'method': 'contextual', 'file': 'b.json'}})",
        ),
        (
            {"task": {"labels": ["x", "y", "z"], "chunks": "max"}},
            "tasks.0.chunks: the largest probability is that of one label, and the task has 3; "
            "write chunks: mean, or leave it out (got 'max')",
        ),
    ],
)
def test_what_was_removed_is_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(changes)
    assert str(caught.value).rpartition(" in spec")[0] == line


def test_one_gpu_may_be_written() -> None:
    assert spec({"model": {"gpus": 1}}).model.gpus == 1
