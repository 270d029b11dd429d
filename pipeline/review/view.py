"""What the page shows beside its labels, as JSON. Entry points: `task_json` and `view_json`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pipeline.evaluation.intervals import Figure
from pipeline.review.agreement import Agreement, agreements
from pipeline.review.refit import main_metric
from pipeline.review.session import Asked, Session
from pipeline.spec.labels import ANSWER, SLOT
from pipeline.spec.tasks import TaskSpec

METRIC_NAMES = {
    "auroc": "AUROC",
    "f1": "macro F1",
    "macro_auroc": "macro AUROC",
    "qwk": "weighted kappa",
}
TOO_LITTLE = (
    "Doubling the labels made the readout no better than chance explains. "
    "More labels like these may not pay."
)


def task_json(session: Session, command: str) -> dict[str, Any]:
    """What stays the same for the whole review."""
    task = session.task
    return {
        "name": task.name,
        "kind": task.kind,
        "question": _question(task),
        "labels": list(task.labels),
        "blind": session.rules.blind,
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
    """The question as a person reads it, above the names of the labels."""
    if task.question is None:
        several = "Which labels of {} fit?" if task.kind == "multi" else "Which label of {} fits?"
        return several.format(task.name)
    question = task.question.partition(ANSWER)[0]
    return question.replace(SLOT, "…") if task.kind == "multi" else question


def _row(session: Session, asked: Asked) -> dict[str, Any]:
    pool, p = session.pool, None if session.rules.blind else asked.p
    return {
        "id": pool.hashes[asked.row],
        "doc_id": pool.doc_ids[asked.row],
        "text": pool.texts[asked.row],
        "chosen": asked.chosen,
        "p": None if p is None else p.tolist(),
    }


def _note(session: Session) -> str:
    """Why there is no document."""
    until = session.rules.until
    if session.is_done and until is not None:
        return f"{until.written} is reached: {quality_words(session)}."
    if session.rules.second:
        return "There is no document left that another person labelled and you did not."
    if session.rules.order.name == "disagreement":
        return "There is no document left whose answers contradict each other."
    return f"You have seen all {len(session.pool):,} documents of this review."


def _progress(session: Session, person: str) -> dict[str, Any]:
    counts = session.counts()
    own = counts.get(person, Counter())
    return {
        "labels": sum(each["label"] for each in counts.values()),
        "own": own.get("label", 0),
        "can_undo": sum(own.values()) > 0,
        "agreed": sum(session.agreed.values()),
        "compared": len(session.agreed),
        "metric": METRIC_NAMES[main_metric(session.task)],
        "points": [[len(fit.rows), *_ends(fit.quality)] for fit in session.fits],
        "fitting": session.is_fitting,
        "pairs": [pair_words(each) for each in pairs(session)],
        "hint": _hint(session),
    }


def _hint(session: Session) -> str:
    if session.failed_fit is not None:
        return f"The last fit of a readout failed ({session.failed_fit}). Your labels are kept."
    return TOO_LITTLE if session.labels_pay is False else ""


def _ends(figure: Figure) -> list[float | None]:
    return [figure.value, figure.low, figure.high]


def pairs(session: Session) -> list[Agreement]:
    """How far people agree, of each two."""
    return agreements(session.gold.answers.values(), session.task)


def pair_words(pair: Agreement) -> str:
    """One line: who, how often they agree, and kappa."""
    kappa = "undefined" if pair.kappa is None else f"{pair.kappa:.2f}"
    one, other = pair.people
    return f"{one} and {other}: {pair.alike} of {pair.documents} labels alike, kappa {kappa}"


def quality_words(session: Session) -> str:
    """The expected quality with its interval, or that it is not known yet."""
    if not session.fits or (figure := session.fits[-1].quality).value is None:
        return "not known yet"
    ends = "" if figure.low is None else f" ({figure.low:.3f} to {figure.high:.3f})"
    return f"{METRIC_NAMES[session.fits[-1].metric]} {figure.value:.3f}{ends}"
