"""The driver's view of a run: documents are counted once, and silent workers are named."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from pipeline.ledger.blocks import LabelCost, ShardCounts
from pipeline.ledger.cells import WorkItem
from pipeline.runtime import progress as reports
from pipeline.runtime.connection import without_core_greeting
from pipeline.runtime.progress import (
    CONVERTING,
    LABELLING,
    LOADING,
    PUBLISHING,
    READING,
    STARTING_WORKERS,
    Mailbox,
    Progress,
    ShardProgress,
    WorkerReport,
    work_key,
)
from pipeline.runtime.watch import Watch, Watchdog
from pipeline.sources.shards import ObjectVersion, Piece, Shard

LIMIT_S = 100.0
BUSY = WorkerReport(
    LABELLING, worker="process 7 on a", work=("s1", ("t",)), place="c.jsonl", slowest_s=1.0
)


def counts(sid: str, rows: int, failed: int = 0, read: int = 0) -> ShardCounts:
    status = {"ok": rows - failed, "error:no text": failed}
    return ShardCounts(sid, rows, 1, status, {"t": {}}, LabelCost(1.0, read, 0, 0, 0))


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


def test_a_mailbox_keeps_the_latest_report_of_each_worker_and_shard() -> None:
    box = Mailbox()
    other = replace(BUSY, work=("s2", ("t",)))
    for report in (BUSY, other, replace(BUSY, answered=3)):
        box.put(report)
    assert box.take() == [other, replace(BUSY, answered=3)]
    assert box.take() == []


def silent(
    watchdog: Watchdog, now_s: float, *, alive: bool = True, repeats: bool = True
) -> list[tuple[str, bool]]:
    """The workers to name and whether they end the run, where each has just repeated its report."""
    for heard in list(watchdog._heard.values()) if repeats else ():
        watchdog.hear(heard.report, now_s)
    return [(each.report.worker, each.ends) for each in watchdog.stalls(now_s, lambda _: alive)]


@pytest.mark.parametrize(
    ("slowest_s", "named_s", "ended_s"),
    [
        (0.1, 10, 100),  # the floor
        (5.0, 25, 100),
        (50.0, 250, 500),  # a slow machine gets more than the limit
        (None, 50, 100),  # its first batch
    ],
)
def test_a_worker_is_named_once_and_later_ends_the_run(
    slowest_s: float | None, named_s: float, ended_s: float
) -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.hear(replace(BUSY, slowest_s=slowest_s), 1_000)
    assert silent(watchdog, 1_000 + named_s - 1) == []
    assert silent(watchdog, 1_000 + named_s) == [(BUSY.worker, False)]
    assert silent(watchdog, 1_000 + ended_s - 1) == []
    assert silent(watchdog, 1_000 + ended_s) == [(BUSY.worker, True)]


def test_a_worker_that_answers_again_is_named_again_if_it_falls_silent() -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.hear(BUSY, 0)
    assert len(silent(watchdog, 20)) == 1 and not silent(watchdog, 21)
    watchdog.hear(replace(BUSY, answered=1), 22)
    assert not silent(watchdog, 23)
    assert silent(watchdog, 32) == [(BUSY.worker, False)]


def test_nobody_is_blamed_without_work_after_death_or_while_reports_are_lost() -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.hear(BUSY, 0)
    assert not silent(watchdog, 1_000, alive=False) and not silent(watchdog, 2_000)
    watchdog.hear(BUSY, 2_000)
    watchdog.hear(replace(BUSY, finished=True), 2_001)
    assert not silent(watchdog, 9_000)
    watchdog.hear(BUSY, 9_000)
    watchdog.hear(replace(BUSY, worker="another"), 9_001)  # its shard went to another worker
    watchdog.excuse(9_500)
    assert not silent(watchdog, 9_509)
    assert silent(watchdog, 9_510) == [("another", False)]


READS = replace(BUSY, phase=READING, slowest_s=None)


def test_a_worker_that_reads_for_long_is_named_and_does_not_end_the_run() -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.hear(READS, 0)
    watchdog.hear(READS, 49)
    (stall,) = watchdog.stalls(50, lambda _: True)
    assert str(stall) == "process 7 on a has been reading c.jsonl for 50 s"
    assert silent(watchdog, 1e9) == []
    watchdog.hear(replace(READS, finished=True), 1e9)
    assert not silent(watchdog, 2e9)


@pytest.mark.parametrize(
    ("report", "does"),
    [
        (replace(BUSY, slowest_s=50.0, answered=3), "it labels c.jsonl (3 rows are answered)"),
        (replace(BUSY, finished=True), "it has finished c.jsonl"),  # it commits, or waits
        (READS, "it reads c.jsonl"),
        (replace(READS, finished=True), "it has finished c.jsonl"),
        (WorkerReport(LOADING, BUSY.worker), "its last report is: loading the model"),
    ],
)
def test_whatever_a_worker_does_it_is_named_and_ends_the_run_if_it_repeats_nothing(
    report: WorkerReport, does: str
) -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.hear(report, 0)
    watchdog.hear(report, 200)
    assert not any(ends for _, ends in silent(watchdog, 299, repeats=False))
    (stall,) = watchdog.stalls(300, lambda _: True)
    assert stall.ends
    assert str(stall) == f"process 7 on a has answered nothing for 100 s; {does}"
    assert not silent(watchdog, 301, alive=False, repeats=False)


def test_documents_that_are_being_read_are_not_counted_as_answered(
    watched: tuple[Watch, list[Progress]],
) -> None:
    watch, announced = watched
    watch.enter(STARTING_WORKERS)
    watch.take_in([replace(BUSY, phase=READING, answered=3)], 0.0)
    watch.enter(announced[-1].phase)
    assert announced[-1].phase == STARTING_WORKERS and announced[-1].answered == 0


@pytest.mark.parametrize("commit_first", [False, True])
def test_nobody_is_blamed_after_the_commit_even_if_the_last_report_came_later_or_never(
    commit_first: bool, watched: tuple[Watch, list[Progress]]
) -> None:
    watch, _ = watched
    done = replace(BUSY, finished=True)
    watch.take_in([BUSY], 0.0)
    watch.take_in([] if commit_first else [done], 1.0)
    watch.committed(counts("s1", 3))
    watch.take_in([BUSY, done] if commit_first else [BUSY], 2.0)
    assert silent(watch._watchdog, 1e9) == []


def test_a_stall_names_the_worker_the_shard_and_the_silence() -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.hear(replace(BUSY, answered=3), 0)
    (stall,) = watchdog.stalls(12, lambda _: True)
    assert str(stall) == (
        "process 7 on a has answered nothing for 12 s; it labels c.jsonl (3 rows are answered)"
    )


def test_a_worker_reports_its_shard_its_batches_and_its_slowest_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_s = [0.0]
    monkeypatch.setattr(reports.time, "monotonic", lambda: clock_s[0])
    sent: list[WorkerReport] = []
    version = ObjectVersion("/in/c.jsonl", 1, "e", "jsonl", "text", None)
    work = WorkItem(Shard(version, Piece(0, 10, 1, None, None)), ("b", "a"), documents=True)
    shard = ShardProgress(sent.append, work, rows=6, slowest_s=None)
    for clock_s[0], rows, share in ((3.0, 1, 0.5), (3.1, 2, 0.25), (4.1, 3, 0.25)):
        shard.advance(rows, share)
    shard.finish(10, 1)
    assert [(each.answered, each.read) for each in sent] == [(0, 0), (1, 1), (6, 6), (10, 6)]
    assert [each.work_done for each in sent] == [0, 3, 6, 10]
    assert {each.work for each in sent} == {work_key(work.shard.id, ["a", "b"])}
    assert sent[0].place == "/in/c.jsonl: rows 0 to 10"
    assert shard.slowest_s == 3.0 and sent[-1].finished


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
