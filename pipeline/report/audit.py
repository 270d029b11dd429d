"""The reports of `assay audit`, for people and as JSON values."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pipeline.gold.values import BETWEEN, NONE
from pipeline.report.console import Grid, Part, printed

if TYPE_CHECKING:
    from pipeline.evaluation.survey import Estimate
    from pipeline.verbs.audit import AuditResult
    from pipeline.verbs.audit_sample import DrawnSample

MEASURES = ("precision", "recall", "prevalence")

SHOWN_GROUPS = 20
SHOWN_LABELS = 12


@printed
def show_drawn_sample(sample: DrawnSample) -> Iterator[Part]:
    """What was drawn, what people have to do, and the next command."""
    words = ["--gold", sample.path]
    words += ["--positive", sample.positive] if sample.positive else []
    words += [word for by in sample.by for word in ("--by", by)]
    facts = {
        "sample": f"{sample.drawn:,} of {sample.texts:,} different texts, {sample.strata} strata",
        "snapshot": f"{sample.snapshot:08d}",
        **_left_out(sample.left_out),
        "file": sample.path,
        "judged by": sample.positive or "; ".join(sample.reasons),
    }
    for task, labels in sample.tasks.items():
        few = len(labels) <= SHOWN_LABELS
        shown = " or ".join(labels) if few else f"one of the {len(labels):,} labels of the task"
        if task in sample.multi:
            shown = f"those that apply of {', '.join(labels)}"
            shown += f", with {BETWEEN} between them; {NONE} if none applies"
        facts[f"column {task}"] = f"write {shown}"
    facts["then"] = f"assay audit SPEC {shlex.join(words)}"
    yield facts


@printed
def show_audited(result: AuditResult) -> Iterator[Part]:
    """The estimates of the corpus, of each reason and of the largest groups, and their basis."""
    whole = {name: getattr(result, name) for name in MEASURES}
    rows = [*_rows("all", whole)]
    for words, estimates in result.reasons.items():
        if len(result.reasons) > 1 or estimates != whole:
            rows += _rows(f"reason {words}", estimates)
    largest = sorted(result.groups.items(), key=lambda group: -group[1]["prevalence"].labels)
    for name, estimates in largest[:SHOWN_GROUPS]:
        rows += _rows(f"group {name}", estimates)
    if len(largest) > SHOWN_GROUPS:
        rows.append((f"{len(largest) - SHOWN_GROUPS:,} more groups; --json has them all",))
    yield Grid("", ("", "", "estimate", "95 % interval", "labels", "more labels"), rows)
    yield _facts(result)


def _rows(part: str, estimates: Mapping[str, Estimate]) -> Iterator[tuple[str, ...]]:
    for name in MEASURES:
        of = estimates[name]
        if of.estimate is None:
            yield part, name, "-", "too few labels", "-", "-"
            continue
        interval = f"{of.low:.3f} to {of.high:.3f}"
        yield part, name, f"{of.estimate:.3f}", interval, f"{of.labels:,}", f"{of.more_labels:,}"


def _facts(result: AuditResult) -> dict[str, str]:
    by_rule = f"what the rule drops with the labels of {', '.join(result.tasks)} as its answers"
    facts = {
        "to be dropped": result.positive or by_rule,
        "labels": f"{result.labels:,} of {result.texts:,} different texts",
        "snapshot": f"{result.snapshot:08d}",
        "more labels": f"labels still needed for +-{100 * result.half_width:g} points",
    }
    if result.unlabelled:
        facts["not labelled"] = f"{result.unlabelled:,} rows; taken to be like the others"
    if result.unfinished:
        facts["unfinished"] = (
            f"{result.unfinished:,} of these have labels, but a label that decides is missing; "
            f"finish them: without them, the shares of the whole rule are too high"
        )
    if result.not_in_corpus:
        facts["not used"] = f"{result.not_in_corpus:,} texts that have no answer now"
    if result.texts != result.texts_now:
        facts["changed"] = f"the corpus has {result.texts_now:,} texts now; draw a new sample"
    return facts | _left_out(result.left_out)


def _left_out(texts: Mapping[str, int]) -> dict[str, str]:
    parts = [f"{number:,} texts {reason}" for reason, number in texts.items()]
    return {"left out": ", ".join(parts)} if parts else {}
