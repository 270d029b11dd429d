"""What changed between two snapshots, against counts by plain Python over the rows."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished import LABELS, Corpus, finish
from scipy.spatial.distance import jensenshannon

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.integrity.diff import compare, flip_rate, jensen_shannon, psi, shares, sides
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.snapshots import contents
from pipeline.spec.fingerprint import Fingerprint
from pipeline.stores.local import LocalStore


def fingerprints(version: str = "1") -> dict[str, Fingerprint]:
    return {
        task: Fingerprint({"task": {"labels": [[label, []] for label in labels]}, "v": version})
        for task, labels in LABELS.items()
    }


@pytest.fixture
def twice(tmp_path: Path) -> LocalStore:
    """Snapshot 1; one file rewritten and one task asked otherwise; snapshot 2."""
    store = LocalStore(tmp_path / "out")
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    finish(store, corpus.shards(store), fingerprints())
    corpus.write_file(1, seed=5)
    changed = {**fingerprints(), "topic": fingerprints("2")["topic"]}
    finish(store, corpus.shards(store), changed)
    return store


def rows_of(store: LocalStore, snapshot: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (
        open_labels(str(store.root), snapshot=snapshot).to_table().to_pylist()
    )
    return rows


def test_the_figures_are_those_counted_by_hand(twice: LocalStore) -> None:
    before, after = rows_of(twice, 1), rows_of(twice, 2)
    compared = compare(twice, contents(twice, 1), contents(twice, 2))
    texts = [{row["content_hash"] for row in rows} for rows in (before, after)]
    both = texts[0] & texts[1]
    assert compared.documents == (len(texts[0] - both), len(both), len(texts[1] - both))
    assert compared.rows == (90, 90)
    for change in compared.tasks:
        task, labels = change.task, LABELS[change.task]
        for counts, rows in ((change.before, before), (change.after, after)):
            counted = Counter(row[task]["label"] for row in rows)
            assert counts.tolist() == [counted[label] for label in labels]
        told = {row["content_hash"]: row[task]["label"] for row in before}
        went = Counter(
            (told[row["content_hash"]], row[task]["label"])
            for row in after
            if row["content_hash"] in told and row[task]["label"] is not None
        )
        assert change.flips.tolist() == [[went[x, y] for y in labels] for x in labels]
        flipped = sum(count for (x, y), count in went.items() if x != y)
        assert change.flip_rate == pytest.approx(flipped / went.total())
    flipped_tasks = {change.task for change in compared.tasks if change.flip_rate}
    assert flipped_tasks == {"topic"}  # the other's answers were taken over, or are of new texts


def test_a_snapshot_against_itself_has_not_changed(twice: LocalStore) -> None:
    compared = compare(twice, contents(twice, 2), contents(twice, 2))
    assert compared.documents[::2] == (0, 0)
    for change in compared.tasks:
        assert change.psi == change.jensen_shannon == change.flip_rate == 0
        assert change.newly_failing == 0


def test_rows_that_newly_fail_are_named(tmp_path: Path) -> None:
    """The seventh text of each file is emptied (no failure), the eighth has no answer any more."""
    store = LocalStore(tmp_path / "out")
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    finish(store, corpus.shards(store), fingerprints())
    for file in corpus.folder.glob("*.jsonl"):
        lines = file.read_text().splitlines()
        lines[6] = json.dumps(json.loads(lines[6]) | {"text": " "})
        lines[8] = json.dumps(json.loads(lines[8]) | {"text": None})
        file.write_text("".join(f"{line}\n" for line in lines))
    finish(store, corpus.shards(store), fingerprints())
    for change in compare(store, contents(store, 1), contents(store, 2)).tasks:
        assert change.newly_failing == 3
        assert change.failing_ids == ("0-8", "1-8", "2-8")


@pytest.mark.parametrize("task", ["order", "group", "table", "null", "h", "a", "b", "x", "path_"])
def test_a_task_may_be_called_like_a_word_of_sql(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LABELS, task, ("yes", "no"))
    store = LocalStore(tmp_path / "out")
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    for version in "12":
        finish(store, corpus.shards(store), {task: Fingerprint({"version": version})})
        file = corpus.folder / "0.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text(
            "".join(f"{json.dumps(row)}\n" for row in [{**lines[0], "text": 1}, *lines[1:]])
        )
    before, after = (
        {row["content_hash"]: row[task]["label"] for row in rows_of(store, n)} for n in (1, 2)
    )
    went = Counter((x, after[text]) for text, x in before.items() if x and after.get(text))
    (change,) = compare(store, contents(store, 1), contents(store, 2)).tasks
    assert change.flips.tolist() == [[went[x, y] for y in ("yes", "no")] for x in ("yes", "no")]
    counted = Counter(row[task]["label"] for row in rows_of(store, 2))
    assert change.after.tolist() == [counted["yes"], counted["no"]]
    assert change.flip_rate > 0 and change.failing_ids == ("0-0",)


@pytest.mark.parametrize("number", ["latest", "fp:toxic", "-1", "²", ""])
def test_a_side_that_is_not_a_number_is_refused(store: LocalStore, number: str) -> None:
    with pytest.raises(
        SpecError, match=r"^before: write the number of a snapshot; .* has none yet"
    ):
        sides(store, number, number)


def test_for_a_snapshot_that_does_not_exist_those_that_do_are_listed(finished: LocalStore) -> None:
    assert [side.number for side in sides(finished, "1", "01")] == [1, 1]
    with pytest.raises(SpecError) as refused:
        sides(finished, "1", "2")
    assert str(refused.value) == (
        f"after: write the number of a snapshot; {finished.url} has 1 (got '2')"
    )


def test_groups_of_earlier_versions_are_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["diff", "spec.yaml", "1", "2", "--by", "path"]) == 2
    line = "--by: no such option; join the rows of open_labels(snapshot=A) and (snapshot=B)"
    assert capsys.readouterr().err.startswith(line)


CASES = [([50, 50], [50, 50]), ([90, 10], [60, 40]), ([5, 0, 5], [0, 9, 1]), ([1, 0], [0, 1000])]


@pytest.mark.parametrize("before, after", CASES)
def test_the_divergence_is_scipys_distance_squared(before: list[int], after: list[int]) -> None:
    divergence = jensen_shannon(np.array(before), np.array(after))
    assert divergence == pytest.approx(jensenshannon(before, after, base=2) ** 2, abs=1e-12)


def test_nearly_equal_shares_have_a_divergence_of_nearly_zero() -> None:
    """scipy's own distance is NaN for about half of such pairs."""
    source = np.random.default_rng(0)
    for _ in range(200):
        before = source.integers(10**8, 10**9, 5)
        assert 0 <= jensen_shannon(before, before + source.integers(0, 3, 5)) < 1e-12


