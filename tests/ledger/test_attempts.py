"""The search for deadly rows: they alone are quarantined, and every other row is labelled once."""

from __future__ import annotations

import math
import os
import random
import socket
from collections.abc import Callable, Collection

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from label_tables import toy_shard
from memory_store import MemoryStore, Recording

from pipeline.errors import (
    AssayError,
    LoadError,
    ModelError,
    RefusedError,
    StorageError,
    WorkerError,
)
from pipeline.ledger.attempts import (
    DEATHS_OF_A_ROW,
    DEATHS_OF_A_SHARD,
    DEATHS_OF_A_STEP,
    GC,
    Attempts,
    attempt_name,
    in_use,
)
from pipeline.ledger.cells import WorkItem
from pipeline.stores.store import Store


class DeathError(BaseException):
    """The worker died; no `finally` of its own ran."""


class Dying(MemoryStore):
    """A store that a dead worker cannot reach: what it would strike out stays."""

    dead: bool = False

    def delete(self, keys: Collection[str]) -> None:  # type: ignore[override]
        if not Dying.dead:
            super().delete(list(keys))


def attempts(store: Store, run_id: str = "run") -> Attempts:
    """Of a worker that survives."""
    Dying.dead = False
    return Attempts(store, "fp/sid", run_id)


def die() -> None:
    Dying.dead = True
    raise DeathError


def run_until_done(rows: int, dies: Callable[[int, int], bool]) -> tuple[list[int], list[int]]:
    """Rows set aside, and rows labelled in the last attempt, if workers die at these ranges."""
    store = Dying()
    while True:
        labelled: list[int] = []

        def label(start: int, end: int, labelled: list[int] = labelled) -> None:
            if dies(start, end):
                die()
            labelled += range(start, end)

        try:
            return attempts(store).run(rows, label), labelled
        except WorkerError as error:
            assert isinstance(error.cause, DeathError)


def most_deaths(rows: int, deadly: Collection[int]) -> int:
    levels = next(level for level in range(5) if 16**level >= rows)
    return DEATHS_OF_A_SHARD + len(deadly) * (levels + DEATHS_OF_A_ROW)


@given(st.integers(1, 4097), st.data())
def test_deadly_rows_alone_are_set_aside_and_every_other_is_labelled_once(
    rows: int, data: st.DataObject
) -> None:
    deadly = data.draw(st.sets(st.integers(0, rows - 1), max_size=3))
    deaths = 0

    def dies(start: int, end: int) -> bool:
        nonlocal deaths
        is_deadly = any(start <= row < end for row in deadly)
        deaths += is_deadly
        assert deaths <= most_deaths(rows, deadly)
        return is_deadly

    aside, labelled = run_until_done(rows, dies)
    assert aside == sorted(deadly)
    assert sorted(labelled) == [row for row in range(rows) if row not in deadly]


@pytest.mark.parametrize("seed", range(2))
def test_where_machines_are_often_preempted_only_rows_that_kill_their_worker_are_quarantined(
    seed: int,
) -> None:
    """Each fifth attempt at a shard ends with its machine: a machine exists for minutes."""
    source, preempted, died = random.Random(seed), 0, 0
    for _ in range(300):
        rows = source.choice([1, 1, 2, 16, 40, 300])
        rate = 0.22 / rows  # of preemptions, in the time of a row
        deadly, deaths = {row for row in range(rows) if source.random() < 0.1 / rows}, 0

        def dies(start: int, end: int) -> bool:
            nonlocal preempted, deaths
            lived_rows = source.expovariate(rate)  # noqa: B023
            killed = min((row - start for row in deadly if start <= row < end), default=math.inf)  # noqa: B023
            if min(lived_rows, killed) >= end - start:
                return False
            preempted += lived_rows < killed
            deaths += killed <= lived_rows
            assert deaths <= most_deaths(rows, deadly)  # noqa: B023
            return True

        aside, labelled = run_until_done(rows, dies)
        assert set(aside) == deadly and {*labelled} == {*range(rows)} - deadly
        died += deaths
    assert preempted > 60 and died > 50


def with_markers(*names: str) -> Dying:
    """A store with marks of attempts that did not end."""
    store = Dying()
    for name in names:
        store.create(f"attempts/fp/sid/{name}", b"")
    return store


