"""The folder of a Ray that this process starts. Entry point: `own_folder`."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_FOLDER = "assay-ray-"  # and a random name: a folder that a process holds locked until it ends


@contextmanager
def own_folder() -> Iterator[Path]:
    """A new folder for a Ray, which is deleted at the end, as are those of killed processes now.

    Only this user may read it: Ray opens its own folders to everyone.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/r"):
        with suppress(OSError), _locked(left.parent):
            shutil.rmtree(left.parent, ignore_errors=True)
    private = tempfile.TemporaryDirectory(prefix=_FOLDER, ignore_cleanup_errors=True)
    with private as folder, ExitStack() as held:
        with suppress(OSError):  # a file system without locks: nothing there is deleted later
            held.enter_context(_locked(Path(folder)))
        yield Path(folder, "r")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder; OSError if another process does, or if it is another user's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is of another user")
        yield
    finally:
        os.close(descriptor)
