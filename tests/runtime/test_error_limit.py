"""The limit on failed rows: what it counts, and that no snapshot is above it."""

from __future__ import annotations

import logging
import re
import time
from types import SimpleNamespace

import pytest
from changing_corpus import TOPIC, Corpus, numbered

from pipeline.errors import FailedRowsError
from pipeline.ledger.snapshots import snapshot_numbers
from pipeline.stores.local import LocalStore
from pipeline.verbs.status import TaskStatus, status

ROWS, FAILED = 20, 4  # the failed ones are in the first of two files
QUESTIONS = ("first", "topic")


@pytest.fixture
def failing(plain: Corpus) -> Corpus:
    """A corpus of two files and two tasks, to which some rows have no answer."""
    plain.others, plain.shard_bytes = [TOPIC], 100_000
    for name in "ab":
        plain.write(name, [f"Text {row} of {name}." for row in range(ROWS)])
    texts = plain.files["a"][:FAILED]
    plain.broken |= {(question, text) for question in QUESTIONS for text in texts}
    return plain


def limit(corpus: Corpus, share: float) -> None:
    corpus.settings = {"max_error_rate": share}


def break_off() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def labels_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the label files that were read."""
    keys, read = list[str](), LocalStore.read

    def read_counted(store: LocalStore, key: str) -> bytes:
        keys.extend([key] * key.startswith("labels/"))
        return read(store, key)

    monkeypatch.setattr(LocalStore, "read", read_counted)
    return keys


def test_label_files_that_a_snapshot_or_a_log_counts_are_not_read_again(
    failing: Corpus, labels_read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        failing.write(f"c{number}", numbered(f"c{number}", 1))
    rows = 2 * ROWS + 30
    limit(failing, 0.3)
    # — of 32 shards, 10 are in the snapshot and 10 in the log; the counts of 2 died with a driver
    for shards, publish_partial in ((10, True), (10, False), (2, False)):
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            if shards == 2:
                patch.setattr("pipeline.ledger.counts_log.log_counts", lambda *_: None)
            failing.run_until(
                2 * shards + 1, break_off, folder="labels/", publish_partial=publish_partial
            )
    assert labels_read == [] and snapshot_numbers(failing.store) == [1]
    limit(failing, FAILED / rows)
    outcome = failing.run()
    assert outcome.complete and outcome.snapshot == 2
    assert len(labels_read) == len(set(labels_read)) == 2 * 2
    labels_read.clear()
    limit(failing, 0.99 * FAILED / rows)
    with pytest.raises(FailedRowsError, match=f"4 of {rows} rows failed"):
        failing.run()
    counted = status(failing.spec, cache_dir=failing.cache)
    tasks = ("toxic", "topic")
    assert counted.tasks == dict.fromkeys(tasks, TaskStatus(rows - FAILED, 0, FAILED))
    assert counted.snapshot == 2 and labels_read == []
    (work,) = failing.plan(retry_failed=True).work_items
    assert work.shard.path.endswith("/a.jsonl") and work.tasks == tasks and labels_read == []


def test_a_row_that_failed_in_two_works_of_its_shard_counts_once(failing: Corpus) -> None:
    failing.others = []
    failing.run()
    failing.others = [TOPIC]
    limit(failing, FAILED / (2 * ROWS))
    outcome = failing.run(retry_failed=True)
    assert outcome.complete and outcome.snapshot == 2
    limit(failing, 0.99 * FAILED / (2 * ROWS))
    with pytest.raises(FailedRowsError, match="4 of 40 rows failed"):
        failing.run()


def test_a_run_that_its_limit_ends_publishes_no_part_and_unreadable_rows_count(
    failing: Corpus,
) -> None:
    lines = (failing.input / "b.jsonl").read_text().splitlines()
    lines[3] = '{"id": "broken'
    (failing.input / "b.jsonl").write_text("\n".join(lines))
    limit(failing, 0.12)
    with pytest.raises(FailedRowsError, match=r"5 of 40 rows failed.*error:not JSON 1"):
        failing.run(publish_partial=True)
    assert not [*failing.store.list("snapshots/")]
    limit(failing, 0.125)
    outcome = failing.run(retry_failed=True)  # — what cannot be read stays so
    assert outcome.snapshot == 1 and {text for _, text in failing.asked} == {
        *failing.files["a"][:FAILED]
    }


@pytest.mark.parametrize(("share", "published"), [(0.19, 0), (0.2, 1)])
def test_what_breaks_off_publishes_a_part_within_the_limit_alone(
    share: float, published: int, failing: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    limit(failing, share)
    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.WARNING):
        failing.run_until(3, break_off, folder="labels/", publish_partial=True)
    assert len(snapshot_numbers(failing.store)) == published
    line = "no partial snapshot is published: 4 of 20 rows failed"
    assert (line in caplog.text) == (not published)


@pytest.mark.parametrize("done_before", [True, False])
def test_what_ends_before_the_last_shard_publishes_a_part_within_the_limit_alone(
    done_before: bool, failing: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # — the time is over when a question was asked
    clock = SimpleNamespace(time=lambda: time.time() + 7_200 * bool(failing.asked))
    monkeypatch.setattr("pipeline.runtime.job.time", clock)
    if done_before:
        assert failing.run(max_hours=1).snapshot is None
    limit(failing, 0.19)
    with pytest.raises(FailedRowsError, match="4 of 20 rows failed"):
        failing.run(max_hours=1e-9 if done_before else 1, publish_partial=True)
    assert not [*failing.store.list("snapshots/")]
    limit(failing, 0.2)
    assert failing.run(max_hours=1e-9, publish_partial=True).snapshot == 1


def test_under_a_condition_the_limit_counts_the_accepted_rows_while_it_runs(plain: Corpus) -> None:
    """The condition accepts two rows of twenty, and all of these fail."""
    plain.shard_bytes = 100_000
    for number in range(12):
        texts = numbered(f"f{number:02d}", ROWS)
        plain.write(f"f{number:02d}", texts, kind=[*"xx", *"y" * (ROWS - 2)])
        plain.broken |= {(QUESTIONS[0], text) for text in texts[:2]}
    limit(plain, 0.5)
    with pytest.raises(FailedRowsError) as raised:
        plain.run(where="kind = 'x'", sample="99%")
    failed, rows = map(
        int, re.findall(r"^(\d+) of at most (\d+) rows failed", str(raised.value))[0]
    )
    assert failed > 0.5 * rows
    assert failed < 2 * 12 and rows < ROWS * 12  # neither at the end, nor of the whole input


def test_as_many_failed_rows_as_the_limit_allows_are_within_it(plain: Corpus) -> None:
    texts = numbered("a", 100)
    plain.write("a", texts)
    plain.broken |= {(QUESTIONS[0], text) for text in texts[:29]}
    limit(plain, 0.29)  # — as a float, 0.29 * 100 is below 29
    assert plain.run().snapshot == 1
    limit(plain, 0.28)
    with pytest.raises(FailedRowsError, match="29 of 100 rows failed"):
        plain.run()
