"""Readouts and calibrations lie where the spec says, whole, and are named where they do not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from pipeline.errors import SpecError, StorageError
from pipeline.fitted.calibration import Calibration, CalibrationFile, Prior, parse_calibration
from pipeline.runtime.fitted_files import (
    load_calibrations,
    options_for,
    read_fitted,
    warn_of_stale_calibrations,
)
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.named_files import open_target

PLACES = ["{folder}/new/c.json", "file://{folder}/new/c.json", "memory://{folder}/new/c.json"]
LABELS = ("yes", "no")
BATCH = Calibration("batch", LABELS, Prior((0.75, 0.25)))
FILE = CalibrationFile("rude", BATCH, "0123456789abcdef", {"snapshot": 3}, 1_000)


@pytest.fixture
def make_spec(write_spec: Callable[..., Path]) -> Callable[..., JobSpec]:
    def make(method: str, file: str, labels: tuple[str, ...] = LABELS) -> JobSpec:
        calibration = {"method": method, "file": file}
        task = {"name": "rude", "question": "?", "labels": list(labels), "calibration": calibration}
        return load_spec(write_spec(tasks=[task]))

    return make


def read(path: str) -> bytes:
    return read_fitted(path, {}, place="tasks.0.readout", made_by="assay fit")


@pytest.mark.parametrize("place", PLACES)
def test_the_last_that_was_written_is_read(place: str, tmp_path: Path) -> None:
    path = place.format(folder=tmp_path)
    open_target(path, {}).write(b"first, and longer")
    open_target(path, {}).write(b"second")
    assert read(path) == b"second"


def test_a_file_in_the_home_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    open_target("~/c.json", {}).write(b"{}")
    assert (tmp_path / "c.json").read_bytes() == read("~/c.json") == b"{}"


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match=f"{path}: cannot be written: .*No space left"):
        open_target(str(path), {}).write(b"after")
    assert os.listdir(tmp_path) == ["c.json"] and path.read_bytes() == b"before"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("{folder}/none", "No such file or directory"),
        ("{folder}", "Is a directory"),
        ("memory://{folder}/none", "there is no such file"),
    ],
)
def test_a_file_that_is_not_there_is_a_problem_of_the_spec(
    place: str, reason: str, tmp_path: Path
) -> None:
    path = place.format(folder=tmp_path)
    with pytest.raises(SpecError) as refused:
        read(path)
    (problem,) = refused.value.problems
    assert problem.place == "tasks.0.readout" and problem.value == path
    assert problem.fix == f"the file cannot be read: {reason}; `assay fit` makes one"


def test_a_store_that_does_not_answer_is_no_problem_of_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> bytes:
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", away)
    with pytest.raises(StorageError, match=r"memory://c: cannot be read: .*run again"):
        read("memory://c")


def test_the_options_of_the_output_open_a_file_in_the_same_kind_of_store(
    write_spec: Callable[..., Path],
) -> None:
    options = {"endpoint_url": "x"}
    update = {"output": "s3://labels/out", "storage_options": options}
    spec = load_spec(write_spec()).model_copy(update=update)
    assert options_for("s3://other/c.json", spec) == options
    assert options_for("/c.json", spec) == {} == options_for("gs://c/c.json", spec)


def test_a_calibration_file_is_parsed_back() -> None:
    assert parse_calibration(FILE.json()) == FILE


def test_a_calibration_is_known_by_what_it_does_and_not_by_where_it_is_from() -> None:
    moved = parse_calibration(CalibrationFile("other", BATCH, "f", {"gold": "a"}, 7).json())
    assert moved.calibration.hash == BATCH.hash
    assert Calibration("batch", LABELS, Prior((0.7, 0.3))).hash != BATCH.hash


@pytest.mark.parametrize(
    ("method", "labels", "reason"),
    [
        ("batch", ("no", "yes"), "it is for the labels ['yes', 'no'], in this order"),
        ("batch", ("yes", "no", "maybe"), "and the task has ['yes', 'no', 'maybe']"),
        ("temperature", LABELS, "it is of method 'batch', not 'temperature'"),
    ],
)
def test_another_tasks_calibration_is_refused(
    make_spec: Callable[..., JobSpec],
    tmp_path: Path,
    method: str,
    labels: tuple[str, ...],
    reason: str,
) -> None:
    path = str(tmp_path / "c.json")
    open_target(path, {}).write(FILE.json())
    assert load_calibrations(make_spec("batch", path)) == {"rude": FILE}
    with pytest.raises(SpecError) as refused:
        load_calibrations(make_spec(method, path, labels))
    (problem,) = refused.value.problems
    assert problem.place == "tasks.0.calibration.file" and problem.value == path
    assert "task 'rude'" in problem.fix and reason in problem.fix


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 2}', FILE.json()[:-9]])
def test_what_is_no_calibration_file_is_refused(
    make_spec: Callable[..., JobSpec], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(
        SpecError, match=r"tasks\.0\.calibration\.file: cannot be used for task 'rude'"
    ):
        load_calibrations(make_spec("batch", str(path)))


def test_a_calibration_of_other_answers_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    raw = Fingerprint({"task": "rude"})
    calibrated = Fingerprint({"task": "rude", "calibration": "x"})
    made = CalibrationFile("rude", BATCH, raw.id, {"snapshot": 1}, 9)
    with caplog.at_level(logging.WARNING):
        warn_of_stale_calibrations({"rude": made}, {"rude": calibrated})
        assert not caplog.records
        warn_of_stale_calibrations({"rude": made}, {"rude": Fingerprint({"task": "reworded"})})
    assert raw.id in caplog.text and "task rude" in caplog.text
