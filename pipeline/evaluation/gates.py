"""Gates: bounds that metrics must reach, such as `toxic.f1 >= 0.8`."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import Option, Problem, SpecError
from pipeline.evaluation.metrics import HEADLINES, LABEL_METRICS, Scores

PLACE = Option("gates")
RAW, CALIBRATED = "raw", "calibrated"
_COMPARED = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_GATE = re.compile(
    r"\s*(?P<task>[a-z][a-z0-9_]*)\.(?:(?P<version>raw|calibrated)\.)?(?P<metric>[a-z0-9]+)"
    r"(?:\.(?P<label>.+?))?\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>\d+(?:\.\d*)?|\.\d+)\s*",
    re.DOTALL,
)
_FORM = "write TASK.METRIC >= NUMBER, as in 'toxic.f1 >= 0.8' or 'toxic.recall.toxic >= 0.9'"


@dataclass(frozen=True, slots=True)
class Gate:
    """A bound for one metric."""

    written: str
    task: str
    version: str  # RAW | CALIBRATED
    metric: str
    label: str | None  # None: a metric of the whole task
    sign: str
    bound: float

    def admits(self, value: float) -> bool:
        """Whether the value is within the bound."""
        return bool(_COMPARED[self.sign](value, self.bound))


@dataclass(frozen=True, slots=True)
class Decision:
    """A gate, the metric's value, and whether it passes; an undefined metric (None) never does."""

    gate: str
    value: float | None
    passed: bool


def parse_gate(written: str, labels: Mapping[str, Sequence[str]]) -> Gate:
    """The gate; `labels` has the labels of every task. SpecError if the gate is malformed."""
    match = _GATE.fullmatch(written)
    if match is None:
        raise _wrong(_FORM, written)
    task, metric, label = match["task"], match["metric"], match["label"]
    if task not in labels:
        raise _wrong(f"no such task; the spec has {', '.join(labels)}", written)
    if metric not in HEADLINES and metric not in LABEL_METRICS:
        known = ", ".join((*HEADLINES, *(f"{name}.LABEL" for name in LABEL_METRICS)))
        raise _wrong(f"no such metric; known are {known}", written)
    if label is None and metric not in HEADLINES:
        raise _wrong(f"is a metric of one label; write {task}.{metric}.{labels[task][0]}", written)
    if label is not None and metric not in LABEL_METRICS:
        raise _wrong(f"{metric} is a metric of the whole task; write {task}.{metric}", written)
    if label is not None and label not in labels[task]:
        raise _wrong(f"no such label; {task} has {', '.join(labels[task])}", written)
    version = match["version"] or RAW
    return Gate(written.strip(), task, version, metric, label, match["sign"], float(match["bound"]))


def decide(gate: Gate, scores: Scores) -> Decision:
    """Whether the metric passes the gate."""
    if gate.label is None:
        value = scores.headlines[gate.metric].value
    else:
        of_label = next(metrics for metrics in scores.labels if metrics.label == gate.label)
        value = getattr(of_label, gate.metric)
    passed = value is not None and gate.admits(value)
    return Decision(gate.written, value, passed)


def _wrong(fix: str, written: str) -> SpecError:
    return SpecError([Problem(PLACE, fix, written)])
