"""The folder of a Ray: private, deleted at the end, and after a kill by the next run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipeline.stores import local
from pipeline.stores.local import own_folder

# Holds a folder as a run does, until its input ends.
HOLDS = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from pipeline.stores.local import own_folder
with own_folder() as folder:
    (folder / "session").mkdir(parents=True)
    print(folder.parent, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_run_is_deleted_and_that_of_another_run_stays(
    temporary: Path,
) -> None:
    command = [sys.executable, "-c", HOLDS, str(temporary)]
    runs = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, alive = (Path(run.stdout.readline().strip()) for run in runs if run.stdout)
    runs[0].kill()
    runs[0].communicate()
    assert killed.is_dir() and alive.is_dir()
    (temporary / "assay-ray-new").mkdir()  # of a process that has not locked it yet
    (temporary / "ray-other" / "r").mkdir(parents=True)
    with own_folder() as folder:
        assert not killed.exists() and (alive / "r" / "session").is_dir()
        assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert not folder.parent.exists()
    assert {path.name for path in temporary.iterdir()} == {alive.name, "assay-ray-new", "ray-other"}
    runs[1].communicate()
    assert not alive.exists()


def test_the_folder_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "assay-ray-theirs" / "r").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with own_folder():
        assert (temporary / "assay-ray-theirs" / "r").is_dir()


def test_a_folder_without_locks_can_be_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(local.fcntl, "flock", refuse)
    with own_folder() as folder:
        assert folder.parent.is_dir()
    assert not list(temporary.iterdir())
