"""The processes of the Ray that this process started. Entry points: `own_services`, `kill_all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

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
