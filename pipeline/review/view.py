"""What the page shows beside its labels, as JSON, and how far the labels of people agree.

Entry points: `task_json`, `view_json`, `history_json` and `agreements`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from pipeline.gold.people import GoldLine, Label
from pipeline.review.session import Asked, Session
from pipeline.spec.labels import ANSWER, SLOT
from pipeline.spec.tasks import TaskSpec

GOAL = 100  # labels of a readout
_HISTORY = 8  # answers
_START = 60  # characters of a text in the history


def task_json(session: Session, command: str) -> dict[str, Any]:
    """The values that stay the same during the review."""
    task = session.task
    return {
        "name": task.name,
        "kind": task.kind,
        "question": _question(task),
        "labels": list(task.labels),
        "blind": session.blind,
        "blur": not session.options.no_blur,
        "goal": len(session.pool) if session.options.order == "audit" else GOAL,
        "command": command,
    }


def view_json(session: Session, person: str) -> dict[str, Any]:
    """The document that the person has open, if there is one, and the progress."""
    asked = session.open_document(person)
    return {
        "row": None if asked is None else _row(session, asked),
        "note": _note(session) if asked is None else "",
        "progress": _progress(session, person),
    }


def _question(task: TaskSpec) -> str:
    """The text above the names of the labels."""
    if task.guide is not None:
        return task.guide
    if task.question is None:
        several = "Which labels of {} fit?" if task.kind == "multi" else "Which label of {} fits?"
        return several.format(task.name)
    question = task.question.partition(ANSWER)[0]
    return question.replace(SLOT, "…") if task.kind == "multi" else question


def _row(session: Session, asked: Asked) -> dict[str, Any]:
    document = session.pool.documents[asked.row]
    return {
        "id": document.hash,
        "doc_id": document.doc_id,
        "text": document.text,
        "chosen": asked.chosen,
        "columns": document.columns,
        "p": None if session.blind else document.p,
    }


def _note(session: Session) -> str:
    """Why there is no document."""
    if not session.pool.is_read:
        return "The next documents are still being read. Reload this page in a moment."
    if session.options.second:
        return "No document is left that needs a label of yours beside those of others."
    return (
        f"No document is left for you: all {len(session.pool):,} are answered, or open elsewhere."
    )


def _progress(session: Session, person: str) -> dict[str, Any]:
    counts = session.counts()
    own = counts.get(person, Counter())
    history = session.history(person)
    return {
        "labels": sum(each["label"] for each in counts.values()),
        "own": own.get("label", 0),
        "can_undo": bool(history),
        "answers": len(history),
        "by_label": session.by_label(),
        "history": [_past(session, line) for line in history[:_HISTORY]],
        "pairs": [pair_words(each) for each in agreements(session)],
    }


def history_json(session: Session, person: str) -> list[dict[str, Any]]:
    """All answers of the person, the last one first."""
    return [_past(session, line) for line in session.history(person)]


def _past(session: Session, line: GoldLine) -> dict[str, Any]:
    """An answer in the history; without an id if its document is not read yet."""
    row = session.pool.rows.get(line.content_hash)
    text = line.doc_id if row is None else session.pool.documents[row].text[:_START]
    label = line.label if isinstance(line.label, str) else ", ".join(line.label or ())
    answer = line.action if line.label is None else label or "none of the labels"
    return {"id": None if row is None else line.content_hash, "text": text, "answer": answer}


def pair_words(pair: Agreement) -> str:
    """One line: who, how often they agree, and kappa."""
    kappa = "undefined" if pair.kappa is None else f"{pair.kappa:.2f}"
    one, other = pair.people
    return f"{one} and {other}: {pair.alike} of {pair.documents} labels alike, kappa {kappa}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two people's labels of the documents that both labelled."""

    people: tuple[str, str]
    documents: int
    alike: int  # documents with the same label, or the same set of labels
    kappa: float | None  # None: undefined, as where both gave one label to all


def agreements(session: Session) -> list[Agreement]:
    """How far the current labels of each two people with a document in common agree."""
    people: dict[str, dict[str, Label]] = {}
    for line in session.gold.answers.values():
        if line.label is not None:
            people.setdefault(line.by, {})[line.content_hash] = line.label
    pairs = []
    for first, second in combinations(sorted(people), 2):
        if common := sorted(people[first].keys() & people[second].keys()):
            one, other = ([people[name][each] for each in common] for name in (first, second))
            alike = sum(a == b for a, b in zip(one, other, strict=True))
            pairs.append(
                Agreement((first, second), len(common), alike, _kappa(one, other, session.task))
            )
    return pairs


def _kappa(one: list[Label], other: list[Label], task: TaskSpec) -> float | None:
    """Cohen's kappa; of `multi` its mean over the labels, of `score` with quadratic weights."""
    from sklearn.metrics import cohen_kappa_score  # — the first document does not wait for it

    names = list(task.labels)
    if task.kind == "multi":
        pairs = [
            tuple([int(name in label) for label in labels] for labels in (one, other))
            for name in names
        ]
    else:
        pairs = [tuple([names.index(str(label)) for label in labels] for labels in (one, other))]
    # — a label that nobody gave counts in the distance of those around it
    how = {"weights": "quadratic", "labels": range(len(names))} if task.kind == "score" else {}
    # — where both people gave one label to all, chance alone makes them agree
    values = [cohen_kappa_score(*p, **how) for p in pairs if len({*p[0], *p[1]}) > 1]
    return float(np.mean(values)) if values else None
