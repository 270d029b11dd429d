"""What is kept of a task's answers is that of all labels' probabilities, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.inference.engine import Labelled
from pipeline.inference.schedules.batching import Usage
from pipeline.inference.shard_answers import ShardAnswers, TaskAnswers, level_names
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import TaskSpec

LABELS = ["a/x/1", "a/x/2", "a/y", "b/x", "b/y/1", "c"]


def task(**more: object) -> TaskSpec:
    return QuestionTask.model_validate({"name": "t", "question": "?", "labels": LABELS, **more})


def some(seed: int, pieces: int = 1) -> np.ndarray:
    return np.log(np.random.default_rng(seed).dirichlet(np.ones(6), size=pieces)).astype(np.float32)


@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 50])
@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_are_kept_with_the_sum_of_all(top_k: int, seed: int) -> None:
    kept = TaskAnswers.of(task(top_k=top_k), 3)
    log_probs = some(seed)
    kept.add_rows(np.array([1]), log_probs, np.array([0]), np.array([1]))
    ranked = sorted(range(6), key=lambda label: -log_probs[0, label])[: max(2, top_k)]
    assert kept.labels is not None and kept.labels[1].tolist() == ranked
    np.testing.assert_allclose(np.exp(kept.log_probs[1]), np.exp(log_probs[0])[ranked], rtol=1e-6)
    assert np.exp(kept.log_mass[1]) == pytest.approx(1, abs=1e-5)
    assert np.isnan(kept.log_probs[[0, 2]]).all()


@pytest.mark.parametrize("seed", range(8))
def test_a_level_has_the_probability_of_all_labels_below_it(seed: int) -> None:
    kept = TaskAnswers.of(task(top_k=2, separator="/"), 1)
    log_probs = some(seed)
    kept.add_rows(np.array([0]), log_probs, np.array([0]), np.array([1]))
    p = dict(zip(LABELS, np.exp(log_probs[0]), strict=True))
    names = level_names(max(p, key=lambda label: p[label]), "/")
    expected = [sum(p[x] for x in p if x == n or x.startswith(f"{n}/")) for n in names]
    assert kept.levels is not None
    np.testing.assert_allclose(np.exp(kept.levels[0, : len(names)]), expected, rtol=1e-5)
    assert np.isnan(kept.levels[0, len(names) :]).all()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(np.nan, "the model's answer is not a number"), (-np.inf, "no label has a probability")],
)
def test_a_failed_answer_is_of_its_task_alone_and_a_chunk_not_read_is_of_all(
    bad: float, reason: str
) -> None:
    tasks = [task(top_k=2, separator="/"), task(name="u")]

    class Failing:
        def label(self, documents, *, tasks, on_batch):  # type: ignore[no-untyped-def]
            scores = [np.concatenate([some(row) for row in range(5)]) for _task in tasks]
            scores[1][[0, 2]] = bad  # — of row 0, and of the second chunk of row 1
            return Labelled(tuple(scores), Usage(), frozenset([3]))

    answers = ShardAnswers([[[1]], [[2], [3]], [[4], [5]]], tasks)
    answers.label_rows(Failing())  # type: ignore[arg-type]
    failed = f"error:{reason}"
    memory = "error:out of memory, even alone"
    expected = [["truncated", "ok", memory], [failed, failed, memory]]
    assert [each.status(["truncated", "ok", "ok"]) for each in answers.by_task] == expected
    for own, status in zip(answers.by_task, expected, strict=True):
        has_none = [each.startswith("error:") for each in status]
        assert np.isnan(own.log_probs).all(axis=1).tolist() == has_none
        assert np.isnan(own.log_mass).tolist() == has_none


def test_rows_between_rows_without_chunks_get_their_own_answers() -> None:
    class FifthOfSix:
        def label(self, documents, *, tasks, on_batch):  # type: ignore[no-untyped-def]
            scores = np.concatenate([some(document[0]) for document in documents])
            return Labelled((scores,), Usage(), frozenset([4]))

    chunks = [[], [[1]], [], [[2], [3]], [[4]], [[5]], [[6]], []]
    answers = ShardAnswers(chunks, [task()])
    answers.label_rows(FifthOfSix())  # type: ignore[arg-type]
    [own] = answers.by_task
    memory = "error:out of memory, even alone"
    assert own.status(["ok"] * 8) == [*["ok"] * 5, memory, "ok", "ok"]
    for row, document in ((1, 1), (4, 4), (6, 6)):
        np.testing.assert_array_equal(own.log_probs[row], some(document)[0])
    assert np.isnan(own.log_mass).tolist() == [n not in (1, 3, 4, 6) for n in range(8)]


def test_no_more_answers_are_asked_for_at_once_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.inference.shard_answers.MAX_LOG_PROBS", 6 * 4)
    sizes: list[int] = []

    class Noting:
        def label(self, documents, *, tasks, on_batch):  # type: ignore[no-untyped-def]
            sizes.append(len(documents))
            return Labelled((np.concatenate([some(row) for [row] in documents]),), Usage())

    answers = ShardAnswers([[[row]] * n for row, n in enumerate((2, 0, 2, 3, 9, 1))], [task()])
    answers.label_rows(Noting())  # type: ignore[arg-type]
    assert sizes == [4, 3, 9, 1]  # — more than four only of one row
    [own] = answers.by_task
    for row in (0, 2, 3, 4, 5):
        np.testing.assert_allclose(own.log_probs[row], some(row)[0], rtol=1e-6)


def test_each_row_is_counted_once_when_its_last_chunk_is_read() -> None:
    chunks = [[[row] * 50] * n for row, n in enumerate((1, 0, 3, 2, 0, 1))]
    answers = ShardAnswers(chunks, [task()])
    counted: list[int] = []
    shares: list[float] = []

    class InOddBatches:
        def label(self, documents, *, tasks, on_batch):  # type: ignore[no-untyped-def]
            for batch in ([6, 1], [0], [2, 4], [3, 5]):  # of seven chunks; documents are split
                on_batch(batch)
            return Labelled((np.concatenate([some(i) for i in range(7)]),), Usage())

    def note(rows: int, share: float) -> None:
        counted.append(rows)
        shares.append(share)

    answers.label_rows(InOddBatches(), note)  # type: ignore[arg-type]
    # — chunks 1 to 3 are those of row 2, and 4 and 5 of row 3
    assert counted == [1, 1, 0, 2]
    assert sum(counted) == answers.asked_rows == 4
    assert shares == pytest.approx([2 / 7, 1 / 7, 2 / 7, 2 / 7])


def test_rows_with_equal_texts_are_read_once_and_have_one_answer() -> None:
    chunks = [[[1, 2]], [], [[1], [2]], [[1, 2]], [[1], [2]], [[3]], [[1, 2]]]
    # — a row without chunks is not read, and has no answer for its equals
    answers = ShardAnswers(
        chunks, [task(top_k=2, separator="/")], ["a", "c", "b", "a", "b", "c", "a"]
    )
    read: list[list[int]] = []

    class Noting:
        def label(self, documents, *, tasks, on_batch):  # type: ignore[no-untyped-def]
            read.extend(documents)
            scores = [some(sum(each)) * (np.nan if each == [2] else 1) for each in documents]
            return Labelled((np.concatenate(scores),), Usage())

    answers.label_rows(Noting())  # type: ignore[arg-type]
    assert sorted(read) == [[1], [1, 2], [2], [3]] and answers.asked_rows == 3
    (own,) = answers.by_task
    for values in (own.log_probs, own.log_mass, own.labels, own.levels):
        assert values is not None
        for row, first in ((3, 0), (6, 0), (4, 2)):
            np.testing.assert_array_equal(values[row], values[first])
    assert np.isnan(own.log_mass).tolist() == [False, True, True, False, True, False, False]
    failed = "error:the model's answer is not a number"
    assert own.status(["ok"] * 7) == ["ok", "ok", failed, "ok", failed, "ok", "ok"]
