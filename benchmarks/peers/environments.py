"""An environment of its own for each engine, and processes in it. Entry points: `Worker`, and
`Workers` for several processes of one engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.serve import Answers, Asked, Documents, Setup
from pipeline.runtime.imports import wait_passively

_HERE = Path(__file__).parent
# Dependencies that fail to load beside a torch without CUDA, and are not needed.
_REMOVED = ("torchvision", "torchaudio", "torchcodec")


class PeerError(Exception):
    """A peer cannot be installed, loaded or asked; the message has the end of its output."""


def interpreter(engine: str, cache: Path) -> Path:
    """The Python of the engine's environment, installed on first use: minutes, and gigabytes.

    A change of its requirements makes another environment. PeerError where it cannot be installed.
    """
    if engine == "assay":
        return Path(sys.executable)
    requirements = _HERE / "requirements" / f"{engine}.txt"
    if not requirements.exists():
        raise PeerError(f"no such engine; there is no file {requirements}")
    folder = cache / f"{engine}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]}"
    python, installed, log = folder / "bin" / "python", folder / "installed", folder / "pip.log"
    if not installed.exists():
        print(f"installing {engine} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, clear=True, with_pip=True)
        for step in (["install", "-r", str(requirements)], ["uninstall", "-y", *_REMOVED]):
            with log.open("a") as output:
                command = [str(python), "-m", "pip", *step]
                if subprocess.run(command, stdout=output, stderr=output).returncode:
                    raise PeerError(f"cannot be installed: {_last_line(log)}; see {log}")
        installed.touch()
    return python


class Worker:
    """An engine in its own process, which is stopped except while it answers.

    PeerError where it cannot be loaded, or ends while it is asked.
    """

    def __init__(self, engine: str, setup: Setup, cache: Path) -> None:
        python = interpreter(engine, cache)
        variables = {**os.environ, "PYTHONPATH": str(_HERE.parents[1])}
        variables["OMP_NUM_THREADS"] = str(setup.threads)
        if engine == "assay":
            wait_passively(variables)  # as in a run
        if openmp := [str(path) for path in python.parents[1].glob("lib/libiomp5.so")]:
            variables["LD_PRELOAD"] = openmp[0]  # as vLLM's manual recommends
        options = json.dumps(asdict(setup))
        self._log = cache / f"{engine}-{setup.number_format}.log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.peers.serve", engine, options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=variables,
            )
        self.version: str = self.reply()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, **message: object) -> None:
        """Let the engine work on a request; `reply` waits for its end."""
        assert self._process.stdin
        self._process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # if it ended, there is no reply
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def reply(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{_last_line(self._log)}; see {self._log}")
        # — threads that still spin for more work would take the next peer's cores
        self._process.send_signal(signal.SIGSTOP)
        return json.loads(line)


class Workers:
    """Engines of one kind that share out the documents, each in a process of its own."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self.version = workers[0].version

    def prepare(self, asked: Asked) -> None:
        for worker in self._workers:
            worker.ask(prepare=asdict(asked))
            worker.reply()

    def label(self, documents: Documents) -> tuple[float, Answers]:
        """The seconds until the last engine had done its share, and the documents' answers."""
        count = len(self._workers)
        shares = [documents[number::count] for number in range(count)]
        for worker, share in zip(self._workers, shares, strict=True):
            worker.ask(label=share)
        seconds, answers = zip(*[worker.reply() for worker in self._workers], strict=True)
        log_probs = [
            [
                {int(token): log_prob for token, log_prob in each.items()}
                for each in answers[number % count][number // count]
            ]
            for number in range(len(documents))
        ]
        return max(seconds), log_probs


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")
