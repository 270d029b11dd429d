"""Planned faults, for tests: a process dies, or waits to be killed, at a named place.

`ASSAY_FAULT=<place>=<action>:<file>` acts on the first arrival at the place in any process: that
one makes the file, and who finds it made goes on. Without a file it acts on every arrival. Nothing
happens unless the variable is set.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

VARIABLE = "ASSAY_FAULT"
WAIT_SECONDS = 600.0


def failpoints_set() -> bool:
    """Whether there is any."""
    return VARIABLE in os.environ


def failpoint(name: str) -> None:
    """Acts where `ASSAY_FAULT` names this point; else does nothing."""
    at, _, what = os.environ.get(VARIABLE, "").partition("=")
    action, _, file = what.partition(":")
    if at != name or (file and not _is_first(Path(file))):
        return
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(WAIT_SECONDS)


def _is_first(file: Path) -> bool:
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
