"""A model is found by path and named by content."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from pipeline.errors import ModelError, SpecError, StorageError
from pipeline.inference.loading import load_tokenizer
from pipeline.runtime import weights
from pipeline.runtime.weights import SUMS, cached_model, fetch, locate, publish_atomically
from pipeline.spec.model import ModelSpec


def test_a_folder_is_named_by_its_files_and_not_by_its_place(
    model_folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    (copy / "README.md").write_text("answers nothing")
    first = locate(ModelSpec(path=str(model_folder)), tmp_path / "cache")
    second = locate(ModelSpec(path=str(copy)), tmp_path / "cache")
    assert first.hashes == second.hashes and first.id == second.id
    assert fetch(second, tmp_path / "cache", {}) == copy
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    assert locate(ModelSpec(path=str(copy)), tmp_path / "cache").id != first.id


def test_a_folder_that_is_gone_on_the_worker_is_a_model_error(
    model_folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    files = locate(ModelSpec(path=str(copy)), tmp_path / "cache")
    shutil.rmtree(copy)
    with pytest.raises(ModelError, match="not on this machine"):
        fetch(files, tmp_path / "cache", {})


def test_a_remote_folder_is_brought_in_whole_and_once(model_folder: Path, tmp_path: Path) -> None:
    files = locate(ModelSpec(path=f"file://{model_folder}"), tmp_path / "cache")
    assert files.kind == "remote" and "model.safetensors" in files.hashes
    folder = fetch(files, tmp_path / "cache", {})
    assert load_tokenizer(folder).chat_template == load_tokenizer(model_folder).chat_template
    assert fetch(files, tmp_path / "cache", {}) == folder
    assert [path.name for path in folder.parent.iterdir()] == [files.id]


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("no/such.gguf", "there is no such file"),
        (".", "holds no .safetensors file"),
        ("file:///nowhere/model", "no .safetensors file is below it"),
        ("nosuchprotocol://model", "cannot be opened"),
    ],
)
def test_a_path_that_names_no_model_is_a_spec_error(path: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=fix):
        locate(ModelSpec(path=path), tmp_path / "cache")


def test_two_processes_that_finish_one_folder_leave_one(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "by").write_text(name)
        assert publish_atomically(tmp_path / name, final) == final
    assert (final / "by").read_text() == "first"
    assert os.listdir(tmp_path) == ["final"]


def flip_a_sign(folder: Path) -> str:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x80
    written = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))  # — as a disk's mistake would
    return "model.safetensors is not what was written"


def drop_a_file(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json is not what was written"


def drop_the_hashes(folder: Path) -> str:
    (folder / SUMS).unlink()
    return "No such file or directory"


def break_the_hashes(folder: Path) -> str:
    (folder / SUMS).write_bytes(b"\xff")
    return "can't decode byte"


def empty_the_hashes(folder: Path) -> str:
    (folder / SUMS).write_bytes(b"")
    return "model.safetensors"


def add_a_file(folder: Path) -> str:
    (folder / "added.json").write_text("{}")
    return "added.json is not what was written"


@pytest.mark.parametrize(
    "damage",
    [flip_a_sign, drop_a_file, add_a_file, drop_the_hashes, break_the_hashes, empty_the_hashes],
)
def test_a_cached_model_that_was_damaged_is_named_and_made_again(
    damage: Callable[[Path], str],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = locate(ModelSpec(path=str(model_folder)), tmp_path / "cache")
    made: list[Path] = []

    def fill(folder: Path) -> None:
        made.append(folder)
        shutil.copytree(model_folder, folder, dirs_exist_ok=True)

    folder = cached_model(files, tmp_path, fill)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, check=True)
    what = damage(folder)
    assert cached_model(files, tmp_path, fill) == folder  # this process has checked it
    assert len(made) == 1 and not caplog.messages
    monkeypatch.setattr(weights, "_whole", set())  # as another process
    with caplog.at_level(logging.WARNING):
        assert cached_model(files, tmp_path, fill) == folder
    (warning,) = caplog.messages[-1:]
    assert warning.startswith(f"{folder}: ") and what in warning and "made again" in warning
    assert len(made) == 2
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    assert os.listdir(folder.parent) == [folder.name]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_model(
    error: Exception, model_folder: Path, tmp_path: Path
) -> None:
    def fill(folder: Path) -> None:
        (folder / "part").touch()
        raise error

    with pytest.raises(StorageError, match=r"the disk is full; free some space, or name another"):
        cached_model(locate(ModelSpec(path=str(model_folder)), tmp_path), tmp_path, fill)
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_process_left_of_a_model_is_removed(
    model_folder: Path, tmp_path: Path
) -> None:
    files = locate(ModelSpec(path=str(model_folder)), tmp_path / "cache")

    def die(folder: Path) -> None:
        (folder / "part").write_text("of a model")
        os._exit(9)  # — as kill -9: nothing is cleaned up

    child = multiprocessing.get_context("fork").Process(
        target=cached_model, args=(files, tmp_path / "cache", die)
    )
    child.start()
    child.join()
    models = tmp_path / "cache" / "models"
    assert child.exitcode == 9 and len(list(models.iterdir())) == 1
    folder = cached_model(files, tmp_path / "cache", lambda made: (made / "a").touch())
    assert list(models.iterdir()) == [folder]
