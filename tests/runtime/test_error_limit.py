"""The limit on failed rows: what it counts, and that no snapshot is above it; labels are toys."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from finished import documents_of, label_file

from pipeline.errors import FailedRowsError, UnavailableError
from pipeline.ledger.blocks import LabelCost, ShardCounts
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.label_files import commit_shard
from pipeline.options import RunOptions
from pipeline.runtime.dry_run import dry_run
from pipeline.runtime.job import Job
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.run import run
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore
from pipeline.stores.store import open_store
from pipeline.verbs.status import TaskStatus, status

ROWS, FAILED = 20, 4  # the failed ones are in the first of two files

Run = Callable[..., Outcome]


@dataclass
class ToyGraph:
    """Commits toy answers for so many work items, counts them by task, then breaks off or ends."""

    work_items: int
    error: Exception | None = None

    def __call__(
        self, work_items: Sequence[WorkItem], job: Job, _mailbox: None = None
    ) -> Iterator[ShardCounts]:
        store = open_store(job.spec.output, {})
        for work in work_items[: self.work_items]:
            documents = documents_of(work.shard)
            status = Counter(documents.column("status").to_pylist())
            files = [label_file(work.shard, t, job.fingerprints[t]) for t in work.tasks]
            commit_shard(store, work.shard, documents, files)
            for task in work.tasks:  # as if each were a work of its own
                labels = {task: Counter[str]()}
                yield ShardCounts(
                    work.shard.id, work.shard.rows, status, labels, {"0": LabelCost()}
                )
        self.work_items = 0
        if self.error is not None:
            raise self.error


@pytest.fixture
def run_toy(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs a spec with a limit, with a toy in the place of Ray and the model."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, failed in (("a", FAILED), ("b", 0)):
        texts = [None if row < failed else f"Text {row} of {name}." for row in range(ROWS)]
        lines = (json.dumps({"id": f"{name}{i}", "text": text}) for i, text in enumerate(texts))
        (corpus / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("pipeline.runtime.run.local_ray", lambda _placement: nullcontext())

    def run_it(graph: ToyGraph, limit: float | None, *, publish_partial: bool = True) -> Outcome:
        monkeypatch.setattr("pipeline.runtime.graph.label_items", graph)
        file = write_spec(input={"path": str(corpus), "id": "id"}, max_error_rate=limit)
        options = RunOptions(publish_partial=publish_partial)
        return run(load_spec(file), cache_dir=tmp_path / "cache", options=options)

    return run_it


@pytest.fixture
def labels_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the label files that were read."""
    keys, read = list[str](), LocalStore.read

    def read_counted(store: LocalStore, key: str) -> bytes:
        keys.extend([key] * key.startswith("labels/"))
        return read(store, key)

    monkeypatch.setattr(LocalStore, "read", read_counted)
    return keys


def test_label_files_that_a_snapshot_counts_are_not_read_again(
    run_toy: Run, labels_read: list[str], tmp_path: Path
) -> None:
    for number in range(28):
        text = json.dumps({"id": f"c{number}", "text": f"One of {number}."})
        (tmp_path / "corpus" / f"c{number}.jsonl").write_text(text)
    rows, tasks = 2 * ROWS + 28, ("toxic", "topic")
    # — in the snapshot are 10 of 30 shards; the counts of the others are in their files alone
    with pytest.raises(UnavailableError):
        run_toy(ToyGraph(10, UnavailableError("the store is gone")), 0.3)
    assert len(labels_read) == 2 * 10
    labels_read.clear()
    outcome = run_toy(ToyGraph(20), FAILED / rows)
    assert outcome.complete and outcome.snapshot == 2 and len(labels_read) == 2 * 20
    labels_read.clear()
    with pytest.raises(FailedRowsError, match=f"4 of {rows} rows failed"):
        run_toy(ToyGraph(0), 0.99 * FAILED / rows)
    spec = outcome.job.spec
    found = status(spec, cache_dir=tmp_path / "cache")
    assert found.tasks == dict.fromkeys(tasks, TaskStatus(rows - FAILED, 0, FAILED))
    assert found.snapshot == 2 and labels_read == []
    dry_run(spec, RunOptions(retry_failed=True), cache_dir=tmp_path / "cache")
    failed = next(shard.id for shard in outcome.plan.shards if shard.path.endswith("/a.jsonl"))
    assert sorted(labels_read) == sorted(outcome.plan.done.label_key(t, failed) for t in tasks)


@pytest.fixture
def snapshots(tmp_path: Path) -> Callable[[], list[Path]]:
    return lambda: list((tmp_path / "out").glob("snapshots/*"))


def test_a_row_that_failed_in_two_works_of_its_shard_counts_once(run_toy: Run) -> None:
    outcome = run_toy(ToyGraph(2), FAILED / (2 * ROWS))
    assert outcome.complete and outcome.snapshot == 1


def test_a_run_that_its_limit_ends_publishes_no_part(
    run_toy: Run, snapshots: Callable[[], list[Path]]
) -> None:
    with pytest.raises(FailedRowsError, match="4 of 40 rows failed"):
        run_toy(ToyGraph(2), 0.09)
    assert not snapshots()


@pytest.mark.parametrize(("limit", "published"), [(0.19, 0), (0.2, 1)])
def test_what_breaks_off_publishes_a_part_within_the_limit_alone(
    limit: float,
    published: int,
    run_toy: Run,
    snapshots: Callable[[], list[Path]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(UnavailableError, match="the store is gone"):
        run_toy(ToyGraph(1, UnavailableError("the store is gone")), limit)
    assert len(snapshots()) == published
    line = "no partial snapshot is published: 4 of 20 rows failed"
    assert (line in caplog.text) == (not published)


@pytest.mark.parametrize("done_before", [True, False])
def test_what_ends_before_the_last_shard_publishes_a_part_within_the_limit_alone(
    done_before: bool, run_toy: Run, snapshots: Callable[[], list[Path]]
) -> None:
    if done_before:
        assert run_toy(ToyGraph(1), None, publish_partial=False).snapshot is None
    with pytest.raises(FailedRowsError, match="4 of 20 rows failed"):
        run_toy(ToyGraph(0 if done_before else 1), 0.19)
    assert not snapshots()
    assert run_toy(ToyGraph(0), 0.2).snapshot == 1
