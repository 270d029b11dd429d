"""Attempts: what was started and did not end, so that a document which kills its worker is found.

A worker that dies takes its knowledge along, so it writes down what it is about to do, and strikes
it out when that is done. What is left standing was deadly: its rows are split sixteen ways until
one row is left, and that row is set aside. A reader that keeps dying is not searched: no document
is known before it is read, so the run ends with the place.

Knows row ranges and the markers below `attempts/`. Knows nothing of what is done with the rows.
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
# Workers also die of what is no document's fault, a machine that is taken away; once in a while.
DEATHS_OF_A_SHARD = 2
DEATHS_OF_A_ROW = 2
# Nor is a document known to have ended another run: whoever killed the driver killed its workers.
OTHER_RUNS_DEATHS = 2  # of other runs count as one
# More than of a row: these end the run, and a machine short of memory kills a few times in a row.
DEATHS_OF_A_READER = 5

RowRange = tuple[int, int]  # from, to before


def attempt_name(fp: Mapping[str, str], work: WorkItem) -> str:
    """What a work's attempts are called: `<fp>/<sid>`, with one fp for all its tasks."""
    of_tasks = canonical_json(sorted(fp[task] for task in work.tasks))
    return f"{sha256_hex(of_tasks, 16)}/{work.shard.id}"


@dataclass(frozen=True, slots=True)
class Attempts:
    """The markers of one piece of work."""

    store: Store
    name: str  # of the work: the same in every run, another for other tasks
    run_id: str

    def run(self, rows: int, label: Callable[[int, int], None]) -> list[int]:
        """Calls `label(start, end)` until every row was in one call; gives the rows set aside.

        What has been deadly goes first: what was done before a death is done again after it.
        """
        deaths = self._deaths()
        if deaths[0, rows] < DEATHS_OF_A_SHARD:
            deaths[0, rows] = 0
        parts = sorted(_parts((0, rows), deaths), key=lambda p: (-deaths[p], p[1] - p[0]))
        for part in parts:
            if not _is_deadly(part, deaths):
                self._attempt(part, label)
        return sorted(start for start, end in parts if _is_deadly((start, end), deaths))

    @contextmanager
    def reading(self, place: str) -> Iterator[None]:
        """Marks that the rows, at the place, are being read; one create and one delete.

        StorageError where that was this run's reader's death too often.
        """
        numbers = range(DEATHS_OF_A_READER)
        keys = [reading_key(self.name, self.run_id, number) for number in numbers]
        # — each number that a death left standing is passed over, so nothing need be listed
        made = next((n for n in numbers if self.store.create(keys[n], b"")), None)
        if made is None:
            raise StorageError(
                f"{place}: reading it ended its worker {DEATHS_OF_A_READER} times; the file breaks "
                f"the program that reads it, or there is too little memory: write the file anew or "
                f"move it away, or use a machine with more memory"
            )
        try:
            yield
        finally:
            self.store.delete(keys[: made + 1])

    def forget(self) -> None:
        """Strikes out what is left: the work is done."""
        self.store.delete([stored.key for stored in self.store.list(self._folder)])

    def _attempt(self, part: RowRange, label: Callable[[int, int], None]) -> None:
        start, end = part
        key = attempt_key(self.name, Attempt(start, end, self.run_id), uuid.uuid4().hex)
        self.store.create(key, b"")
        try:
            label(start, end)
        finally:  # an error is told by whoever sees it; only a death leaves its marker standing
            self.store.delete([key])

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
    """The rows in runs, none of which has been deadly as a whole; or a single one that has."""
    start, end = rows
    if end - start <= 1 or deaths[rows] == 0:
        if end > start:
            yield rows
        return
    edges = sorted({start + (end - start) * part // FAN_OUT for part in range(FAN_OUT + 1)})
    for part in pairwise(edges):
        yield from _parts(part, deaths)


def _is_deadly(part: RowRange, deaths: Mapping[RowRange, int]) -> bool:
    start, end = part
    return end - start == 1 and deaths[part] >= DEATHS_OF_A_ROW
