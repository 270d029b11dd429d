"""Answers that may mean nothing, each named in one line with what to do.

Entry points: `label_doubts`, for the labels that a run gave, and `evaluation_doubt`, for the
figures of an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.verbs.evaluate import TaskEvaluation

# Fewer documents may have one label by accident, and so may a share below this one.
LEAST_DOCUMENTS = 50
CONSTANT_SHARE = 0.995


def label_doubts(labels: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """A line for each task that gives nearly all documents one label; counts are by label."""
    for task, counts in labels.items():
        documents, most = sum(counts.values()), max(counts.values(), default=0)
        if documents >= LEAST_DOCUMENTS and most >= CONSTANT_SHARE * documents:
            label = next(name for name, count in counts.items() if count == most)
            yield (
                f"{task}: {label!r} for {most:,} of {documents:,} documents. If they are not all "
                "alike, the model does not answer this question: measure it (assay eval), reword "
                "it, train a readout (assay fit), or use a larger model"
            )


def evaluation_doubt(task: TaskEvaluation) -> str | None:
    """A line if the answers are not shown to be better than chance, else None."""
    if not task.at_chance:
        return None
    auroc = next(iter(task.versions.values())).scores.headlines["auroc"]
    return (
        f"{task.task}: the interval of AUROC, {auroc.low:.3f} to {auroc.high:.3f}, includes .5: "
        "these answers may be no better than chance. Train a readout (assay fit), use a larger "
        "model, or give more gold rows"
    )
