"""Whether `make demo` can install here: one line for what is missing, before anything is made.

    python jobs/check_machine.py

It is run by the Python of the machine, so it imports nothing of assay.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator

VERSIONS = (3, 11), (3, 14)  # from, and below
MIN_PIP = 22
FREE_GB = 4  # the demo's environment, model and output, and what pip unpacks meanwhile


def problems() -> Iterator[str]:
    """What is missing, each with what to do."""
    first, limit = VERSIONS
    if not first <= sys.version_info[:2] < limit:
        yield (
            f"Python {sys.version.split()[0]} is not supported; install Python 3.11, 3.12 or 3.13, "
            f"and name it: make PYTHON=python3.11"
        )
    elif importlib.util.find_spec("ensurepip") is None:
        yield "Python has no ensurepip; install it (Debian: python3-venv)"
    else:
        import ensurepip

        if int(ensurepip.version().partition(".")[0]) < MIN_PIP:
            yield f"pip {ensurepip.version()} is too old; install a Python with pip {MIN_PIP}"
    free_gb = shutil.disk_usage(os.getcwd()).free / 1e9
    if free_gb < FREE_GB:
        yield f"{os.getcwd()} has {free_gb:.1f} GB of free disk; {FREE_GB} GB are needed"


def main() -> int:
    """Print the problems; 1 if there are any."""
    lines = list(problems())
    for problem in lines:
        print(f"assay: {problem}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
