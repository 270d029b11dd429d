"""Which workers ended or cannot load, and which have shown no sign of life for too long.

Entry point: `Watchdog`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.runtime.connection import is_alive
from pipeline.runtime.progress import LABELLING, WAITING, WorkerReport, WorkKey

DRIVER = "the driver"
# A worker ends itself at its limit. The run ends this much later, if the worker cannot do that.
GRACE_S = 10.0
# So many workers more than there are may end themselves without an answered document between them:
# the search for one row among 65,536 takes nine.
MORE_ENDS = 10


@dataclass(frozen=True, slots=True)
class Stall:
    """A worker that ended or cannot load; or that shows no sign of life, as the driver may."""

    report: WorkerReport  # its last one
    silent_s: float
    then: str  # what is done about it
    ends: bool = False  # the run ends

    def __str__(self) -> str:
        report = self.report
        if report.phase == LABELLING and report.work is not None:
            last = f"it labels {report.place} ({report.answered:,} rows are answered)"
        else:
            last = f"it is {report.phase}" + f" {report.place}" * bool(report.place)
        if report.cause is not None:
            return f"{report.worker} {'ended' if report.ended else 'cannot load'}: {report.cause}"
        return f"{report.worker} has shown no sign of life for {self.silent_s:.0f} s; {last}"


class Watchdog:
    """Knows how long each worker has been silent: by its own reports, or because none came."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard: dict[str, tuple[WorkerReport, float]] = {}  # by worker; when it came
        self._at: dict[WorkKey, str] = {}  # the worker of each work, by the last report
        self._named: set[str] = set()  # workers
        self._ended = 0  # workers since the last answered document

    def hear(self, report: WorkerReport, now_s: float) -> None:
        """Notes a report. Work of a worker that died is at work in another."""
        if report.work is not None:
            before = self._at.get(report.work, report.worker)
            if before != report.worker:
                self._heard.pop(before, None)  # — if it lives, its next report is a second away
            self._at[report.work] = report.worker
        if report.answered and not report.ended:
            self._ended = 0
        self._heard[report.worker] = report, now_s

    def committed(self, work: WorkKey) -> None:
        """Notes that the work goes on."""
        self._ended = 0
        self._at.pop(work, None)

    def excuse(self, now_s: float) -> None:
        """Restarts the clock of each worker, because reports may have been lost."""
        self._heard = {worker: (report, now_s) for worker, (report, _) in self._heard.items()}

    def stalls(self, now_s: float, is_alive: Callable[[WorkerReport], bool]) -> Iterator[Stall]:
        """The workers to name now, each once, those that end themselves, and the run's end."""
        for worker, (report, came_s) in list(self._heard.items()):
            named_after_s, limit_s = report.limits(self._limit_s)
            absent_s = now_s - came_s  # its process is stopped, or its machine cannot be reached
            is_absent = absent_s >= self._limit_s / 2
            if report.ended:
                del self._heard[worker]
                self._ended += 1
                ends = self._ended > MORE_ENDS + len(self._heard)
                yield Stall(report, report.silent_s, "it is ended, and Ray starts another", ends)
            elif report.cause is not None:  # once for each node and cause
                del self._heard[worker]
                if (key := f"{report.node_id} {report.cause}") not in self._named:
                    self._named.add(key)
                    yield Stall(report, 0.0, "it is left out")
            elif is_absent and not is_alive(report):
                del self._heard[worker]  # Ray starts it again, and then it reports
            elif is_absent or report.silent_s >= named_after_s:
                then = f"it is replaced at {limit_s:.0f} s"
                ends = worker == DRIVER and report.silent_s >= limit_s
                if is_absent or worker == DRIVER:
                    then = f"the run ends at {self._limit_s:.0f} s"
                    ends = ends or absent_s >= self._limit_s + GRACE_S
                if ends or worker not in self._named:
                    self._named.add(worker)
                    yield Stall(report, max(report.silent_s, absent_s), then, ends)
            else:
                self._named.discard(worker)


def is_worker_alive(report: WorkerReport) -> bool:
    """Whether the worker's process runs, or is stopped, as far as Ray knows.

    Ray knows nothing of processes that are not actors: they end when they have nothing to do.
    """
    if not report.actor_id:
        return report.worker == DRIVER or report.phase != WAITING
    return is_alive(report.actor_id, report.pid)
