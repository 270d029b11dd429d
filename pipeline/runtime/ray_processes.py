"""The processes and the folder of the Ray that this process started.

Entry points: `own_services`, `kill_all`, `own_folder`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_FOLDER = "assay-ray-"  # and a random name: a folder that a process holds locked until it ends
_SERVICES = ("gcs_server", "raylet")  # without one of these, a Ray answers nothing
_NAMES = ("ray::", *_SERVICES)


@dataclass(frozen=True, slots=True)
class Services:
    """Processes without which a Ray answers nothing."""

    processes: Mapping[str, psutil.Process] = field(default_factory=dict)  # by name

    @property
    def ended(self) -> list[str]:
        """The names of the services that have ended."""
        return [name for name, process in self.processes.items() if _status(process) is None]

    @property
    def stopped(self) -> dict[int, str]:
        """The names of the services that a signal has stopped, by their process id.

        Ray waits for the answer of a stopped service without an end.
        """
        statuses = [
            (name, process.pid, _status(process)) for name, process in self.processes.items()
        ]
        return {pid: name for name, pid, status in statuses if status == psutil.STATUS_STOPPED}


def own_services() -> Services:
    """The services of the Ray that this process started; none of a cluster's."""
    named = [(_name(process), process) for process in processes_of_ray()]
    return Services({name: process for name, process in named if name in _SERVICES})


def processes_of_ray() -> list[psutil.Process]:
    """The processes of the Ray that this process started, and of no other program."""
    processes = psutil.Process().children(recursive=True)
    return [process for process in processes if _name(process).startswith(_NAMES)]


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


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kills the processes that have not ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


def _status(process: psutil.Process) -> str | None:
    """The status of a process; None after its end."""
    with suppress(psutil.NoSuchProcess):
        status = str(process.status())
        return None if status == psutil.STATUS_ZOMBIE else status
    return None
