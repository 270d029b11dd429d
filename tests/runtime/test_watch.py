"""The driver's view of a run: documents are counted once, and silent workers are named."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from pipeline.errors import StalledError
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import Counts, ShardCounts
from pipeline.runtime import progress as reports
from pipeline.runtime.connection import without_core_greeting
from pipeline.runtime.progress import (
    COMMITTING,
    CONVERTING,
    FETCHING,
    LABELLING,
    LISTING,
    LOADING,
    PUBLISHING,
    READING,
    STARTING_RAY,
    STARTING_WORKERS,
    WAITING,
    WORKER_PHASES,
    LabelProgress,
    Mailbox,
    Post,
    Progress,
    Silence,
    WorkerReport,
    sender,
    work_done,
    work_key,
)
from pipeline.runtime.stalls import DRIVER, GRACE_S, MORE_ENDS, Watchdog
from pipeline.runtime.watch import Watch
from pipeline.sources.shards import ObjectVersion, Piece, Shard

LIMIT_S = 100.0
BUSY = WorkerReport(
    LABELLING, worker="process 7 on a", work=("s1", ("t",)), place="c.jsonl", slowest_s=1.0
)


def counts(sid: str, rows: int, failed: int = 0, read: int = 0) -> ShardCounts:
    status = {"ok": rows - failed, "error:no text": failed}
    own = {("rows", name): count for name, count in status.items()}
    return ShardCounts(sid, ("t",), Counts({**own, ("asked", "0"): read}))


@pytest.fixture
def watched() -> tuple[Watch, list[Progress]]:
    announced: list[Progress] = []
    return Watch(announced.append, stall_limit_s=LIMIT_S), announced


@pytest.mark.parametrize("seed", range(5))
def test_each_document_is_counted_once_in_whatever_order_reports_and_commits_come(
    seed: int, watched: tuple[Watch, list[Progress]]
) -> None:
    watch, announced = watched
    source = random.Random(seed)
    shards = {f"s{n}": source.randint(1, 9) for n in range(12)}
    events: list[Callable[[], None]] = []
    for sid, rows in shards.items():
        report = replace(BUSY, worker=f"w{sid}", work=(sid, ("t",)), answered=rows, read=1)
        # — also after the commit: reports travel by another way than the counts
        events += [lambda report=report: watch.take_in([report], 0.0)] * 2  # type: ignore[misc]
        events.append(lambda sid=sid, rows=rows: watch.committed(counts(sid, rows, 1, read=1)))  # type: ignore[misc]
    source.shuffle(events)
    for event in events:
        event()
    assert announced[-1].answered == announced[-1].committed == sum(shards.values())
    assert announced[-1].work_done == sum(shards.values())
    assert announced[-1].failed == announced[-1].read == len(shards)


def test_documents_are_counted_while_their_shard_is_at_work(
    watched: tuple[Watch, list[Progress]],
) -> None:
    watch, announced = watched
    watch.committed(counts("s0", 10))
    watch.take_in([replace(BUSY, answered=4, failed=1, read=3)], 0.0)
    watch.enter(LABELLING)
    assert (announced[-1].answered, announced[-1].committed) == (14, 10)
    assert (announced[-1].failed, announced[-1].read) == (1, 3)


def test_workers_phases_follow_one_another_and_do_not_replace_the_drivers(
    watched: tuple[Watch, list[Progress]],
) -> None:
    watch, announced = watched

    def after(*phases: str) -> str:
        watch.take_in([WorkerReport(phase, worker=str(n)) for n, phase in enumerate(phases)], 0.0)
        watch.committed(counts("s0", 1)) if LABELLING in phases else None
        with watch._changing:
            return watch._progress().phase

    watch.enter(STARTING_WORKERS)
    assert after(CONVERTING, LOADING) == LOADING
    assert after(CONVERTING) == LOADING
    assert after(LOADING, LABELLING, LOADING) == LABELLING
    watch.enter(PUBLISHING)
    assert after(LOADING) == PUBLISHING
    assert announced[0].phase == STARTING_WORKERS


@pytest.mark.parametrize("broken", ["progress", "metrics"])
def test_an_error_of_progress_or_metrics_is_logged_once_and_ends_nothing(
    broken: str, watched: tuple[Watch, list[Progress]], caplog: pytest.LogCaptureFixture
) -> None:
    watch, announced = watched

    def fail(*_values: object) -> None:
        raise OSError("no space left")

    if broken == "progress":
        watch = Watch(fail, stall_limit_s=LIMIT_S)
    else:
        watch._metrics = SimpleNamespace(committed=fail, tick=fail)  # type: ignore[assignment]
    for sid in ("s0", "s1"):
        watch.committed(counts(sid, 10))
    with watch._changing:
        assert watch._progress().committed == 20
    assert [r.getMessage().count("OSError: no space left") for r in caplog.records] == [1]
    assert broken == "progress" or announced[-1].committed == 20


@pytest.mark.parametrize("workers, at_once", [(1, 3), (1_000, 3), (1_001, 1)])
def test_more_than_a_thousand_workers_leave_their_reports_to_the_thread_that_repeats(
    workers: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[WorkerReport] = []
    context = SimpleNamespace(get_actor_id=lambda: "a", get_node_id=lambda: "n")
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    idle = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(reports, "threading", SimpleNamespace(**vars(threading)))
    monkeypatch.setattr(reports.threading, "Thread", lambda **_: idle)
    mailbox = SimpleNamespace(put=SimpleNamespace(remote=put.append))
    send = sender.__wrapped__(Post(mailbox, LIMIT_S, workers))
    send(WorkerReport(READING))
    send(WorkerReport(WAITING))
    assert [each.phase for each in put] == [STARTING_WORKERS, READING, WAITING][:at_once]


@pytest.mark.parametrize("workers, seconds", [(1, 1.0), (1_000, 1.0), (8_000, 8.0), (64_000, 10.0)])
def test_a_thousand_reports_a_second_are_repeated_and_none_later_than_a_tenth_of_the_limit(
    workers: int, seconds: float
) -> None:
    assert Post(None, LIMIT_S, workers).repeat_s == seconds


def test_a_mailbox_keeps_the_latest_report_of_each_worker_and_shard() -> None:
    box = Mailbox()
    other = replace(BUSY, work=("s2", ("t",)))
    for report in (BUSY, other, replace(BUSY, answered=3)):
        box.put(report)
    assert box.take(0.0) == [other, replace(BUSY, answered=3)]
    assert box.take(0.0) == []


def told(watchdog: Watchdog, now_s: float, *, alive: bool = True) -> list[tuple[str, str, bool]]:
    """The workers to name, what is done about each, and whether the run ends."""
    stalls = watchdog.stalls(now_s, lambda _: alive)
    return [(each.report.worker, each.then, each.ends) for each in stalls]


@pytest.mark.parametrize(
    ("report", "named_s", "ended_s"),
    [
        (replace(BUSY, slowest_s=0.1), 10, 100),  # the floor
        (replace(BUSY, slowest_s=5.0), 25, 100),
        (replace(BUSY, slowest_s=50.0), 250, 500),  # a slow machine gets more than the limit
        (replace(BUSY, slowest_s=None), 50, 100),  # its first batch
        *((WorkerReport(phase, BUSY.worker), 50, 100) for phase in WORKER_PHASES[:-1]),
        (replace(BUSY, phase=READING), 50, 100),
        (replace(BUSY, phase=COMMITTING), 50, 100),
    ],
)
def test_whatever_a_worker_does_it_is_named_once_and_replaced_later(
    report: WorkerReport, named_s: float, ended_s: float
) -> None:
    watchdog = Watchdog(LIMIT_S)
    assert report.limits(LIMIT_S) == (named_s, ended_s)
    watchdog.hear(replace(report, silent_s=named_s - 1), 0)
    assert told(watchdog, 0) == []
    watchdog.hear(replace(report, silent_s=named_s), 0)
    named = (BUSY.worker, f"it is replaced at {ended_s} s", False)
    assert told(watchdog, 0) == [named] and told(watchdog, 0) == []
    watchdog.hear(report, 1)  # a sign of life
    assert told(watchdog, 1) == []
    watchdog.hear(replace(report, silent_s=named_s), 2)
    assert told(watchdog, 2) == [named]


def test_of_many_workers_those_that_end_themselves_are_replaced_and_the_run_ends_if_all_do() -> (
    None
):
    watchdog = Watchdog(LIMIT_S)
    ends = []
    for number in range(60):  # at each moment eight work, and Ray replaces each that ends
        report = replace(BUSY, worker=f"w{number}", work=(f"s{number % 8}", ("t",)))
        if number >= 8:
            silent = replace(report, worker=f"w{number - 8}", silent_s=100, ended=True)
            watchdog.hear(silent, number)
            ends += told(watchdog, number)
        watchdog.hear(report, number)
        if number == 12:
            watchdog.committed(("s1", ("t",)))
    assert {then for _, then, _ in ends} == {"it is ended, and Ray starts another"}
    assert [worker for worker, _, _ in ends] == [f"w{number}" for number in range(52)]
    first = next(number for number, (_, _, over) in enumerate(ends) if over)
    assert first == 5 + 7 + MORE_ENDS  # five ended before the commit, and seven others work


def test_a_worker_that_repeats_nothing_ends_the_run_unless_it_died() -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.hear(BUSY, 0)
    assert told(watchdog, 49) == []
    assert told(watchdog, 50) == [(BUSY.worker, "the run ends at 100 s", False)]
    assert told(watchdog, 100) == []  # a moment for the worker to end itself
    assert told(watchdog, 100 + GRACE_S) == [(BUSY.worker, "the run ends at 100 s", True)]
    assert told(watchdog, 120, alive=False) == [] == told(watchdog, 1e9)
    watchdog.hear(BUSY, 200)
    watchdog.hear(replace(BUSY, worker="another"), 210)
    watchdog.excuse(240)  # reports were lost
    assert told(watchdog, 289) == []
    assert told(watchdog, 290) == [("another", "the run ends at 100 s", False)]


def _pair(cpu_s: float, moved: float, _of_machine: bool) -> tuple[float, float]:
    return cpu_s, moved


@pytest.mark.parametrize("phase", [STARTING_WORKERS, FETCHING, CONVERTING, LOADING, READING])
def test_outside_of_batches_a_sign_of_life_is_work_and_idle_processes_are_not_blamed(
    phase: str,
) -> None:
    report, rates = WorkerReport(phase), {"idle": (0.01, 2e3), "cpu": (0.2, 0), "bytes": (0, 1e6)}

    def silence(report: WorkerReport, *seconds: str) -> float:
        cpu_s, moved, silence = 0.0, 0.0, Silence(0.0)
        for now_s, rate in enumerate(seconds, 1):
            cpu_s, moved = cpu_s + rates[rate][0], moved + rates[rate][1]
            silent_s = silence.seconds(report, now_s, partial(_pair, cpu_s, moved))
        return silent_s

    assert silence(report, *["idle"] * 700) == 699  # the first is news
    assert silence(report, *["idle"] * 300, "cpu", *["idle"] * 20) == 20
    assert silence(report, *["idle"] * 300, "bytes", *["idle"] * 20) == 20
    assert silence(BUSY, *["cpu"] * 700) == 699  # a GPU that hangs keeps a core busy
    assert silence(WorkerReport(WAITING), *["idle"] * 700) == 0


def test_an_engine_that_waits_for_the_one_that_fetches_sees_the_bytes_of_the_machine() -> None:
    asked: list[bool] = []

    def work(of_machine: bool) -> tuple[float, float]:
        asked.append(of_machine)
        return work_done(of_machine)

    silence = Silence(0.0)
    for phase in (FETCHING, CONVERTING, LOADING):
        silence.seconds(WorkerReport(phase), 1.0, work)
    assert asked == [True, True, False]


def test_a_driver_that_hangs_ends_the_run_in_its_own_phases_alone(
    watched: tuple[Watch, list[Progress]],
) -> None:
    watch, _ = watched
    nothing = (0.0, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.runtime.watch.work_done", lambda _machine: nothing)
        for phase, silent_s in ((LISTING, 99), (STARTING_RAY, 0), (LABELLING, 0)):
            watch.enter(phase)
            for now_s in (1e6, 1e6 + 99):
                report = watch._of_driver(now_s)
            assert report.silent_s == silent_s, phase
    watchdog = Watchdog(LIMIT_S)
    watchdog.hear(WorkerReport(LISTING, DRIVER, silent_s=100), 0)
    (stall,) = watchdog.stalls(0, lambda _: True)
    assert stall.ends
    assert str(stall) == "the driver has shown no sign of life for 100 s; it is listing the input"


def test_documents_that_are_being_read_are_not_counted_as_answered(
    watched: tuple[Watch, list[Progress]],
) -> None:
    watch, announced = watched
    watch.enter(STARTING_WORKERS)
    watch.take_in([replace(BUSY, phase=READING, answered=3)], 0.0)
    watch.enter(announced[-1].phase)
    assert announced[-1].phase == STARTING_WORKERS and announced[-1].answered == 0


def test_a_stall_names_the_worker_the_shard_and_the_silence() -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.hear(replace(BUSY, answered=3, silent_s=12), 0)
    watchdog.hear(replace(BUSY, worker="b", work=None, phase=READING, silent_s=60), 0)
    first, second = watchdog.stalls(0, lambda _: True)
    silent = "has shown no sign of life for"
    assert str(first) == (f"process 7 on a {silent} 12 s; it labels c.jsonl (3 rows are answered)")
    assert str(second) == f"b {silent} 60 s; it is reading c.jsonl"


@pytest.mark.parametrize("late", [False, True])
def test_a_stall_that_is_found_while_the_run_ends_takes_no_result_away(late: bool) -> None:
    """A shell's background job ignores SIGINT; then the watch has a handler of its own."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(30):
            with suppress(StalledError), Watch(lambda _: None, stall_limit_s=LIMIT_S) as watch:
                # — as late as it can be: when the block is left, or after that
                thread = threading.Thread(target=watch._end, args=("it hangs",))
                (watch._closed.set if late else thread.start)()
            (thread.start if late else int)()
            thread.join()
            assert not watch._thread.is_alive()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_plan_that_takes_longer_than_the_run_may_take_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.runtime.watch.LEAST_PLANNING_S", 0.0)
    text = "ended by --max-hours 1 while listing the input; nothing was labelled"
    watch = Watch(lambda _: None, stall_limit_s=LIMIT_S)
    with pytest.raises(StalledError, match=text), watch:
        watch.limit_planning(time.time(), "--max-hours 1")
        watch.enter(LISTING)
        time.sleep(30)