def tried(store: Store, rows: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Rows set aside, and the ranges that are labelled one after the other; nothing dies."""
    ranges: list[tuple[int, int]] = []
    return attempts(store).run(rows, lambda start, end: ranges.append((start, end))), ranges


def test_one_death_splits_nothing_and_what_ended_leaves_no_marker() -> None:
    store = with_markers("0-40-run-dead")
    assert tried(store, 40) == ([], [(0, 40)]) and list(store.list("attempts/")) == []


def test_what_was_deadly_goes_first() -> None:
    _, ranges = tried(with_markers("0-32-run-a", "0-32-run-b", "30-32-run-c"), 32)
    assert sorted(ranges[:2]) == [(30, 31), (31, 32)]
    assert sorted(row for start, end in ranges for row in range(start, end)) == list(range(32))


@pytest.mark.parametrize(("killed_runs", "aside"), [(5, []), (6, [7])])
def test_two_deaths_in_other_runs_count_as_one_because_a_killed_driver_ends_its_workers(
    killed_runs: int, aside: list[int]
) -> None:
    names = (f"{rows}-{run}-a" for run in range(killed_runs) for rows in ("0-16", "7-8"))
    set_aside, ranges = tried(with_markers(*names), 16)
    labelled = [row for start, end in ranges for row in range(start, end)]
    assert set_aside == aside and sorted([*labelled, *aside]) == list(range(16))


def test_a_success_clears_the_rows_that_machines_died_at_before() -> None:
    """Of these rows no attempt was wrong: four machines were preempted, with successes between."""
    store = with_markers(
        "0-2-run-a", "0-2-run-b", "0-1-run-c", "0-1-run-d", "1-2-run-e", "1-2-run-f"
    )
    calls: list[int] = []

    def label(start: int, end: int) -> None:
        calls.append(start)
        if calls == [0, 1]:  # the second row's third death
            die()

    with pytest.raises(WorkerError):
        attempts(store).run(2, label)
    left = {stored.key.rpartition("/")[2][:7] for stored in store.list("attempts/")}
    assert left == {"0-2-run", "1-2-run"}
    assert attempts(store).run(2, label) == [1] and calls == [0, 1, 0]


def read(store: Store, run_id: str = "run", *, dies: bool = False) -> None:
    """Reads in a worker that survives, or does not."""
    with attempts(store, run_id).surviving("reading", "rewrite the file"):
        if dies:
            die()


def reads_that_die(store: Store, number: int) -> None:
    for _ in range(number):
        with pytest.raises(DeathError):
            read(store, dies=True)


def test_a_reader_that_keeps_dying_fails_in_its_run_alone() -> None:
    store = Dying()
    reads_that_die(store, DEATHS_OF_A_STEP)
    died = r"^the worker died 5 times while reading this shard; rewrite the file$"
    with pytest.raises(StorageError, match=died):
        read(store)
    read(store, "another")
    assert tried(store, 9) == ([], [(0, 9)])
    attempts(store).forget()
    assert list(store.list("attempts/")) == []


def test_a_reader_that_survives_leaves_no_marker_and_costs_one_create() -> None:
    store = Dying()
    reads_that_die(store, DEATHS_OF_A_STEP - 1)
    read(store)
    assert list(store.list("attempts/")) == []
    recording = Recording(store)
    read(recording)
    assert len(recording.created) == 1 and not recording.listed


def test_other_tasks_or_rows_are_another_attempt() -> None:
    shard, other = toy_shard(), toy_shard(3)
    fp = {"a": "1", "b": "2"}
    names = {
        attempt_name(fp, WorkItem(shard, ("a", "b"), True)),
        attempt_name(fp, WorkItem(shard, ("a",), True)),
        attempt_name(fp, WorkItem(other, ("a", "b"), True)),
    }
    assert len(names) == 3
    assert attempt_name(fp, WorkItem(shard, ("b", "a"), False)) in names


class Unreachable(MemoryStore):
    """A store that answers no delete."""

    def delete(self, keys: Collection[str]) -> None:  # type: ignore[override]
        raise StorageError("no answer")


def test_an_error_of_the_mark_of_a_run_does_not_hide_its_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = []
    with in_use(Unreachable()):
        result.append("labelled")
    assert result == ["labelled"] and "stays marked as in use" in caplog.text
    with pytest.raises(ValueError, match="the run's own"), in_use(Unreachable()):
        raise ValueError("the run's own")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        AssertionError("n_tokens has 3 rows, and p has 4"),
        ModelError("internal error: a row of NaN"),
        pa.ArrowInvalid("column 2 has 3 rows"),
        MemoryError(),
        BaseException("a panic of Rust"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_no_store_explains_leaves_its_marker_until_its_row_is_alone(
    error: BaseException,
) -> None:
    store, asked = MemoryStore(), 0

    def label(start: int, end: int) -> None:
        nonlocal asked
        asked += 1
        if start <= 7 < end:
            raise error

    failed: list[WorkerError] = []
    while True:
        try:
            assert Attempts(store, "fp/sid", "run").run(40, label) == [7]
            break
        except WorkerError as raised:
            failed.append(raised)
    assert {raised.cause for raised in failed} == {error}
    assert 3 < len(failed) <= most_deaths(40, [7])
    assert str(failed[0]).startswith(type(error).__name__) or isinstance(error, AssayError)


@pytest.mark.parametrize(
    "error",
    [StorageError("gone"), LoadError(OSError("no space")), KeyboardInterrupt(), SystemExit()],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_the_fault_of_the_rows_leaves_no_marker(error: BaseException) -> None:
    store = MemoryStore()

    def label(_start: int, _end: int) -> None:
        raise error

    with pytest.raises(type(error)):
        Attempts(store, "fp/sid", "run").run(4, label)
    assert not list(store.list("attempts/"))


def test_two_runs_on_one_output_name_each_other_and_gc_is_no_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    with in_use(store):
        assert not caplog.messages
        with in_use(store):
            [line] = caplog.messages
        assert f"another run ({socket.gethostname()}, process {os.getpid()}) writes" in line
    with in_use(store), pytest.raises(RefusedError), in_use(store, GC):
        pass
    assert caplog.messages == [line]
