"""The command `assay` as a process of its own, with Ray or without. Entry point: `start`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

ASSAY = (str(Path(sys.executable).with_name("assay")),)
TOY_ASSAY = (sys.executable, str(Path(__file__).with_name("toy_assay.py")))
# These two have no program: they are forked (`forked`).
FORKED_ASSAY = ("assay",)
ONE_PROCESS = ("assay", "without Ray")
FORKED = {
    TOY_ASSAY: "toy_assay:main_of_toy",
    FORKED_ASSAY: "pipeline.cli:main",
    ONE_PROCESS: "toy_assay:main_without_ray",
}
Process = subprocess.Popen[str] | Forked
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
