"""The search for deadly rows: they alone are quarantined, and every other row is labelled once."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore, Recording

from pipeline.errors import StorageError
from pipeline.ledger.attempts import (
    DEATHS_OF_A_READER,
    DEATHS_OF_A_ROW,
    DEATHS_OF_A_SHARD,
    Attempts,
    attempt_name,
)
from pipeline.ledger.cells import WorkItem
from pipeline.sources.shards import ObjectVersion, Piece, Shard
from pipeline.stores.store import Store

VERSION = ObjectVersion("/a.jsonl", 10, "etag", "jsonl", "text", None)


class DeathError(BaseException):
    """The worker died; no `finally` of its own ran."""


class Dying(MemoryStore):
    """A store that a dead worker cannot reach: what it would strike out stays."""

    dead: bool = False

    def delete(self, keys: Collection[str]) -> None:  # type: ignore[override]
        if not Dying.dead:
            super().delete(list(keys))


def run_until_done(
    store: MemoryStore, rows: int, deadly: Collection[int]
) -> tuple[list[int], list[int], int]:
    """Rows set aside, rows labelled in the last attempt, and how many workers died."""
    deaths = 0
    while True:
        labelled: list[int] = []

        def label(start: int, end: int, labelled: list[int] = labelled) -> None:
            if any(start <= row < end for row in deadly):
                Dying.dead = True
                raise DeathError
            labelled += range(start, end)

        Dying.dead = False
        try:
            return Attempts(store, "fp/sid", "run").run(rows, label), labelled, deaths
        except DeathError:
            deaths += 1
            assert deaths < 200


@given(st.integers(1, 4097), st.data())
def test_deadly_rows_alone_are_set_aside_and_every_other_is_labelled_once(
    rows: int, data: st.DataObject
) -> None:
    deadly = sorted(data.draw(st.sets(st.integers(0, rows - 1), max_size=3)))
    aside, labelled, deaths = run_until_done(Dying(), rows, deadly)
    assert aside == deadly
    assert sorted(labelled) == [row for row in range(rows) if row not in deadly]
    levels = next(level for level in range(5) if 16**level >= rows)
    once = DEATHS_OF_A_SHARD + len(deadly) * (levels + DEATHS_OF_A_ROW)
    assert deaths <= once if deadly else deaths == 0


def test_one_death_splits_nothing_and_what_ended_leaves_no_marker() -> None:
    store = MemoryStore()
    store.create("attempts/fp/sid/0-40-run-dead", b"")
    calls: list[tuple[int, int]] = []
    attempts = Attempts(store, "fp/sid", "run")
    assert attempts.run(40, lambda start, end: calls.append((start, end))) == []
    assert calls == [(0, 40)] and list(store.list("attempts/")) == []


def test_an_error_is_no_death() -> None:
    store = MemoryStore()

    def fail(_start: int, _end: int) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        Attempts(store, "fp/sid", "run").run(5, fail)
    assert list(store.list("attempts/")) == []


def test_what_was_deadly_goes_first() -> None:
    store = MemoryStore()
    for marker in ("0-32-run-a", "0-32-run-b", "30-32-run-c"):
        store.create(f"attempts/fp/sid/{marker}", b"")
    calls: list[tuple[int, int]] = []
    Attempts(store, "fp/sid", "run").run(32, lambda start, end: calls.append((start, end)))
    assert sorted(calls[:2]) == [(30, 31), (31, 32)]
    assert sorted(row for start, end in calls for row in range(start, end)) == list(range(32))


@pytest.mark.parametrize(("killed_runs", "aside"), [(5, []), (6, [7])])
def test_a_killed_driver_takes_workers_along_that_no_row_has_killed(
    killed_runs: int, aside: list[int]
) -> None:
    store = MemoryStore()
    for run in range(killed_runs):
        for rows in ("0-16", "7-8"):
            store.create(f"attempts/fp/sid/{rows}-{run}-a", b"")
    labelled: list[int] = []
    attempts = Attempts(store, "fp/sid", "run")
    assert attempts.run(16, lambda start, end: labelled.extend(range(start, end))) == aside
    assert sorted([*labelled, *aside]) == list(range(16))


@pytest.mark.parametrize("seed", range(4))
def test_where_machines_are_often_preempted_only_rows_that_kill_their_worker_are_quarantined(
    seed: int,
) -> None:
    """Each fifth attempt at a shard ends with its machine: a machine lives for minutes."""
    source, preempted, died = random.Random(seed), 0, 0
    for shard in range(300):
        rows = source.choice([1, 1, 2, 16, 40, 300])
        rate = 0.22 / rows  # of preemptions, in the time of a row
        deadly = {row for row in range(rows) if source.random() < 0.1 / rows}
        store, aside, deaths, done = Dying(), None, 0, set[int]()

        def label(start: int, end: int) -> None:
            nonlocal preempted, deaths
            lived_rows = source.expovariate(rate)  # noqa: B023
            killed = min((row - start for row in deadly if start <= row < end), default=math.inf)  # noqa: B023
            if min(lived_rows, killed) < end - start:
                preempted += lived_rows < killed
                deaths += killed <= lived_rows
                Dying.dead = True
                raise DeathError
            done.update(range(start, end))  # noqa: B023

        while aside is None:
            Dying.dead = False
            done.clear()
            try:
                aside = Attempts(store, f"fp/{shard}", "run").run(rows, label)
            except DeathError:
                assert deaths < 100
        assert set(aside) == deadly and done == {*range(rows)} - deadly
        levels = next(level for level in range(5) if 16**level >= rows)
        assert deaths <= DEATHS_OF_A_SHARD + len(deadly) * (levels + DEATHS_OF_A_ROW)
        died += deaths
    assert preempted > 60 and died > 50


def test_a_success_clears_the_rows_that_machines_died_at_before() -> None:
    """Of these rows no attempt was wrong: four machines were preempted, with successes between."""
    store = Dying()
    for marker in ("0-2-run-a", "0-2-run-b", "0-1-run-c", "0-1-run-d", "1-2-run-e", "1-2-run-f"):
        store.create(f"attempts/fp/sid/{marker}", b"")
    calls: list[int] = []

    def label(start: int, end: int) -> None:
        calls.append(start)
        if calls == [0, 1]:  # the second row's third death
            Dying.dead = True
            raise DeathError

    attempts = Attempts(store, "fp/sid", "run")
    Dying.dead = False
    with pytest.raises(DeathError):
        attempts.run(2, label)
    Dying.dead = False
    left = {stored.key.rpartition("/")[2][:7] for stored in store.list("attempts/")}
    assert left == {"0-2-run", "1-2-run"}
    assert attempts.run(2, label) == [1] and calls == [0, 1, 0]


def read(store: Store, run_id: str, *, dies: bool) -> None:
    """Reads in a worker that lives on, or does not."""
    Dying.dead = False
    with Attempts(store, "fp/sid", run_id).reading("/a.parquet: rows 0 to 9"):
        Dying.dead = dies
        if dies:
            raise DeathError


def test_a_reader_that_keeps_dying_ends_its_run_alone_with_the_place() -> None:
    store = Dying()
    for _ in range(DEATHS_OF_A_READER):
        with pytest.raises(DeathError):
            read(store, "run", dies=True)
    with pytest.raises(StorageError, match=r"^/a\.parquet: rows 0 to 9: .* 5 times .*; .* rewrite"):
        read(store, "run", dies=False)
    read(store, "another", dies=False)
    assert Attempts(store, "fp/sid", "run").run(9, lambda _start, _end: None) == []
    Attempts(store, "fp/sid", "run").forget()
    assert list(store.list("attempts/")) == []


def test_a_reader_that_lived_at_last_leaves_no_marker_and_costs_one_create() -> None:
    store = Dying()
    for _ in range(DEATHS_OF_A_READER - 1):
        with pytest.raises(DeathError):
            read(store, "run", dies=True)
    read(store, "run", dies=False)
    assert list(store.list("attempts/")) == []
    recording = Recording(store)
    read(recording, "run", dies=False)
    assert len(recording.created) == 1 and not recording.listed


def test_other_tasks_or_rows_are_another_attempt() -> None:
    shard = Shard(VERSION, Piece(0, 3, 8, 0, 10))
    other = Shard(VERSION, Piece(3, 6, 8, 10, 20))
    fp = {"a": "1", "b": "2"}
    names = {
        attempt_name(fp, WorkItem(shard, ("a", "b"), True)),
        attempt_name(fp, WorkItem(shard, ("a",), True)),
        attempt_name(fp, WorkItem(other, ("a", "b"), True)),
    }
    assert len(names) == 3
    assert attempt_name(fp, WorkItem(shard, ("b", "a"), False)) in names
