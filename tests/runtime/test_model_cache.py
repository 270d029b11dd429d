"""A model in the cache of a machine is whole, or made again."""

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

from pipeline.errors import StorageError
from pipeline.runtime import model_cache
from pipeline.runtime.model_cache import SUMS, cached_model
from pipeline.runtime.weights import locate
from pipeline.spec.model import ModelSpec


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
    return "model.safetensors"


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

    folder = cached_model(files.id, tmp_path, fill)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, check=True)
    what = damage(folder)
    assert cached_model(files.id, tmp_path, fill) == folder  # this process has checked it
    assert len(made) == 1 and not caplog.messages
    monkeypatch.setattr(model_cache, "_whole", set())  # as another process
    with caplog.at_level(logging.WARNING):
        assert cached_model(files.id, tmp_path, fill) == folder
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
        cached_model("a", tmp_path, fill)
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_process_left_of_a_model_is_removed(
    model_folder: Path, tmp_path: Path
) -> None:
    files = locate(ModelSpec(path=str(model_folder)), tmp_path / "cache")

    def die(folder: Path) -> None:
        (folder / "part").write_text("of a model")
        os._exit(9)  # — as kill -9: nothing is cleaned up

    child = multiprocessing.get_context("fork").Process(
        target=cached_model, args=(files.id, tmp_path / "cache", die)
    )
    child.start()
    child.join()
    models = tmp_path / "cache" / "models"
    assert child.exitcode == 9 and len(list(models.iterdir())) == 1
    folder = cached_model(files.id, tmp_path / "cache", lambda made: (made / "a").touch())
    assert list(models.iterdir()) == [folder]
