"""Gates: what is read, what passes, and one line for what is malformed."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.errors import SpecError
from pipeline.evaluation.gates import decide, parse_gate
from pipeline.evaluation.metrics import score

LABELS = {"toxic": ("toxic", "not so.bad >= 1")}
TRUTH = np.array([0, 0, 0, 1])
FIRST = np.array([0.9, 0.8, 0.4, 0.3])
SCORES = score(TRUTH, np.stack([FIRST, 1 - FIRST], axis=1), LABELS["toxic"], resamples=10)


@pytest.mark.parametrize(
    ("written", "value", "passed"),
    [
        ("toxic.accuracy >= 0.75", 0.75, True),
        ("toxic.accuracy>0.75", 0.75, False),
        ("  toxic.raw.accuracy <= .75 ", 0.75, True),
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
    decision = decide(parse_gate(written, LABELS), SCORES)
    assert decision.passed is passed and decision.gate == written.strip()
    if value is not None:
        assert decision.value == pytest.approx(value)


def test_an_undefined_metric_passes_no_gate() -> None:
    scores = score(TRUTH * 0, np.full((4, 2), 0.5), LABELS["toxic"], resamples=0)
    for sign in (">=", "<="):
        decision = decide(parse_gate(f"toxic.auroc {sign} 0.5", LABELS), scores)
        assert decision.value is None and not decision.passed


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("toxic.f1 = 0.8", "write TASK.METRIC >= NUMBER"),
        ("toxic.f1 >= high", "write TASK.METRIC >= NUMBER"),
        ("toxic.f1 >= nan", "write TASK.METRIC >= NUMBER"),
        ("f1 >= 0.8", "write TASK.METRIC >= NUMBER"),
        ("rude.f1 >= 0.8", "no such task; the spec has toxic"),
        ("toxic.f2 >= 0.8", "no such metric"),
        ("toxic.precision >= 0.8", "is a metric of one label; write toxic.precision.toxic"),
        ("toxic.ece.toxic <= 0.1", "ece is a metric of the whole task"),
        ("toxic.f1.rude >= 0.8", "no such label"),
    ],
)
def test_a_malformed_gate_is_one_line(written: str, says: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_gate(written, LABELS)
    assert str(raised.value).startswith(f"gates: {says}") and "\n" not in str(raised.value)
