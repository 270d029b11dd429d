"""Gates: bounds that metrics must reach, such as `toxic.f1 >= 0.8`."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import HEADLINES, LABEL_METRICS, MULTI_HEADLINES, LabelScore
from pipeline.evaluation.ordinal import ORDINAL_HEADLINES
from pipeline.spec.labels import YES
from pipeline.spec.tasks import TaskSpec

_COMPARED = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_GATE = re.compile(
    r"\s*(?P<task>[a-z][a-z0-9_]*)\.(?P<metric>[a-z0-9_]+)"
    r"(?:\.(?P<label>.+?))?\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>\d+(?:\.\d*)?|\.\d+)\s*",
    re.DOTALL,
)
_FORM = "write TASK.METRIC >= NUMBER, as in 'toxic.f1 >= 0.8' or 'toxic.recall.toxic >= 0.9'"


@dataclass(frozen=True, slots=True)
class Gate:
    """A bound for one metric."""

    written: str
    task: str
    metric: str
    label: str | None  # None: a metric of the whole task
    sign: str
    bound: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A gate, the metric's value, and whether it passes; an undefined metric (None) fails."""

    gate: str
    value: float | None
    passed: bool
    not_judged: str | None = None  # why the gold has no value for it

    @property
    def words(self) -> str:
        """Whether the gate passes, and the value, or why there is none."""
        value = "undefined" if self.value is None else f"{self.value:.4f}"
        reason = f"not judged: {self.not_judged}" if self.not_judged else f"it is {value}"
        return f"{'passed' if self.passed else 'FAILED'}: {self.gate} ({reason})"


def parse_gate(written: str, tasks: Mapping[str, TaskSpec], place: str = "publish.gates") -> Gate:
    """The gate, for one of the spec's tasks; SpecError if it is malformed.

    For a label of a task of kind `multi` it is a gate of the label's part, `TASK.LABEL`.
    """

    def wrong(fix: str) -> SpecError:
        return SpecError([Problem(place, fix, written)])

    match = _GATE.fullmatch(written)
    if match is None or isinf(float(match["bound"])):
        raise wrong(_FORM)
    name, metric, label = match["task"], match["metric"], match["label"]
    if name not in tasks:
        raise wrong(f"no such task; the spec has {', '.join(tasks)}")
    task = tasks[name]
    of_task, of_label = _metrics_of(task)
    if metric not in of_task and metric not in of_label:
        known = ", ".join((*of_task, *(f"{metric}.LABEL" for metric in of_label)))
        raise wrong(f"no such metric; known are {known}")
    if label is None and metric not in of_task:
        first = next(iter(task.labels))
        raise wrong(f"is a metric of one label; write {name}.{metric}.{first}")
    if label is not None and metric not in of_label:
        raise wrong(f"{metric} is a metric of the whole task; write {name}.{metric}")
    if label is not None and label not in task.labels:
        raise wrong(f"no such label; {name} has {', '.join(task.labels)}")
    if task.kind == "multi" and label is not None:
        name, label = f"{name}.{label}", YES if metric in LABEL_METRICS else None
    return Gate(written.strip(), name, metric, label, match["sign"], float(match["bound"]))


def _metrics_of(task: TaskSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The metrics of the whole task, and those of each label."""
    if task.kind == "multi":
        return MULTI_HEADLINES, tuple(dict.fromkeys((*LABEL_METRICS, *HEADLINES)))
    ordinal = ORDINAL_HEADLINES if task.kind == "score" else ()
    return (*HEADLINES, *ordinal), LABEL_METRICS


def decide(gate: Gate, headlines: Mapping[str, Figure], labels: Sequence[LabelScore]) -> Decision:
    """Whether the metric passes the gate: one of the headlines, or of one of the labels."""
    if gate.label is None:
        value = headlines[gate.metric].value
    else:
        of_label = next(metrics for metrics in labels if metrics.label == gate.label)
        value = getattr(of_label, gate.metric)
    passed = value is not None and bool(_COMPARED[gate.sign](value, gate.bound))
    return Decision(gate.written, value, passed)
