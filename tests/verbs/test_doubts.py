"""Answers that may be meaningless are named in one line."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from outcomes import toy_outcome
from reports import printed

from pipeline.evaluation.metrics import score
from pipeline.gold.answers import RowCounts
from pipeline.ledger.counts import Counts
from pipeline.report.run import show_run
from pipeline.runtime.outcome import Tally
from pipeline.verbs.check import AnswerFacts
from pipeline.verbs.doubts import LEAST_DOCUMENTS, check_doubts, evaluation_doubts, label_doubts
from pipeline.verbs.evaluate import TaskEvaluation
from pipeline.verbs.run import RunResult


@pytest.mark.parametrize(
    "counts, named",
    [
        ({"clean": 400}, True),
        ({"clean": 399, "toxic": 1}, True),
        ({"clean": 390, "toxic": 10}, False),
        ({"clean": LEAST_DOCUMENTS - 1}, False),
        ({}, False),
    ],
)
def test_one_label_for_nearly_all_documents_is_named(counts: dict[str, int], named: bool) -> None:
    answered = {"other": 400, "toxic": sum(counts.values())}
    lines = list(label_doubts({"other": {"a": 200, "b": 200}, "toxic": counts}, answered))
    assert len(lines) == named
    if named:
        start = f"toxic: {counts['clean']} of 400 documents have the label 'clean'."
        assert lines[0].startswith(start)


def test_a_run_prints_the_doubt_after_its_summary() -> None:
    keys = ("rows", "ok"), ("label", "t", "[b]"), ("answered", "t")
    tally = Tally(n=Counts({**dict.fromkeys(keys, 60), ("label_ms", "1"): 1_000}))
    outcome = toy_outcome(tally, rows=60)
    line = "warning: t: 60 of 60 documents have the label '[b]'."
    result = RunResult.of(outcome)
    assert line in printed(show_run, result)
    assert list(result.warnings) == list(label_doubts(tally.n.labels, tally.n.by("answered")))


def evaluated(p_of_truth: float) -> TaskEvaluation:
    """60 rows, whose p of the gold label is above .5 for this share."""
    source = np.random.default_rng(0)
    truth = np.tile([0, 1], 30)
    right = source.random(60) < p_of_truth
    first = np.where(right == (truth == 0), 0.8, 0.2) + source.uniform(-0.1, 0.1, 60)
    p = np.column_stack([first, 1 - first])
    return TaskEvaluation(
        task="t",
        labels=("a", "b"),
        rows=RowCounts(60, 0, 0, {}, 0, 60),
        gold="people",
        scores=score(truth, p, ("a", "b")),
    )


def test_answers_at_chance_are_named_with_their_interval_and_better_ones_are_not() -> None:
    task = evaluated(0.5)
    auroc = task.auroc
    assert auroc.low is not None and auroc.high is not None
    assert auroc.low < 0.5 < auroc.high and task.at_chance
    [doubt] = evaluation_doubts(task)
    interval = f"{auroc.low:.3f} to {auroc.high:.3f}"
    assert doubt.startswith(f"t: the interval of AUROC, {interval}, includes .5")
    assert not list(evaluation_doubts(evaluated(0.9)))


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({}, "below gold.values, as in {a: b, b: a}"),
        ({"gold": "scores"}, "name the other label below gold.scores: t.LABEL: COLUMN"),
        ({"labels": ("a", "b", "c")}, "below gold.values, as in VALUE: LABEL"),
    ],
)
def test_labels_that_look_swapped_are_named_with_the_key_that_swaps_them(
    changes: dict[str, Any], fix: str
) -> None:
    task = replace(evaluated(0.1), **changes)
    assert task.swapped and not task.at_chance
    [doubt] = evaluation_doubts(task)
    assert "is below .5: labels of the gold look swapped" in doubt and doubt.endswith(fix)


def test_where_nothing_is_judged_the_next_step_is_named() -> None:
    task = replace(evaluated(0.9), scores=None, rows=RowCounts(60, 0, 0, {}, 50, 10))
    [doubt] = evaluation_doubts(task)
    assert "nothing is judged, because 50 gold documents were fitted to" in doubt
    assert "assay fit --hold-out 0.2" in doubt
    [nothing] = evaluation_doubts(replace(task, rows=RowCounts(60, 0, 60, {}, 0, 0)))
    assert "no gold document has an answer" in nothing


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        (AnswerFacts({}, 0.8), []),
        (AnswerFacts({}, None), []),
        (AnswerFacts({}, np.nan), []),
        (AnswerFacts({"a": " s"}, 0.8), ["t: labels are scored by the first letters of"]),
        (AnswerFacts({}, 0.009), ["t: mass is at most 0.009: "]),
        (AnswerFacts({"a": "x"}, 0.0), ["t: labels are", "t: mass is"]),
    ],
)
def test_a_check_names_answers_that_are_unreliable(facts: AnswerFacts, lines: list[str]) -> None:
    answers = {"good": AnswerFacts({}, 0.9), "t": facts}
    findings: Any = SimpleNamespace(answers=answers, repeated_ids=0, ids_read=9)
    doubts = list(check_doubts(findings))
    assert [line[: len(start)] for line, start in zip(doubts, lines, strict=True)] == lines
