"""Failpoints, for tests: a process kills itself, waits to be killed, or fails at a named point.

`ASSAY_FAULT=<name>=<action>:<file>` acts once: the first process at the point creates the file, and
later ones continue. Without a file it acts every time. The action is `die`, `wait` or `fail`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

VARIABLE = "ASSAY_FAULT"
WAIT_SECONDS = 600.0


def failpoints_set() -> bool:
    """Whether a failpoint is set."""
    return VARIABLE in os.environ


def failpoint(name: str) -> None:
    """Kills or stops this process, or raises, if `ASSAY_FAULT` names this point."""
    point, _, value = os.environ.get(VARIABLE, "").partition("=")
    action, _, file = value.partition(":")
    if point != name:
        return
    if file:
        try:
            Path(file).touch(exist_ok=False)
        except FileExistsError:
            return
    if action == "fail":
        raise RuntimeError(f"CUDA error at {name}")
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(WAIT_SECONDS)
