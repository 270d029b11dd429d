"""The columns of the input that a condition names: odd values, broken columns, and twins."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from pipeline.sources.condition import input_columns
from pipeline.sources.source import InputObject, cut
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]


@pytest.mark.parametrize(("value", "text"), [(2**64, f"{2**64}"), ("\ud83d", "\\ud83d")])
@pytest.mark.parametrize("row", [0, 200])
def test_a_value_that_arrow_does_not_hold_is_a_text(
    write: Write, value: object, text: str, row: int
) -> None:
    values = [value if n == row else n for n in range(201)]
    lines = "\n".join(json.dumps({"text": "a", "n": each}) for each in values)
    (shard,) = cut(write("a.jsonl", lines.encode()), Columns("text", None), 10**6)
    expected = [text if n == row else str(n) for n in range(201)]
    assert input_columns(shard, ["n"], {})["n"].to_pylist() == expected
