"""A device, a FIFO or a huge file in place of a file is one line, and is not read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import AssayError, SpecError, StorageError
from pipeline.gold import files
from pipeline.gold.files import read_gold_rows
from pipeline.local_files import check_regular, read_whole
from pipeline.runtime.fitted_files import read_fitted
from pipeline.sources.streams import opened
from pipeline.spec import parse
from pipeline.spec.parse import load_spec

MAKERS: dict[str, Callable[[Path], None]] = {
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a FIFO": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_file_is_refused_wherever_a_file_is_named(kind: str, tmp_path: Path) -> None:
    for name in ("spec.yaml", "gold.csv", "gold.jsonl", "gold.parquet"):
        MAKERS[kind](tmp_path / name)
    with pytest.raises(SpecError, match=f"spec.yaml: cannot be read: it is {kind} and not a file"):
        load_spec(tmp_path / "spec.yaml")
    for suffix in ("csv", "jsonl", "parquet"):
        gold = tmp_path / f"gold.{suffix}"
        with pytest.raises(AssayError, match=f"it is {kind} and not a file"):
            read_gold_rows(str(gold), suffix, {})
        with pytest.raises(StorageError, match=f"it is {kind}"), opened(str(gold), {}):
            pass
    MAKERS[kind](readout := tmp_path / "readout.safetensors")
    with pytest.raises(SpecError, match=f"the file cannot be read: it is {kind} and not a file"):
        read_fitted(str(readout), {}, place="tasks.0.readout")


def test_a_file_that_is_far_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spec.yaml").write_text("#" * 1001)
    (tmp_path / "gold.csv").write_text("id\n" + "1\n" * 500)
    monkeypatch.setattr(parse, "MAX_SPEC_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(SpecError, match="cannot be read: it is longer than 1,000 bytes"):
        load_spec(tmp_path / "spec.yaml")
    with pytest.raises(StorageError, match="it is longer than 1,000 bytes"):
        read_gold_rows(str(tmp_path / "gold.csv"), "csv", {})


def test_files_and_links_to_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "b").symlink_to("a")
    assert read_whole(tmp_path / "b", 4) == b"text"
    check_regular(tmp_path)
    check_regular(tmp_path / "missing")
