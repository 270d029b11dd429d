"""Calibration files, the work that they make, and the column that comes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from answer_rules import broken_answers
from label_tables import label_table

from pipeline.errors import SpecError, StorageError
from pipeline.fitted.calibration import Calibration, Prior, Temperature
from pipeline.ledger.columns import calibrated_type
from pipeline.ledger.keys import calibration_key
from pipeline.ledger.label_rows import with_calibrated
from pipeline.runtime.calibration_files import (
    CalibrationFile,
    calibration_hash,
    load_calibrations,
    parse_calibration,
    stored_calibrations,
    versions_with_equal_raw_answers,
    warn_of_stale_calibrations,
)
from pipeline.runtime.fitted_files import read_fitted, write_fitted
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore

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


@pytest.mark.parametrize("place", ["{folder}/new/c.json", "file://{folder}/c.json", "memory://c/c"])
def test_a_file_is_read_as_it_was_written(place: str, tmp_path: Path) -> None:
    path = place.format(folder=tmp_path)
    write_fitted(path, CalibrationFile("rude", BATCH, "0", {"gold": "a"}, 7).json(), {})
    write_fitted(path, FILE.json(), {})  # in its place
    assert parse_calibration(read_fitted(path, {}, place="--to", made_by="")) == FILE


def test_a_calibration_is_known_by_what_it_does_and_not_by_where_it_is_from() -> None:
    moved = CalibrationFile("other", BATCH, "f", {"gold": "a"}, 7)
    assert calibration_hash(moved) == calibration_hash(FILE)
    other = CalibrationFile("rude", Calibration("batch", LABELS, Prior((0.7, 0.3))), "f", {}, 7)
    assert calibration_hash(other) != calibration_hash(FILE)


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
    write_fitted(path, FILE.json(), {})
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
    with pytest.raises(SpecError, match=r"tasks\.0\.calibration\.file: cannot calibrate"):
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


def test_a_contextual_calibration_is_measured_once_and_the_first_writers_values_hold(
    store: LocalStore,
) -> None:
    versions = {"rude": Fingerprint({"task": "rude"})}

    def measure(prior: float) -> CalibrationFile:
        change = Prior((prior, 1 - prior))
        return CalibrationFile("rude", Calibration("contextual", LABELS, change), "f", {}, 2)

    def measured_by_both(tasks: Sequence[str]) -> dict[str, CalibrationFile]:
        # — another driver measured at the same time, and was faster
        stored_calibrations(store, versions, lambda _tasks: {"rude": measure(0.25)})
        return {task: measure(0.75) for task in tasks}

    first = stored_calibrations(store, versions, measured_by_both)
    assert first == {"rude": measure(0.25)}
    assert first == stored_calibrations(store, versions, lambda _tasks: pytest.fail("measured"))
    assert versions_with_equal_raw_answers(store, versions) == {"rude": []}


def test_a_damaged_stored_calibration_is_an_error_with_its_key(store: LocalStore) -> None:
    version = Fingerprint({"task": "rude"})
    store.create(calibration_key("rude", version.id), b"{}")
    with pytest.raises(StorageError, match=r"calibration\.json: is not a calibration file"):
        stored_calibrations(store, {"rude": version}, lambda _tasks: {})


def answers() -> pa.Table:
    p = np.array([[0.6, 0.4], [np.nan, np.nan], [0.9, 0.1]], np.float32)
    mass = np.array([0.5, np.nan, 0.5], np.float32)
    counts = np.array([1, 0, 1])
    status = ["ok", "empty", "truncated"]
    return label_table(["a", "b", "c"], p, mass, counts, counts, status, LABELS)


def test_the_column_is_what_the_calibration_gives_and_null_without_an_answer() -> None:
    table = with_calibrated(answers(), BATCH)
    first, second, third = table.column("calibrated").to_pylist()
    assert second is None
    odds = (0.6 / 0.75) / (0.4 / 0.25), (0.9 / 0.75) / (0.1 / 0.25)  # by hand
    for row, odd, label in ((first, odds[0], "no"), (third, odds[1], "yes")):
        assert row["label"] == label
        assert row["p"]["yes"] == pytest.approx(odd / (1 + odd), abs=1e-6)
        assert row["margin"] == pytest.approx(abs(row["p"]["yes"] - row["p"]["no"]), abs=1e-6)
    assert table.drop_columns(["calibrated"]).equals(answers())
    assert table.column("label").to_pylist() == ["yes", None, "yes"]  # is always raw


def test_a_damaged_column_is_reported() -> None:
    table = with_calibrated(answers(), Calibration("temperature", LABELS, Temperature(2.0)))
    assert list(broken_answers(table, LABELS)) == []
    rows = table.column("calibrated").to_pylist()

    def problems(changed: list[Any]) -> list[str]:
        kind = calibrated_type(table.schema.field("p").type)
        column = pa.array(changed, kind)
        return list(broken_answers(table.set_column(8, "calibrated", column), LABELS))

    assert problems([*rows[:2], None]) == [
        "calibrated is null with an answer, or not null without one in row 2"
    ]
    assert problems([rows[0], rows[0], rows[2]]) == [
        "calibrated is null with an answer, or not null without one in row 1"
    ]
    assert problems([{**rows[0], "label": "no"}, *rows[1:]]) == [
        "calibrated.label is not the most probable in row 0"
    ]
    skewed = {**rows[2], "p": {"yes": 0.9, "no": 0.3}}
    assert problems([*rows[:2], skewed])[0] == "calibrated.p does not sum to 1 in row 2"
