"""Fitted files are found where the spec names them; missing or broken ones are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import tenacity

from pipeline.errors import SpecError, StorageError
from pipeline.runtime.fitted_files import options_for, read_fitted
from pipeline.spec.parse import load_spec
from pipeline.stores import retries
from pipeline.stores.named_files import open_target


def read(path: str) -> bytes:
    return read_fitted(path, {}, place="tasks.0.readout")


def test_a_file_in_the_home_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    open_target("~/c.json", {}).write(b"{}")
    assert (tmp_path / "c.json").read_bytes() == read("~/c.json") == b"{}"


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
    monkeypatch.setattr(retries, "stop_after_delay", lambda _: tenacity.stop_after_delay(0.5))
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
