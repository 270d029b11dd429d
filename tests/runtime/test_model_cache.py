"""A model in the cache of a machine is whole, or made again."""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors import SafetensorError

from pipeline.errors import ModelError, StorageError
from pipeline.inference.loading import converted_bytes
from pipeline.runtime import model_cache
from pipeline.runtime.assembly import local_model
from pipeline.runtime.model_cache import SUMS, cached_model
from pipeline.runtime.weights import ModelFiles, fetch, locate
from pipeline.spec.model import ModelSpec


def flip_a_sign(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x80
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("model.safetensors", flip_a_sign, "model.safetensors"),
        ("config.json", Path.unlink, "config.json"),
        ("added.json", Path.touch, "added.json"),
        (SUMS, Path.unlink, SUMS),
        (SUMS, lambda file: file.write_bytes(b"\xff"), "model.safetensors"),
    ],
)
def test_a_cached_model_that_was_damaged_is_named_and_made_again(
    name: str,
    damage: Callable[[Path], object],
    reason: str,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[Path] = []

    def fill(folder: Path) -> None:
        made.append(folder)
        shutil.copytree(model_folder, folder, dirs_exist_ok=True)

    folder = cached_model("m", tmp_path, fill)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, check=True)
    assert cached_model("m", tmp_path, fill) == folder
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.hashes.hashlib.file_digest", lambda *_: pytest.fail("read again"))
        assert cached_model("m", tmp_path, fill) == folder
    assert len(made) == 1 and not caplog.messages
    damage(folder / name)
    with caplog.at_level(logging.WARNING):
        assert cached_model("m", tmp_path, fill) == folder
    (warning,) = caplog.messages[-1:]
    assert warning.startswith(f"{folder}: ") and reason in warning and "made again" in warning
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
    folder = cached_model(
        files.id, tmp_path / "cache", lambda made: (made / "a").touch(), needed=lambda: 0
    )
    assert list(models.iterdir()) == [folder]


def test_what_another_machine_is_writing_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk of several machines that has no locks."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(model_cache.fcntl, "flock", no_locks)
    models = tmp_path / "models"
    others = [models / f"m.partial-{name}" for name in ("elsewhere-a", "elsewhere-b")]
    for other in others:
        other.mkdir(parents=True)
    os.utime(others[1], (0, 0))
    assert cached_model("m", tmp_path, lambda made: (made / "a").touch()) == models / "m"
    assert sorted(models.iterdir()) == [models / "m", others[0]]


def test_a_folder_that_another_process_put_in_place_first_is_used(tmp_path: Path) -> None:
    made = tmp_path / "models" / "m"

    def fill(folder: Path) -> None:
        (folder / "a").write_text("mine")
        made.mkdir()
        (made / "a").write_text("theirs")

    assert cached_model("m", tmp_path, fill) == made
    assert (made / "a").read_text() == "theirs" and list(made.parent.iterdir()) == [made]


def with_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(model_cache.shutil, "disk_usage", lambda _path: usage)


@pytest.mark.parametrize("needed, free, fits", [(10, 10, True), (11, 10, False), (0, 0, True)])
def test_a_model_that_the_disk_has_no_room_for_is_not_begun(
    needed: int, free: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free_bytes(monkeypatch, free * 10**9)
    begun: list[Path] = []
    folder = tmp_path / "models/a"
    try:
        assert cached_model("a", tmp_path, begun.append, needed=lambda: needed * 10**9) == folder
    except StorageError as error:
        assert str(error).startswith(f"{folder}: the model needs 11.00 GB, and 10.00 GB are free; ")
        assert not list(tmp_path.glob("models/*"))
    assert bool(begun) == fits
    cached_model("b", tmp_path, begun.append)
    with_free_bytes(monkeypatch, 0)  # — what is there needs no room
    cached_model("b", tmp_path, begun.append, needed=lambda: 10**12)


def gguf_file(path: Path, *shapes: tuple[int, ...]) -> Path:
    """A GGUF file with weights of these shapes in 16 bits."""
    writer = GGUFWriter(path, "llama")
    for number, shape in enumerate(shapes):
        writer.add_tensor(f"w{number}", np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("shapes", [[(64, 30), (64,)], [(2, 3, 4, 5)]])
def test_a_file_of_gguf_that_is_not_whole_is_named(
    shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    file = gguf_file(tmp_path / "m.gguf", *shapes)
    assert converted_bytes(file) == 4 * sum(map(math.prod, shapes))
    whole = file.read_bytes()
    for stop in range(4, len(whole) - 40, 13):
        file.write_bytes(whole[:stop])
        with pytest.raises(ModelError, match=f"^{file}: cannot be read as a GGUF model"):
            converted_bytes(file)


def test_a_conversion_needs_four_bytes_for_each_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_file(tmp_path / "m.gguf", (10**5, 300))
    model = ModelSpec(path=str(file))
    files = locate(model, tmp_path)
    with_free_bytes(monkeypatch, 10**8)
    with pytest.raises(StorageError, match=r"needs 0\.12 GB, and 0\.10 GB are free"):
        local_model(files, model, tmp_path)


def test_a_model_of_the_hub_is_not_fetched_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free_bytes(monkeypatch, 10**9)
    files = ModelFiles("hub", "org/none", "0" * 40, {"model.safetensors": "0"}, 2 * 10**9)
    with pytest.raises(StorageError, match=r"needs 2\.00 GB, and 1\.00 GB are free"):
        fetch(files, tmp_path, {})
