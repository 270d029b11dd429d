"""A file under a user's name is there whole or not at all, on a disk and in a bucket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from servers import Server

from pipeline.errors import SpecError, StorageError
from pipeline.stores.named_files import Target, new_file, open_target


@pytest.fixture(params=["disk", "moto", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """A file two folders below one that does not exist."""
    if request.param == "moto":
        server: Server = request.getfixturevalue("moto")
        return open_target(f"{server.new_url()}/a/b.txt", server.options)
    url = f"memory://{tmp_path}" if request.param == "memory" else str(tmp_path)
    return open_target(f"{url}/to/a/b.txt", {})


def test_a_file_is_replaced_in_one_step(target: Target) -> None:
    assert not target.exists()
    target.write(b"one")
    assert target.exists() and target.read() == b"one"
    target.write(b"two")
    assert target.read() == b"two"
    folder = Target("", target.file_system, target.place.removesuffix("/a/b.txt"))
    assert folder.files() == {"a/b.txt"} and folder.below("a/b.txt").read() == b"two"
    target.delete()
    assert not target.exists() and folder.files() == set()


def test_after_an_error_the_file_is_as_before(target: Target) -> None:
    target.write(b"one")
    with pytest.raises(RuntimeError), target.replaced() as path:
        path.write_bytes(b"half of tw")
        raise RuntimeError
    folder = Target("", target.file_system, target.place.removesuffix("/b.txt"))
    assert target.read() == b"one" and folder.files() == {"b.txt"}


def test_an_error_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"{tmp_path}/file/a: cannot be written"):
        open_target(str(tmp_path / "file" / "a"), {}).write(b"")
    with pytest.raises(StorageError, match=f"{tmp_path}/none: cannot be read"):
        open_target(str(tmp_path / "none"), {}).read()
    with pytest.raises(SpecError, match="to: cannot be opened"):
        open_target("nosuch://a", {})


@pytest.mark.parametrize("protocol", ["", "memory:/"])
def test_a_file_that_exists_is_refused_unless_it_may_be_overwritten(
    protocol: str, tmp_path: Path
) -> None:
    url = f"{protocol}{tmp_path}/a.txt"
    new_file(url, {}, overwrite=False).write(b"one")
    with pytest.raises(SpecError) as refused:
        new_file(url, {}, overwrite=False)
    (problem,) = refused.value.problems
    assert (problem.place, problem.value) == ("to", url) and "--overwrite" in problem.fix
    new_file(url, {}, overwrite=True).write(b"two")
    assert open_target(url, {}).read() == b"two"


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.stores.named_files import open_target
with open_target(sys.argv[1], {}).replaced() as path:
    path.write_text("a text")
    print(path, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def unfinished_by(url: str, end: str, folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that writes the file, and the file that it has not finished."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, url, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(folder)},
        text=True,
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    assert path.is_relative_to(folder)
    return process, path


@pytest.mark.parametrize("protocol", ["", "memory:/"])
def test_what_a_killed_process_left_is_deleted_and_what_another_writes_is_not(
    tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = f"{protocol}{tmp_path}/to.csv"
    killed, left = unfinished_by(url, "killed", tmp_path)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL and left.read_text() == "a text"
    living, own = unfinished_by(url, "alive", tmp_path)
    new_file(url, {}, overwrite=True)
    assert not left.exists() and own.exists()
    living.communicate()
    assert living.returncode == 0 and not own.exists()


def test_what_killed_processes_left_below_a_folder_is_deleted(tmp_path: Path) -> None:
    left = tmp_path / "to" / "deep" / f".a.csv.{'0' * 32}"
    others = [left.with_name(name) for name in (".hidden", f"{'0' * 32}", f".a.{'0' * 31}")]
    left.parent.mkdir(parents=True)
    for file in (left, *others):
        file.write_text("a text")
    open_target(str(tmp_path / "to"), {}).drop_unfinished()
    assert not left.exists() and all(file.exists() for file in others)


def test_a_fifo_or_a_link_in_place_of_a_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f".to.csv.{'0' * 32}")
    (tmp_path / "mine").write_text("")
    (tmp_path / f".to.csv.{'1' * 32}").symlink_to(tmp_path / "mine")
    open_target(str(tmp_path / "to.csv"), {}).drop_unfinished()
    assert (tmp_path / "mine").exists() and (tmp_path / f".to.csv.{'1' * 32}").is_symlink()


def test_a_file_on_its_way_to_a_bucket_is_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_target(f"memory://{tmp_path}/a", {}).replaced() as path:
        assert path.stat().st_mode & 0o777 == 0o600
    with open_target(f"{tmp_path}/a", {}).replaced():
        pass
    (tmp_path / "usual").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "usual").stat().st_mode
