"""The command `assay run` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def assay(spec: Path, *options: str, fault: str | None = None) -> tuple[int, dict[str, Any], str]:
    """The exit code, the JSON result and standard error of `assay run`."""
    environment = {**os.environ, "ASSAY_CACHE": str(spec.parent / "cache")}
    if fault is not None:
        environment["ASSAY_FAULT"] = fault
    command = [str(Path(sys.executable).with_name("assay")), "run", str(spec), "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr
