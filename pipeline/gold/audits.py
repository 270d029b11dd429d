"""The labels of an audit: of each document of a sample, whether it should be dropped.

Entry point: `read_audit`. Every line of the file has the design of the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.gold.files import gold_error, gold_format, read_gold_rows
from pipeline.gold.labels import GoldCounts
from pipeline.gold.people import Drawn, Label, current_lines, is_audit, majority
from pipeline.spec.labels import NO, YES
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import TaskSpec

# What people are asked in place of a task of the spec.
DROP: TaskSpec = QuestionTask(
    name="drop", labels={YES: (YES,), NO: (NO,)}, question="Should this document be dropped?"
)


@dataclass(frozen=True, slots=True)
class Audit:
    """People's decisions about the texts of a sample, by content hash."""

    drawn: Mapping[str, Drawn]
    drops: Mapping[str, bool]  # whether most people chose drop
    counts: GoldCounts


def read_audit(source: str, spec: JobSpec) -> Audit | None:
    """The audit in a gold file at a path or URL; None if the gold is no audit.

    SpecError if its lines are not of one sample, or a line was labelled with an answer in view.
    """
    format = gold_format(source)
    rows = read_gold_rows(source, format, spec.input.storage_options) if format else None
    if rows is None or not is_audit(rows):
        return None
    lines = current_lines(rows, [DROP])
    samples = {line.shown.sample if line.shown.p is None else None for line in lines}
    if None in samples or len(samples) != 1 or {*rows.columns["task"]} != {DROP.name}:
        fix = "is no evidence about a filter: it has no label, or labels of documents that were "
        fix += "not drawn for one audit, or that were given with the model's answer in view; label "
        fix += "a new file (assay review --by audit)"
        raise gold_error(source, fix)
    votes: dict[str, list[Label]] = {}
    for line in lines:
        votes.setdefault(line.content_hash, []).append(line.label or "")
    most = {text: majority(labels) for text, labels in votes.items()}
    drops = {text: label == YES for text, label in most.items() if label is not None}
    ties = tuple(text for text in most if text not in drops)
    counts = GoldCounts(
        source,
        "content_hash",
        documents=len(drops),
        repeated=len(lines) - len(votes),
        contradictory=sum(len(votes[text]) for text in ties),
        outvoted=sum(len({*votes[text]}) > 1 for text in drops),
        ties=ties,
    )
    drawn = {line.content_hash: line.shown.audit for line in lines if line.shown.audit}
    return Audit(drawn, drops, counts)
