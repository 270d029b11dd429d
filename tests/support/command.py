"""The command `assay` as a process of its own, with Ray or without. Entry point: `start`.

A new Python spends ten seconds of CPU on its imports. So a command without Ray is forked from a
server process that has imported everything and done nothing (`Forked`). It is a process of its own
all the same: it has its own environment, output and exit code, and a kill ends it at any point.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from json_outputs import validate_outputs

ASSAY = (str(Path(sys.executable).with_name("assay")),)
TOY_ASSAY = (sys.executable, str(Path(__file__).with_name("toy_assay.py")))
ONE_PROCESS = ("assay", "without Ray")  # it has no program
FORKED = {
    TOY_ASSAY: "toy_assay:main_of_toy",
    ONE_PROCESS: "toy_assay:main_without_ray",
}
# One process has all tests that start Ray: two Ray heads at once are too slow on two cores.
SLOW_ON_RAY = (pytest.mark.slow, pytest.mark.xdist_group("ray"))
# A test of the protocol: quickly without Ray, and in `make test-slow` with it.
COMMANDS = [
    pytest.param(TOY_ASSAY, id="toy"),
    pytest.param(ASSAY, id="ray", marks=SLOW_ON_RAY),
]
# The same where the answers matter: quickly without Ray, but with the spec's own model.
WITH_MODEL = [
    pytest.param(ONE_PROCESS, id="one process"),
    pytest.param(ASSAY, id="ray", marks=SLOW_ON_RAY),
]


SERVER = multiprocessing.get_context("forkserver")
# — with the modules that a run imports while it goes on
LATER = ["pipeline.runtime.graph", "pipeline.stores.s3", "pipeline.verbs.run"]
SERVER.set_forkserver_preload(["command", "toy_assay", *LATER])
# — as a program has it: without a file, DuckDB takes the server for a person's session, and prints
#   the progress of slow queries to standard output
vars(sys.modules["__main__"]).setdefault("__file__", __file__)


class Forked:
    """What the tests use of `subprocess.Popen[str]`, for a call of a function with words."""

    def __init__(
        self,
        main: Callable[[Sequence[str]], int],
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        _start_server()
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("out", "err")]
        arguments = (main, tuple(words), dict(environment), folder or Path.cwd(), *self._files)
        self._process = SERVER.Process(target=_call, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end; what the process wrote."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        with self._folder:
            out, err = (file.read_text() if file.exists() else "" for file in self._files)
        return out, err


def _start_server() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # — the server's preload silently does nothing where the module is not on its path
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()


def _call(
    main: Callable[[Sequence[str]], int],
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    out: Path,
    err: Path,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, file in ((sys.stdout, out), (sys.stderr, err)):
        with file.open("wb") as opened:
            os.dup2(opened.fileno(), stream.fileno())
    validate_outputs(pytest.MonkeyPatch())
    sys.exit(main(words))


Process = subprocess.Popen[str] | Forked


def start(
    command: Sequence[str],
    *words: str,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> Process:
    """Starts the command with these words, in a folder (default: the current one)."""
    # — what the dynamic linker is to load needs a new program
    if command in FORKED and "LD_PRELOAD" not in environment:
        module, _, name = FORKED[tuple(command)].partition(":")
        main: Callable[[Sequence[str]], int] = getattr(import_module(module), name)
        return Forked(main, words, environment=environment, folder=folder)
    return subprocess.Popen(
        [*command, *words],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assay(
    spec: Path, *options: str, fault: str | None = None, command: Sequence[str] = ASSAY
) -> tuple[int, dict[str, Any], str]:
    """The exit code, the JSON result and standard error of `assay run`."""
    environment = {**os.environ, "ASSAY_CACHE": str(spec.parent / "cache")}
    if fault is not None:
        environment["ASSAY_FAULT"] = fault
    process = start(command, "run", str(spec), "--json", *options, environment=environment)
    out, err = process.communicate(timeout=500)
    assert process.returncode is not None
    return process.returncode, json.loads(out or "{}"), err
