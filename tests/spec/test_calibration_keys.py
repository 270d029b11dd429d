"""The key `calibration`: what it may say, and the fingerprint of the task alone that has it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pipeline.errors import SpecError
from pipeline.spec.fingerprint import Fingerprint, fingerprints
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

BATCH = {"method": "batch", "file": "/b.json"}


def spec(calibration: dict[str, Any] | None) -> JobSpec:
    content = {
        "name": "job",
        "model": {"path": "m"},
        "input": {"path": "in"},
        "output": "out",
        "tasks": [
            {"name": "a", "question": "A?", "labels": ["x", "y"], "calibration": calibration},
            {"name": "b", "question": "B?", "labels": ["p", "q"]},
        ],
    }
    return parse_spec(yaml.safe_dump(content, sort_keys=False))


def versions(calibration: dict[str, Any] | None, hash: str = "1") -> dict[str, Fingerprint]:
    hashes = {"a": hash}
    return fingerprints(spec(calibration), weights={}, dtype="float32", calibrations=hashes)


@pytest.mark.parametrize(
    ("calibration", "place"),
    [
        ({**BATCH, "method": "magic"}, "tasks.0.calibration.method"),
        ({"method": "batch"}, "tasks.0.calibration.file"),
        ({**BATCH, "documents": [""]}, "tasks.0.calibration.documents"),
    ],
)
def test_a_mistake_is_named_where_it_is(calibration: dict[str, Any], place: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec(calibration)
    assert [problem.place for problem in refused.value.problems] == [place]


def test_each_calibration_is_another_version_of_its_task_alone() -> None:
    kinds = [
        versions(None),
        versions(BATCH),
        versions(BATCH, hash="2"),
        versions({**BATCH, "method": "temperature"}),
    ]
    assert len({each["a"].id for each in kinds}) == len(kinds)
    assert len({each["b"].id for each in kinds}) == 1
    assert {each["a"].raw.id for each in kinds} == {kinds[0]["a"].id}


def test_where_a_file_lies_is_no_part_of_it() -> None:
    assert versions(BATCH)["a"].id == versions({**BATCH, "file": "s3://c/d.json"})["a"].id
