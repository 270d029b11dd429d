"""Markers below `attempts/`. Entry points: `Attempts.run`, `in_use` and `check_shown`.

A worker creates a marker before it labels a range of rows and deletes it afterwards. A marker that
remains shows that the worker died, or that it had an error that is not a store's: the next attempt
splits its rows sixteen ways, until one row is left. A preempted machine also leaves markers, at
whatever rows it was: so a success deletes all markers of its range, and a row is quarantined only
after several deaths in sequence, alone. Reading and committing are steps of all documents together:
if workers keep dying at such a step, the shard fails.

A run also renews one marker of its own, which shows to `assay gc` that the output is in use, and so
does `assay gc` while it deletes. Each creates its marker before it looks for those of the other, so
at least one of the two sees the other and ends.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise

from pipeline.errors import (
    LoadError,
    RefusedError,
    SpecError,
    StorageError,
    UnavailableError,
    WorkerError,
)
from pipeline.hashes import canonical_json, sha256_hex
from pipeline.ledger.cells import WorkItem
from pipeline.stores.store import ATTEMPTS, Store

logger = logging.getLogger(__name__)

IN_USE = f"{ATTEMPTS}in-use/"
RUN, GC = "run", "gc"  # who uses the output
RENEWED_AFTER_S = 60.0
# Longer than a store or a machine pauses: after a crash, `gc` waits this long.
ENDED_AFTER_S = 600.0

FAN_OUT = 16
# Deaths before a shard is split, and of a row alone, in sequence, before it is quarantined. The row
# of a shard of one row needs as many as both, like a row of any other shard.
DEATHS_OF_A_SHARD = 2
DEATHS_OF_A_ROW = 3
# Two deaths in other runs count as one: killing a driver also kills its workers.
OTHER_RUNS_DEATHS = 2
# More than for a row, because these fail a shard: a machine short of memory kills several times.
DEATHS_OF_A_STEP = 5

RowRange = tuple[int, int]  # start, end (exclusive)
# Waits until a shard may be at work in this process; True: until no other one is.
Turn = Callable[[bool], AbstractContextManager[object]]
# The name of a marker: its rows, the id of the run, and a nonce, so that each marker is new.
_MARKER = re.compile(r"(\d+)-(\d+)-([^/-]+)-[^/-]+")


def attempt_name(fp: Mapping[str, str], work: WorkItem) -> str:
    """The folder of a work item's attempts, `<hash>/<sid>`: the hash is of all its tasks' fps."""
    versions = canonical_json(sorted(fp[task] for task in work.tasks))
    return f"{sha256_hex(versions, 16)}/{work.shard.id}"


@dataclass(slots=True)
class Attempts:
    """The markers of one work item."""

    store: Store
    name: str  # see `attempt_name`; the same in every run
    run_id: str
    _is_first: bool = False  # whether `run` found no marker of an earlier attempt

    def run(
        self, rows: int, label: Callable[[int, int], None], turn: Turn = nullcontext
    ) -> list[int]:
        """Calls `label(start, end)` until each row was in one call; returns the quarantined rows.

        Suspect ranges run first, so a crash repeats little work. WorkerError if `label` raises
        anything but a StorageError, a SpecError or a LoadError: the marker stays, as after a death.
        Where several shards are at work in a process, one with markers is labelled alone in its
        `turn`: so at most the first death of another shard counts as one of its own.
        """
        markers = self._markers()
        deaths = defaultdict[RowRange, int](int)
        for part, run_ids in markers.items():
            in_this_run = sum(run_id == self.run_id for run_id in run_ids.values())
            deaths[part] = in_this_run + (len(run_ids) - in_this_run) // OTHER_RUNS_DEATHS
        deaths[0, rows] = max(0, deaths[0, rows] - DEATHS_OF_A_SHARD + (rows > 1))
        parts = sorted(_parts((0, rows), deaths), key=lambda p: (-deaths[p], p[1] - p[0]))
        deadly = {p for p in parts if p[1] - p[0] == 1 and deaths[p] >= DEATHS_OF_A_ROW}
        with turn(bool(markers)):
            for part in parts:
                if part not in deadly:
                    self._label(part, label, markers.get(part, ()))
        return sorted(start for start, _ in deadly)

    def _label(
        self, part: RowRange, label: Callable[[int, int], None], markers: Iterable[str]
    ) -> None:
        """Labels the rows with a marker of their own, and deletes their earlier ones."""
        start, end = part
        key = f"{self._folder}{start}-{end}-{self.run_id}-{uuid.uuid4().hex}"
        self.store.create(key, b"")
        try:
            label(start, end)
        except (StorageError, SpecError, LoadError, KeyboardInterrupt, SystemExit):
            # — the rows are not the cause: of a SpecError a condition that takes too long
            self.store.delete([key])
            raise
        except BaseException as error:  # a panic of Rust is not an Exception
            raise WorkerError(error) from error
        # — these rows kill no worker, so those that died at them were preempted
        self.store.delete([key, *markers])

    @contextmanager
    def surviving(self, step: str, fix: str) -> Iterator[None]:
        """Marks that a worker is at a step of the shard, with one create and one delete.

        StorageError, with the fix, if workers of this run died at this step too often.
        """
        numbers = range(DEATHS_OF_A_STEP)
        keys = [f"{self._folder}{step}-{self.run_id}-{number}" for number in numbers]
        # — a number is taken if its worker died, so no LIST is needed to count deaths
        made = next((n for n in numbers if self.store.create(keys[n], b"")), None)
        if made is None:
            raise StorageError(
                f"the worker died {DEATHS_OF_A_STEP} times while {step} this shard; {fix}"
            )
        try:
            yield
        finally:
            self.store.delete(keys[: made + 1])

    def forget(self) -> None:
        """Deletes the remaining markers of the finished work; `run` left none of its own."""
        if not self._is_first:
            self.store.delete([stored.key for stored in self.store.list(self._folder)])

    def _markers(self) -> dict[RowRange, dict[str, str]]:
        """The remaining markers of each range: key -> id of the run."""
        markers: dict[RowRange, dict[str, str]] = {}
        keys = [stored.key for stored in self.store.list(self._folder)]
        self._is_first = not keys
        for key in keys:
            if match := _MARKER.fullmatch(key.removeprefix(self._folder)):
                start, end, run_id = match.groups()
                markers.setdefault((int(start), int(end)), {})[key] = run_id
        return markers

    @property
    def _folder(self) -> str:
        return f"{ATTEMPTS}{self.name}/"


def _parts(rows: RowRange, deaths: Mapping[RowRange, int]) -> Iterator[RowRange]:
    """The rows in ranges that killed no worker as a whole, or that are single rows."""
    start, end = rows
    if end - start <= 1 or deaths[rows] == 0:
        if end > start:
            yield rows
        return
    edges = sorted({start + (end - start) * part // FAN_OUT for part in range(FAN_OUT + 1)})
    for part in pairwise(edges):
        yield from _parts(part, deaths)


def check_shown(store: Store, key: str) -> None:
    """StorageError unless this machine sees the driver's mark, if the store is a local folder.

    The same path may be another folder here. With an empty key, nothing is checked.
    """
    try:
        if key and "://" not in store.url:
            store.read(key)
    except StorageError as error:
        raise StorageError(
            f"{store.url}: the output on this machine is not that of the driver ({error}); mount "
            f"the driver's folder at this path, or name an s3:// or gs:// output"
        ) from error


@contextmanager
def in_use(store: Store, by: str = RUN) -> Iterator[str]:
    """Shows that a run, or `assay gc`, works on the output, until the block ends; the key of a mark
    that stays so long.

    RefusedError while the other one does, and for ten minutes after that was killed. Runs name each
    other in the log.
    """
    marks: list[str] = []
    named: set[str] = set()
    ended = threading.Event()

    def mark() -> None:
        marks.append(f"{IN_USE}{by}-{uuid.uuid4().hex}")
        store.create(marks[-1], f"{socket.gethostname()}, process {os.getpid()}".encode())

    def renew() -> None:
        while not ended.wait(RENEWED_AFTER_S):
            # — after a StorageError the run's next request or the next renewal fails, too. A
            # command of the other kind that starts now sees this mark, and ends
            with suppress(StorageError, RefusedError):
                mark()
                store.delete(marks[1:-1])
                del marks[1:-1]
                _look_for_others(store, by, marks, named)

    mark()
    thread = threading.Thread(target=renew, name="in use", daemon=True)
    thread.start()
    try:
        _look_for_others(store, by, marks, named)
        yield marks[0]
    except UnavailableError:  # the store cannot delete the mark now: it expires
        marks.clear()
        raise
    finally:
        ended.set()
        thread.join()
        try:
            store.delete(marks)
        except StorageError as error:  # the result is kept, and the mark expires
            logger.warning("the output stays marked as in use for a while: %s", error)


def _look_for_others(store: Store, by: str, own: Sequence[str], named: set[str]) -> None:
    """RefusedError if the other kind works on the output; a run logs each other run once.

    The caller has just made the last mark of its `own`.
    """
    marks = list(store.list(IN_USE))
    times = {mark.key: mark.modified_s for mark in marks}
    # — by the store's clock, which may differ from this machine's, and may have been set back: a
    # mark of a killed process may be of a later time
    now_s = times.get(own[-1], max(times.values(), default=0))
    recent = [m for m in marks if m.key not in own and abs(now_s - m.modified_s) < ENDED_AFTER_S]
    if of_other := [m.modified_s for m in recent if not m.key.startswith(f"{IN_USE}{by}-")]:
        does = {GC: "a run writes to", RUN: "`assay gc --delete` deletes objects of"}[by]
        ago_s = max(0, now_s - max(of_other))
        raise RefusedError(
            f"{store.url}: {does} this output (its last sign was {ago_s:.0f} s ago)"
            f", so what one needs could be deleted; wait for its end, or, if it was killed, for "
            f"{ENDED_AFTER_S / 60:.0f} minutes"
        )
    for mark in recent if by == RUN else ():
        with suppress(StorageError):  # it has ended
            if (other_run := store.read(mark.key).decode()) not in named:
                named.add(other_run)
                text = "%s: another run (%s) writes to this output, or was killed a few minutes ago"
                logger.warning(f"{text}; both read the same documents", store.url, other_run)