def test_a_worker_reports_its_shard_its_batches_and_its_slowest_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_s = [0.0]
    monkeypatch.setattr(reports.time, "monotonic", lambda: clock_s[0])
    sent: list[WorkerReport] = []
    version = ObjectVersion("/in/c.jsonl", 1, "e", "jsonl", "text", None)
    work = WorkItem(Shard(version, Piece(0, 10, 1, None, None)), ("b", "a"), documents=True)
    shard = LabelProgress(sent.append, work, rows=6)
    for clock_s[0], rows, share in ((3.0, 1, 0.5), (3.1, 2, 0.25), (4.1, 3, 0.25)):
        shard.advance(rows, share)
    shard.finish(10, 1)
    assert [(each.answered, each.read) for each in sent] == [(0, 0), (1, 1), (6, 6), (10, 6)]
    assert [each.work_done for each in sent] == [0, 3, 6, 10]
    assert {each.work for each in sent} == {work_key(work.shard.id, ["a", "b"])}
    assert sent[0].place == "/in/c.jsonl: rows 0 to 10"
    assert sent[-1].slowest_s == 3.0 and sent[-1].failed == 1


@pytest.mark.parametrize("fails", [False, True])
def test_of_what_is_printed_while_ray_starts_only_the_cores_greeting_is_dropped(
    fails: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def start() -> None:
        with without_core_greeting():
            os.write(
                2, b"[I 1] Set ray log level from environment variable RAY_BACKEND_LOG_LEVEL\n"
            )
            os.write(2, b"no space left on the disk\n")
            if fails:
                raise ValueError

    with pytest.raises(ValueError) if fails else nullcontext():
        start()
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "no space left on the disk\nlater\n"
