"""Gates: what is read, what passes, and one line for what is malformed."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.errors import SpecError
from pipeline.evaluation.gates import decide, parse_gate
from pipeline.evaluation.metrics import score
from pipeline.spec.stages import QuestionTask

LABELS = ("toxic", "not so.bad >= 1")
TASKS = {
    "toxic": QuestionTask(name="toxic", question="Toxic?", labels=list(LABELS)),
    "topic": QuestionTask(name="topic", kind="multi", question="{label}?", labels=["law", "tax"]),
    "quality": QuestionTask(name="quality", kind="score", question="?", labels=["0", "1", "2"]),
}
TRUTH = np.array([0, 0, 0, 1])
FIRST = np.array([0.9, 0.8, 0.4, 0.3])
SCORES = score(TRUTH, np.stack([FIRST, 1 - FIRST], axis=1), LABELS, resamples=10)


@pytest.mark.parametrize(
    ("written", "value", "passed"),
    [
        ("toxic.accuracy >= 0.75", 0.75, True),
        ("toxic.accuracy>0.75", 0.75, False),
        ("  toxic.accuracy <= .75 ", 0.75, True),
        ("toxic.accuracy < 1", 0.75, True),
        ("toxic.recall.toxic >= 0.7", 2 / 3, False),
        ("toxic.precision.toxic >= 1", 1.0, True),
        ("toxic.precision.not so.bad >= 1 >= 0.5", 0.5, True),
        ("toxic.f1.toxic >= 0.8", 0.8, True),
        ("toxic.f1 > 0.73", (0.8 + 2 / 3) / 2, True),
        ("toxic.auroc >= 1", 1.0, True),
        ("toxic.brier <= 0.1", None, False),
    ],
)
def test_a_gate_compares_the_metric_that_it_names(
    written: str, value: float | None, passed: bool
) -> None:
    decision = decide(parse_gate(written, TASKS), SCORES.headlines, SCORES.labels)
    assert decision.passed is passed and decision.gate == written.strip()
    if value is not None:
        assert decision.value == pytest.approx(value)


def test_an_undefined_metric_passes_no_gate() -> None:
    scores = score(TRUTH * 0, np.full((4, 2), 0.5), LABELS, resamples=0)
    for sign in (">=", "<="):
        decision = decide(
            parse_gate(f"toxic.auroc {sign} 0.5", TASKS), scores.headlines, scores.labels
        )
        assert decision.value is None and not decision.passed


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("toxic.f1 = 0.8", "write TASK.METRIC >= NUMBER"),
        ("toxic.f1 >= high", "write TASK.METRIC >= NUMBER"),
        ("toxic.f1 >= nan", "write TASK.METRIC >= NUMBER"),
        ("toxic.brier <= inf", "write TASK.METRIC >= NUMBER"),
        pytest.param(f"toxic.brier <= {'9' * 400}", "write TASK.METRIC >= NUMBER", id="too large"),
        ("f1 >= 0.8", "write TASK.METRIC >= NUMBER"),
        ("rude.f1 >= 0.8", "no such task; the spec has toxic, topic, quality"),
        ("toxic.f2 >= 0.8", "no such metric"),
        ("toxic.ece <= 0.1", "no such metric; known are accuracy, f1, auroc, ap, brier"),
        ("toxic.qwk >= 0.8", "no such metric"),
        ("topic.accuracy >= 0.8", "is a metric of one label; write topic.accuracy.law"),
        (
            "topic.macro_f1.law >= 0.8",
            "macro_f1 is a metric of the whole task; write topic.macro_f1",
        ),
        ("topic.qwk >= 0.8", "no such metric; known are macro_f1, macro_auroc, precision.LABEL"),
        ("topic.auroc.art >= 0.8", "no such label; topic has law, tax"),
        ("toxic.precision >= 0.8", "is a metric of one label; write toxic.precision.toxic"),
        ("toxic.brier.toxic <= 0.1", "brier is a metric of the whole task"),
        ("toxic.f1.rude >= 0.8", "no such label"),
    ],
)
def test_a_malformed_gate_is_one_line(written: str, says: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_gate(written, TASKS)
    assert str(raised.value).startswith(f"publish.gates: {says}") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("written", "task", "metric", "label"),
    [
        ("topic.macro_f1 >= .9", "topic", "macro_f1", None),
        ("topic.auroc.law >= .9", "topic.law", "auroc", "yes"),
        ("topic.brier.tax <= .1", "topic.tax", "brier", None),
        ("quality.qwk >= .6", "quality", "qwk", None),
        ("quality.recall.2 >= .6", "quality", "recall", "2"),
    ],
)
def test_a_gate_of_a_label_that_applies_or_not_is_one_of_its_part(
    written: str, task: str, metric: str, label: str | None
) -> None:
    gate = parse_gate(written, TASKS)
    assert (gate.task, gate.metric, gate.label) == (task, metric, label)
