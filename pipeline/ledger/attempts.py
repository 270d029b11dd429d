"""Attempt markers, which find the document that kills its worker. Entry point: `Attempts.run`.

A worker creates a marker before it labels a range of rows and deletes it afterwards. A marker that
remains shows that the worker died: the next attempt splits its rows sixteen ways, until one row is
left, and quarantines that row. If a reader keeps dying, the shard fails instead, because documents
cannot be distinguished before they are read.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from pipeline.errors import StorageError
from pipeline.hashes import canonical_json, sha256_hex
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.keys import Attempt, attempt_key, parse_attempt, reading_key
from pipeline.stores.store import ATTEMPTS, Store

FAN_OUT = 16
# A worker sometimes dies without a document's fault, for example with a preempted machine.
DEATHS_OF_A_SHARD = 2
DEATHS_OF_A_ROW = 2
# Two deaths in other runs count as one: who kills a driver kills its workers, too.
OTHER_RUNS_DEATHS = 2
# More than for a row, because these fail a shard: a machine short of memory kills several times.
DEATHS_OF_A_READER = 5

RowRange = tuple[int, int]  # start, end (exclusive)


def attempt_name(fp: Mapping[str, str], work: WorkItem) -> str:
    """The folder of a work item's attempts, `<hash>/<sid>`: the hash is of all its tasks' fps."""
    of_tasks = canonical_json(sorted(fp[task] for task in work.tasks))
    return f"{sha256_hex(of_tasks, 16)}/{work.shard.id}"


@dataclass(frozen=True, slots=True)
class Attempts:
    """The markers of one work item."""

    store: Store
    name: str  # see `attempt_name`; the same in every run
    run_id: str

    def run(self, rows: int, label: Callable[[int, int], None]) -> list[int]:
        """Calls `label(start, end)` until each row was in one call; returns the quarantined rows.

        Ranges that killed a worker go first: work before another death would be repeated.
        """
        deaths = self._deaths()
        if deaths[0, rows] < DEATHS_OF_A_SHARD:
            deaths[0, rows] = 0
        parts = sorted(_parts((0, rows), deaths), key=lambda p: (-deaths[p], p[1] - p[0]))
        deadly = {p for p in parts if p[1] - p[0] == 1 and deaths[p] >= DEATHS_OF_A_ROW}
        for start, end in parts:
            if (start, end) in deadly:
                continue
            key = attempt_key(self.name, Attempt(start, end, self.run_id), uuid.uuid4().hex)
            self.store.create(key, b"")
            try:
                label(start, end)
            finally:  # also after an exception: only a death leaves the marker
                self.store.delete([key])
        return sorted(start for start, _ in deadly)

    @contextmanager
    def reading(self, place: str) -> Iterator[None]:
        """Marks that rows of an input file are being read, with one create and one delete.

        StorageError, with the place, if readers of this run died there too often.
        """
        numbers = range(DEATHS_OF_A_READER)
        keys = [reading_key(self.name, self.run_id, number) for number in numbers]
        # — a number is taken if its reader died, so no LIST is needed to count deaths
        made = next((n for n in numbers if self.store.create(keys[n], b"")), None)
        if made is None:
            raise StorageError(
                f"{place}: the worker died {DEATHS_OF_A_READER} times while it read this; the file "
                f"crashes its reader, or memory is short: rewrite or remove the file, or use a "
                f"machine with more memory"
            )
        try:
            yield
        finally:
            self.store.delete(keys[: made + 1])

    def forget(self) -> None:
        """Deletes the remaining markers of the finished work."""
        self.store.delete([stored.key for stored in self.store.list(self._folder)])

    def _deaths(self) -> Counter[RowRange]:
        own: Counter[RowRange] = Counter()
        others: Counter[RowRange] = Counter()
        for stored in self.store.list(self._folder):
            attempt = parse_attempt(stored.key)
            if attempt is not None:
                is_own = attempt.run_id == self.run_id
                (own if is_own else others)[attempt.start, attempt.end] += 1
        return own + Counter({part: n // OTHER_RUNS_DEATHS for part, n in others.items()})

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
