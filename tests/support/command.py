"""The command `assay run` as a process of its own, with Ray or without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ASSAY = (str(Path(sys.executable).with_name("assay")),)
TOY_ASSAY = (sys.executable, str(Path(__file__).with_name("toy_assay.py")))
# One process has all tests that start Ray: two Ray heads at once are too slow on two cores.
SLOW_ON_RAY = (pytest.mark.slow, pytest.mark.xdist_group("ray"))
# A test of the protocol: quickly without Ray, and in `make test-slow` with it.
COMMANDS = [
    pytest.param(TOY_ASSAY, id="toy"),
    pytest.param(ASSAY, id="ray", marks=SLOW_ON_RAY),
]


def assay(
    spec: Path, *options: str, fault: str | None = None, command: Sequence[str] = ASSAY
) -> tuple[int, dict[str, Any], str]:
    """The exit code, the JSON result and standard error of `assay run`."""
    environment = {**os.environ, "ASSAY_CACHE": str(spec.parent / "cache")}
    if fault is not None:
        environment["ASSAY_FAULT"] = fault
    words = [*command, "run", str(spec), "--json", *options]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr
