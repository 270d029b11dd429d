"""What specs of earlier versions could say is refused in one line that says what to write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import SpecError
from pipeline.spec.parse import parse_spec

PRODUCTS = (
    "8-bit weights alone are not supported any more; write int8_dynamic (CPUs), or leave it out"
)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"quantize": "int8"}, f"model.quantize: {PRODUCTS} (got 'int8')"),
        ({"quantize": "fp8", "dtype": "float16"}, f"model.quantize: {PRODUCTS} (got 'fp8')"),
        ({"quantize": "int4"}, "model.quantize: write 'none' or 'int8_dynamic' (got 'int4')"),
        (
            {"gpus": 2},
            "model.gpus: models above one GPU are not supported by this engine; write 1 (got 2)",
        ),
    ],
)
def test_a_value_of_the_model_that_was_removed_is_one_line(
    model: dict[str, Any], line: str
) -> None:
    task = {"name": "a", "question": "A?", "labels": ["x", "y"]}
    content = {"name": "j", "input": {"path": "i"}, "output": "o", "tasks": [task]}
    with pytest.raises(SpecError) as caught:
        parse_spec(json.dumps({**content, "model": {"path": "m", **model}}))
    assert str(caught.value).rpartition(" in spec")[0] == line


def test_one_gpu_may_be_written() -> None:
    task = {"name": "a", "question": "A?", "labels": ["x", "y"]}
    content = {"name": "j", "input": {"path": "i"}, "output": "o", "tasks": [task]}
    assert parse_spec(json.dumps({**content, "model": {"path": "m", "gpus": 1}})).model.gpus == 1
