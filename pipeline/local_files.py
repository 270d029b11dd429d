"""Reads local files that a user names; a device, a FIFO or a file that is too long is refused.

Entry points: `check_regular`, `read_whole`. Reading a FIFO or a device might never end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

# By the first character of `ls -l`.
_KINDS = {"p": "a FIFO", "s": "a socket", "c": "a device", "b": "a device"}


def check_regular(path: str | Path) -> None:
    """OSError if a FIFO, a socket or a device is at the path."""
    if os.path.exists(path) and (kind := _KINDS.get(stat.filemode(os.stat(path).st_mode)[0])):
        raise OSError(f"it is {kind} and not a file")


def read_whole(path: str | Path, max_bytes: int) -> bytes:
    """The content of a file; OSError also if it is longer than `max_bytes`."""
    check_regular(path)
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"it is longer than {max_bytes:,} bytes")
    return data
