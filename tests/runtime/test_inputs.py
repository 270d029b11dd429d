"""An input that is in the output is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finished import toy_spec

from pipeline.errors import SpecError
from pipeline.runtime.plan import check_places
from pipeline.spec.parse import parse_spec


@pytest.mark.parametrize(
    ("path", "output", "message"),
    [
        ("data", "data", "1 of its files are in the output "),
        ("data/**", ".", "1 of its files are in the output "),
        ("linked", "data", "1 of its files are in the output "),
        ("data/a.jsonl", "linked", "1 of its files are in the output "),
        ("data", "data/out", None),
        ("linked/*.jsonl", "data/out", None),
    ],
)
def test_an_input_in_the_output_is_refused_before_there_are_results(
    tmp_path: Path, path: str, output: str, message: str | None
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "linked").symlink_to("data")
    places = {"input": {"path": str(tmp_path / path)}, "output": str((tmp_path / output).resolve())}
    spec = parse_spec(json.dumps(toy_spec(tmp_path, **places)))
    if message is None:
        check_places(spec, tmp_path / "cache")
    else:
        with pytest.raises(SpecError, match=message):
            check_places(spec, tmp_path / "cache")