def test_psi_is_the_sum_by_hand() -> None:
    by_hand = (0.6 - 0.9) * math.log(0.6 / 0.9) + (0.4 - 0.1) * math.log(0.4 / 0.1)
    assert psi(np.array([90, 10]), np.array([6, 4])) == pytest.approx(by_hand)
    assert psi(np.array([6, 4]), np.array([90, 10])) == pytest.approx(by_hand)


def test_psi_is_finite_if_one_side_has_no_row_of_a_label() -> None:
    p, q = np.array([10, 0.5]) / 10.5, np.array([5, 5]) / 10
    by_hand = ((q - p) * np.log(q / p)).sum()
    assert psi(np.array([10, 0]), np.array([5, 5])) == pytest.approx(by_hand)


def test_the_flip_rate_is_the_share_off_the_diagonal() -> None:
    assert flip_rate(np.array([[5, 1], [2, 12]])) == pytest.approx(3 / 20)


def test_counts_of_zero_give_no_drift() -> None:
    nothing = np.zeros(2, dtype=np.int64)
    assert psi(nothing, np.array([1, 2])) == jensen_shannon(nothing, nothing) == 0.0
    assert flip_rate(np.zeros((2, 2), dtype=np.int64)) == 0.0
    assert shares(nothing).tolist() == [0, 0]
