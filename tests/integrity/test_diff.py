"""What changed between two snapshots, against counts by plain Python over the rows."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from finished import LABELS, Corpus, finish, small_files, toy_fingerprints

from pipeline.errors import SpecError, StorageError
from pipeline.integrity.diff import compare, psi, shares, sides
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.rows import aligned_batches
from pipeline.ledger.snapshots import contents
from pipeline.stores.local import LocalStore

# Tasks that are called like words of SQL, or like other names in its queries.
WORDS = dict.fromkeys(
    ("order", "group", "table", "null", "h", "a", "b", "x", "path_"), ("yes", "no")
)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStore]:
    """Snapshot 1; one file is rewritten, and all tasks but one are asked otherwise; snapshot 2."""
    folder = tmp_path_factory.mktemp("twice")
    store, corpus = LocalStore(folder / "out"), Corpus(folder / "in", folder / "cache")
    corpus.write()
    with pytest.MonkeyPatch.context() as patch:
        for task, labels in WORDS.items():
            patch.setitem(LABELS, task, labels)
        before = toy_fingerprints()
        finish(store, corpus.shards(store), before)
        corpus.write_file(1, seed=5)
        finish(store, corpus.shards(store), {**toy_fingerprints("2"), "toxic": before["toxic"]})
        yield store


def test_the_figures_are_those_counted_by_hand(twice: LocalStore) -> None:
    before, after = (open_labels(twice.url, snapshot=n).to_table().to_pylist() for n in (1, 2))
    compared = compare(twice, contents(twice, 1), contents(twice, 2))
    texts = [{row["content_hash"] for row in rows} for rows in (before, after)]
    both = texts[0] & texts[1]
    counts = len(texts[0] - both), len(both), len(texts[1] - both)
    assert tuple(compared.texts.values()) == counts
    assert compared.rows == {"before": 90, "after": 90}
    assert compared.tasks.keys() == {*LABELS, *WORDS}
    for task, change in compared.tasks.items():
        labels = (LABELS | WORDS)[task]
        for side, rows in ((change.before, before), (change.after, after)):
            counted = Counter(row[task]["label"] for row in rows)
            assert side.labels == {label: counted[label] for label in labels}
            assert side.rows == counted.total() - counted[None]
        label_before = {row["content_hash"]: row[task]["label"] for row in before}
        pairs = Counter(
            (label_before[row["content_hash"]], row[task]["label"])
            for row in after
            if row["content_hash"] in label_before and row[task]["label"] is not None
        )
        moves = {(move.before, move.after): move.texts for move in change.moves}
        assert moves == {(x, y): count for (x, y), count in pairs.items() if x != y}
        flipped = sum(moves.values())
        assert change.flip_rate == pytest.approx(flipped / pairs.total())
        # — the answers of the unchanged task were reused, or are of new texts
        assert (change.flip_rate > 0) == (task != "toxic")


def test_rows_that_newly_fail_are_named(tmp_path: Path) -> None:
    """The seventh text of each file is emptied (no failure), the eighth has no answer any more."""
    store, corpus = LocalStore(tmp_path / "out"), Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    finish(store, corpus.shards(store), toy_fingerprints())
    for file in corpus.folder.glob("*.jsonl"):
        lines = file.read_text().splitlines()
        lines[6] = json.dumps(json.loads(lines[6]) | {"text": " "})
        lines[8] = json.dumps(json.loads(lines[8]) | {"text": None})
        file.write_text("".join(f"{line}\n" for line in lines))
    finish(store, corpus.shards(store), toy_fingerprints())
    for change in compare(store, contents(store, 1), contents(store, 2)).tasks.values():
        assert change.newly_failing == 3
        assert change.failing_ids == ("0-8", "1-8", "2-8")


def test_files_are_read_in_the_callers_thread_and_their_errors_are_one_line(
    finished: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of DuckDB that calls Python while the process ends aborts it."""
    threads = set()

    def read(*args: Any) -> Iterator[pa.RecordBatch]:
        threads.add(threading.get_ident())
        yield from aligned_batches(*args)
        threads.add(threading.get_ident())
        raise StorageError("the last file was changed")

    monkeypatch.setattr("pipeline.ledger.dataset.aligned_batches", read)
    shown = contents(finished, 1)
    with pytest.raises(StorageError, match=r"^the last file was changed$"):
        compare(finished, shown, shown)
    assert threads == {threading.get_ident()}


def test_a_disk_without_space_for_the_tables_is_one_line(finished: LocalStore) -> None:
    shown = contents(finished, 1)
    with small_files(), pytest.raises(StorageError, match=r"compared: .* set TMPDIR") as raised:
        compare(finished, shown, shown)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("number", ["latest", "fp:toxic", "-1", "²", "", "0", "9" * 5_000])
def test_a_side_that_is_not_a_number_is_refused(store: LocalStore, number: str) -> None:
    with pytest.raises(
        SpecError, match=r"^before: write the number of a snapshot; .* has none yet"
    ):
        sides(store, "job", number, number)


def test_without_numbers_the_last_two_snapshots_of_the_spec_are_compared(
    finished: LocalStore, twice: LocalStore
) -> None:
    assert [side.number for side in sides(twice, "job")] == [1, 2]
    assert [side.number for side in sides(twice, "job", "2")] == [2, 2]
    with pytest.raises(SpecError, match=r"a comparison needs two snapshots of job; .* has 1"):
        sides(finished, "job")


def test_for_a_snapshot_that_does_not_exist_those_that_do_are_listed(finished: LocalStore) -> None:
    assert [side.number for side in sides(finished, "job", "1", "01")] == [1, 1]
    with pytest.raises(SpecError) as refused:
        sides(finished, "job", "1", "2")
    assert str(refused.value) == (
        f"after: write the number of a snapshot; {finished.url} has 1 (got '2')"
    )


@pytest.mark.parametrize(
    "before, after",
    [([50, 50], [50, 50]), ([90, 10], [60, 40]), ([5, 0, 5], [0, 9, 1]), ([1, 0], [0, 1000])],
)
def test_psi_is_the_sum_by_hand(before: list[int], after: list[int]) -> None:
    """PSI counts half a row of a label without rows, so that it is finite."""
    p, q = (np.array([count or 0.5 for count in counts]) for counts in (before, after))
    p, q = p / p.sum(), q / q.sum()
    assert psi(np.array(before), np.array(after)) == pytest.approx(((q - p) * np.log(q / p)).sum())


def test_counts_of_zero_give_no_drift() -> None:
    no_counts = np.zeros(2, dtype=np.int64)
    assert psi(no_counts, np.array([1, 2])) == psi(no_counts, no_counts) == 0.0
    assert shares(no_counts).tolist() == [0, 0]
