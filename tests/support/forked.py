"""Commands in processes that start in milliseconds. Entry point: `Forked`.

A new Python spends ten seconds of CPU on its imports. Here each process is forked from a server
process that has imported everything and done nothing. It is a process of its own all the same: it
has its own environment, output and exit code, and a kill ends it at any point.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from json_outputs import validate_outputs

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["forked", "toy_assay"])
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
