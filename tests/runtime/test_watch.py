"""The driver's view of a run: documents are counted once, and a run without workers ends."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from label_tables import toy_shard

from pipeline.errors import ModelError, StalledError
from pipeline.ledger.cells import Committed, WorkItem
from pipeline.ledger.counts import Counts, ShardCounts
from pipeline.ledger.cuts import Cuts
from pipeline.runtime.mailbox import Letter, Mailbox, Post, Sender, Silence, work_done
from pipeline.runtime.metrics import COUNTERS, RunMetrics
from pipeline.runtime.plan import Plan
from pipeline.runtime.progress import (
    COMMITTING,
    CONVERTING,
    FETCHING,
    LABELLING,
    LOADING,
    PUBLISHING,
    READING,
    STARTING_WORKERS,
    WAITING,
    LabelProgress,
    Progress,
    WorkerReport,
    work_key,
)
from pipeline.runtime.watch import GRACE_S, QUIET_S, Nodes, Watch, Workers

LIMIT_S = 100.0
BUSY = WorkerReport(LABELLING, work=("s1", ("t",)), place="c.jsonl")
WORKER = "process 7 on a"


def counts(sid: str, rows: int, failed: int = 0) -> ShardCounts:
    status = {"ok": rows - failed, "error:no text": failed}
    own = {("rows", name): count for name, count in status.items()}
    return ShardCounts(sid, ("t",), Counts(own))


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
        letter = Letter(replace(BUSY, work=(sid, ("t",)), answered=rows), f"w{sid}")
        # — also after the commit: reports travel by another way than the counts
        events += [lambda letter=letter: watch.take_in([letter], 0.0)] * 2  # type: ignore[misc]
        events.append(lambda sid=sid, rows=rows: watch.committed(counts(sid, rows, 1)))  # type: ignore[misc]
    source.shuffle(events)
    for event in events:
        event()
    assert announced[-1].answered == announced[-1].committed == sum(shards.values())
    assert announced[-1].work_done == sum(shards.values())
    assert announced[-1].failed == len(shards)


def test_workers_phases_follow_one_another_and_do_not_replace_the_drivers(
    watched: tuple[Watch, list[Progress]],
) -> None:
    watch, announced = watched

    def after(*phases: str) -> str:
        watch.take_in([Letter(WorkerReport(phase), str(n)) for n, phase in enumerate(phases)], 0.0)
        watch.committed(counts("s0", 1)) if LABELLING in phases else None
        return watch.progress.phase

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
        watch._metrics = RunMetrics("demo", Plan(Cuts((), ()), Committed({}, {}, {}, {}), ()))
        watch._metrics._counters = {name: SimpleNamespace(inc=fail) for name in COUNTERS}  # type: ignore[misc]
    for sid in ("s0", "s1"):
        watch.committed(counts(sid, 10))
    assert watch.progress.committed == 20
    assert [r.getMessage().count("OSError: no space left") for r in caplog.records] == [1]
    assert broken == "progress" or announced[-1].committed == 20


@pytest.mark.parametrize("workers, seconds", [(1, 1.0), (1_000, 1.0), (8_000, 8.0), (64_000, 10.0)])
def test_a_thousand_reports_a_second_are_repeated_and_none_later_than_a_tenth_of_the_limit(
    workers: int, seconds: float
) -> None:
    assert Post(None, LIMIT_S, workers).repeat_s == seconds


def test_a_mailbox_keeps_the_latest_report_of_each_worker_and_the_last_of_those_that_end() -> None:
    box, cause = Mailbox(), ModelError("CUDA")
    last = Letter(BUSY, "a", "n1", is_last=True, cause=cause, starts_again=False)
    other, later = Letter(BUSY, "b"), Letter(BUSY, "a", "n1")
    replaced = Letter(BUSY, "c", "n2", is_last=True, cause=cause)
    for letter in (Letter(BUSY, "a"), last, other, later, replaced):
        box.put(letter)
    assert box.take() == [other, later, last, replaced]
    assert box.take() == [] and box.left_out() == {"n1": cause}


def test_a_report_beside_a_shard_that_is_labelled_does_not_replace_its_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    context = SimpleNamespace(get_node_id=lambda: "n")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    send, beside = Sender(Post(None, LIMIT_S)), replace(BUSY, work=("s2", ("t",)))
    for report, kept in (
        (BUSY, BUSY),
        (replace(beside, phase=READING), BUSY),
        (replace(beside, phase=COMMITTING), BUSY),
        (beside, beside),
        (WorkerReport(WAITING), WorkerReport(WAITING)),
    ):
        send(report)
        assert send._latest == kept


def test_a_run_ends_if_no_worker_is_at_work_for_the_limit() -> None:
    workers = Workers(LIMIT_S)
    workers.check(1e9)  # machines and models may take hours to come
    workers.note(Letter(replace(BUSY, answered=3), WORKER), 0)
    workers.check(LIMIT_S + GRACE_S - 1)
    text = (
        "no worker is at work; process 7 on a has shown no sign of life for 110 s; it is labelling "
        r"c\.jsonl\. Look at that machine, then run the same command again"
    )
    with pytest.raises(StalledError, match=text):
        workers.check(LIMIT_S + GRACE_S)
    workers.note(Letter(WorkerReport(WAITING), "another"), LIMIT_S)  # it has nothing to do
    with pytest.raises(StalledError):
        workers.check(LIMIT_S + GRACE_S)
    workers.note(Letter(WorkerReport(STARTING_WORKERS), "a third"), LIMIT_S)  # and dies
    with pytest.raises(StalledError):
        workers.check(LIMIT_S + GRACE_S)
    workers.note(Letter(WorkerReport(LOADING), "another"), LIMIT_S)
    workers.check(LIMIT_S + GRACE_S)
    workers.begin()  # the next round
    workers.check(1e9)


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (None, StalledError, "every worker stalls; w17 has shown no sign of life for 100 s; it is"),
        (ModelError("CUDA error"), ModelError, r"every worker fails with: CUDA error\. Finished"),
    ],
)
def test_workers_that_end_are_named_and_replaced_and_the_run_ends_if_all_do(
    cause: ModelError | None,
    kind: type[Exception],
    text: str,
    watched: tuple[Watch, list[Progress]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, _ = watched
    watch._workers, report = Workers(LIMIT_S, workers=6), replace(BUSY, phase=READING)
    for number in range(18):  # one more than the workers and ten
        if number == 1:  # the first does not count
            watch.take_in([Letter(replace(BUSY, answered=3), "w0")], time.monotonic())
        watch.check()
        end = Letter(report, f"w{number}", is_last=True, cause=cause)
        watch.take_in([end], time.monotonic())
    with pytest.raises(kind, match=text):
        watch.check()
    why = "ended: CUDA error" if cause else "has shown no sign of life for 100 s; it is reading c."
    assert len(caplog.messages) == 18
    assert all(f"w{n} {why}" in line for n, line in enumerate(caplog.messages))
    assert all(line.endswith("it is ended, and Ray starts another") for line in caplog.messages)


@pytest.mark.parametrize("phase", [STARTING_WORKERS, LOADING, READING])
def test_outside_of_batches_a_sign_of_life_is_work_and_idle_processes_are_not_blamed(
    phase: str,
) -> None:
    report, rates = WorkerReport(phase), {"idle": (0.01, 2e3), "cpu": (0.2, 0), "bytes": (0, 1e6)}

    def silence(report: WorkerReport, *seconds: str) -> float:
        cpu_s, moved, silence = 0.0, 0.0, Silence(0.0)
        for now_s, rate in enumerate(seconds, 1):
            cpu_s, moved = cpu_s + rates[rate][0], moved + rates[rate][1]
            silent_s = silence.seconds(report, now_s, (cpu_s, moved))
        return silent_s

    assert silence(report, *["idle"] * 700) == 699  # the first is news
    assert silence(report, *["idle"] * 300, "cpu", *["idle"] * 20) == 20
    assert silence(report, *["idle"] * 300, "bytes", *["idle"] * 20) == 20
    assert silence(BUSY, *["cpu"] * 700) == 699  # a GPU that hangs keeps a core busy
    for waits in (WAITING, FETCHING, CONVERTING):  # for work, or for the one that fetches
        assert silence(WorkerReport(waits), *["idle"] * 700) == 0


def test_the_work_of_a_process_is_its_processor_time_and_the_bytes_that_it_moves() -> None:
    before = work_done()
    sum(range(10**6))
    Path(__file__).read_bytes()
    assert all(later > earlier for earlier, later in zip(before[1:], work_done()[1:], strict=True))


def test_documents_that_are_being_read_are_not_counted_as_answered(
    watched: tuple[Watch, list[Progress]],
) -> None:
    watch, announced = watched
    watch.enter(STARTING_WORKERS)
    watch.take_in([Letter(replace(BUSY, phase=READING, answered=3))], 0.0)
    watch.enter(announced[-1].phase)
    assert announced[-1].phase == STARTING_WORKERS and announced[-1].answered == 0


def test_a_worker_reports_its_shard_and_its_batches() -> None:
    sent: list[WorkerReport] = []
    work = WorkItem(toy_shard(rows=10, path="/in/c.jsonl"), ("b", "a"), documents=True)
    shard = LabelProgress(sent.append, work, rows=6)
    for rows, share in ((1, 0.5), (5, 0.5)):
        shard.advance(rows, share)
    assert [each.answered for each in sent] == [0, 1, 6]
    assert [each.work_done for each in sent] == [0, 3, 6]
    assert {each.work for each in sent} == {work_key(work.shard.id, ["a", "b"])}
    assert sent[0].place == "/in/c.jsonl: rows 0 to 10"
    assert [each.batches for each in sent] == [0, 1, 2]


def test_a_node_that_comes_or_goes_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def node(id: str, alive: bool = True, why: str = "") -> dict[str, Any]:
        own = {"NodeID": id, "NodeManagerAddress": f"10.0.0.{id}"}
        return {**own, "Alive": alive, "DeathReasonMessage": why}

    nodes = Nodes()
    with caplog.at_level(logging.INFO):
        nodes.look([node("1"), node("2"), node("3", alive=False)])
        for _ in range(2):
            nodes.look([node("1"), node("2", alive=False, why="health check failed\nmore")])
        for _ in range(2):
            nodes.look([node("1"), node("4"), node("2", alive=False)])
    assert caplog.messages == [
        "node 10.0.0.2 is gone (health check failed); what it had not finished runs on other nodes",
        "node 10.0.0.4 has joined the cluster",
    ]


def test_a_worker_that_stops_to_report_in_the_middle_of_its_work_is_named(
    watched: tuple[Watch, list[Progress]], caplog: pytest.LogCaptureFixture
) -> None:
    watch, _ = watched
    for worker, phase in [("a", LABELLING), ("b", LOADING), ("c", WAITING), ("d", LABELLING)]:
        watch.take_in([Letter(replace(BUSY, phase=phase), worker)], 0.0)
    watch.take_in([Letter(replace(BUSY, work=("s2", ("t",))), "e")], 0.0)
    watch.take_in([Letter(BUSY, "d", is_last=True)], 1.0)
    watch.committed(counts("s2", 4))  # killed once its work was done
    caplog.clear()
    watch.take_in([Letter(BUSY, "a")], QUIET_S - 1)
    for seconds in (QUIET_S, QUIET_S + 1):
        watch.take_in([], seconds)
    (named,) = caplog.messages
    assert named.startswith("b has not reported for 30 s (loading the model c.jsonl): ")
