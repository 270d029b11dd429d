"""One review: which document each person is shown. Entry points: `Pool` and `Session`.

Use a session from one thread. Another one may add documents to its pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from pipeline.errors import AssayError, one_line
from pipeline.evaluation.resampling import Bools, Floats
from pipeline.gold.people import Action, Drawn, GoldFile, GoldLine, Label, Shown, majority
from pipeline.options import ReviewOptions
from pipeline.spec.tasks import TaskSpec

BATCH = 20  # documents that are chosen together for diversity
DIVERSE = 2 * BATCH  # the first labels of the order `mixed`
RESERVED_S = 600.0  # after that, a document that somebody has open is shown to others, too


class RefusedAnswer(Exception):
    """An action that the session refuses; the message has the reason. Nothing was written."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document that may be shown."""

    hash: str  # of the content
    doc_id: str
    text: str
    rank: int  # its place in the random order
    p: tuple[float, ...] | None = None  # [labels]: the answer that the output has
    audit: Drawn | None = None  # how it was drawn for an audit
    columns: Mapping[str, str] = field(default_factory=dict)  # of the input, which people see


@dataclass(slots=True)
class Pool:
    """The documents that may be shown; their number grows while the corpus is read."""

    documents: list[Document] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)  # of the documents, by their hashes
    fp: str | None = None  # fingerprint of the answers
    is_read: bool = True  # whether all of them are here
    error: AssayError | None = None  # why no more documents can be shown

    def add(self, document: Document) -> None:
        """Adds the document, unless the pool has its text."""
        if document.hash not in self.rows:
            self.documents.append(document)
            self.rows[document.hash] = len(self.documents) - 1

    @property
    def sample(self) -> str | None:
        """The name of the sample of an audit that the documents are."""
        own = {document.audit.sample for document in self.documents if document.audit}
        return next(iter(own), None)

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(frozen=True, slots=True)
class Asked:
    """A document that a person has open."""

    row: int
    chosen: str  # why
    at: datetime


def _now() -> datetime:
    return datetime.now(UTC)


class Session:
    """The state of a review: what is in the gold file, and what is open."""

    def __init__(
        self,
        pool: Pool,
        task: TaskSpec,
        gold: GoldFile,
        options: ReviewOptions,
        *,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self.pool, self.task, self.gold, self.options = pool, task, gold, options
        # — a label of a person who saw the model's answer is no evidence about it
        self.blind = options.blind or options.order == "audit"
        self._now = now
        self._asked: dict[str, Asked] = {}  # by person
        self._queue: list[int] = []  # rows that are to be asked about next for diversity
        self._queued_of = 0  # documents of the pool from which the queue was chosen

    def open_document(self, person: str) -> Asked | None:
        """The document that the person has open, else the next one; None if there is none."""
        self._refuse_after_an_error()
        if person not in self._asked and (following := self._next(person)):
            self._asked[person] = Asked(*following, self._now())
        return self._asked.get(person)

    def answer(self, person: str, text_hash: str, action: Action, label: object = None) -> None:
        """Appends the action to the gold file; RefusedAnswer, and nothing is written."""
        self._refuse_after_an_error()
        asked = self._asked.get(person)
        if asked is None or self.pool.documents[asked.row].hash != text_hash:
            if (text_hash, person) in self.gold.answers:
                raise RefusedAnswer("You have answered this document already; undo that first.")
            raise RefusedAnswer("This document was not shown to you; reload the page.")
        checked = self._label(label) if action == "label" else None
        self.gold.append(self._line(person, asked, action, checked))
        del self._asked[person]

    def undo(self, person: str, text_hash: str | None = None) -> None:
        """Takes the person's answer to a document back, and opens the document.

        Without a document, it is the last answer. RefusedAnswer if there is none.
        """
        last = next((a for a in self.history(person) if text_hash in (None, a.content_hash)), None)
        if last is None or last.content_hash not in self.pool.rows:
            raise RefusedAnswer("You have nothing to undo.")
        row = self.pool.rows[last.content_hash]
        asked = Asked(row, last.shown.chosen, self._now())
        self.gold.append(self._line(person, asked, "undo", None))
        self._asked[person] = asked

    def history(self, person: str) -> list[GoldLine]:
        """The person's current answers, the last one first."""
        current = self.gold.answers
        own = [line for line in self.gold.lines if line.by == person and line.action != "undo"]
        return [line for line in reversed(own) if current.get(line.key) is line]

    def counts(self) -> dict[str, Counter[str]]:
        """The current answers of each person, by action."""
        counts: dict[str, Counter[str]] = {}
        for line in self.gold.answers.values():
            counts.setdefault(line.by, Counter())[line.action] += 1
        return counts

    def by_label(self) -> dict[str, int]:
        """How often each label was given."""
        labels = [line.label for line in self.gold.answers.values() if line.label is not None]
        names = (
            name for label in labels for name in ([label] if isinstance(label, str) else label)
        )
        counts = Counter(names)
        return {name: counts[name] for name in self.task.labels}

    def _refuse_after_an_error(self) -> None:
        if self.pool.error is not None:
            raise RefusedAnswer(one_line(self.pool.error))

    def _label(self, label: object) -> Label:
        """The label as the gold file has it: several in the task's order."""
        own, shown = list(self.task.labels), ", ".join(self.task.labels)
        if self.task.kind == "multi":
            if isinstance(label, list) and len({*map(str, label)} & {*own}) == len(label):
                return tuple(name for name in own if name in label)
            raise RefusedAnswer(f"{label!r} is not a list of labels of {self.task.name}: {shown}.")
        if isinstance(label, str) and label in own:
            return label
        raise RefusedAnswer(f"{label!r} is not a label of {self.task.name}: {shown}.")

    def _line(self, person: str, asked: Asked, action: Action, label: Label | None) -> GoldLine:
        document = self.pool.documents[asked.row]
        hidden = self.blind or document.p is None
        p = None if hidden else dict(zip(self.task.labels, document.p or (), strict=True))
        shown = {
            "fp": None if hidden else self.pool.fp,
            "p": p,
            "blind": self.blind,
            "chosen": asked.chosen,
            "audit": document.audit,
        }
        now = self._now()
        return GoldLine(
            doc_id=document.doc_id,
            content_hash=document.hash,
            task=self.task.name,
            action=action,
            label=label,
            by=person,
            at=now.isoformat(timespec="milliseconds"),
            # — the clock may have been set back
            seconds=max(0.0, round((now - asked.at).total_seconds(), 3)),
            shown=Shown.of(self.task, **shown),
        )

    def _next(self, person: str) -> tuple[int, str] | None:
        """The next row for the person, and why."""
        documents = self.pool.documents[:]
        candidates = [row for row in self._candidates(person) if row < len(documents)]
        if not candidates:
            return None
        if self.options.second:
            # — documents on which people disagree before those that one person labelled
            labels = self._labels()
            disputed = [row for row in candidates if len(labels[row]) > 1]
            return min(disputed or candidates, key=lambda row: documents[row].rank), "second"
        order, labelled = str(self.options.order), self._labelled(documents)
        p = self._answers(documents)
        if order == "mixed":
            asked = int(labelled.sum()) + len(self._asked)
            alternating = "uncertain" if asked % 2 == 0 else "random"
            order = "diverse" if asked < DIVERSE else alternating
            # — one document at once: clusters wait for scikit-learn, which loads in a second
            order = order if asked else "random"
            if order == "uncertain" and np.isnan(p[candidates]).all():
                order = "random"
        if order == "diverse":
            row = self._diverse(candidates, labelled)
        elif order == "uncertain":
            unsure = uncertainty(p[candidates], self.task.kind)
            row = candidates[int(np.nanargmax(unsure))]
        else:
            row = min(candidates, key=lambda each: documents[each].rank)
        return row, order if self.options.where is None else "where"

    def _diverse(self, candidates: list[int], labelled: Bools) -> int:
        """A row of the queue, which is made again when it is empty or the pool has doubled."""
        from pipeline.review.order import diverse

        rows = len(labelled)
        left = [row for row in self._queue if row in candidates]
        if not left or rows >= 2 * self._queued_of:
            open_ = np.zeros(rows, np.bool_)
            open_[candidates] = True
            texts = [document.text for document in self.pool.documents[:rows]]
            left = diverse(texts, labelled, open_, seed=self.options.seed).tolist()
            self._queued_of = rows
        self._queue = left[1:]
        return int(left[0])

    def _candidates(self, person: str) -> list[int]:
        """The rows that the person may be shown, rising."""
        now = self._now()
        taken = {
            asked.row
            for other, asked in self._asked.items()
            if other != person and (now - asked.at).total_seconds() < RESERVED_S
        }
        # — a document that one person skips may be clear to another
        by_others = set[int]()
        for (text_hash, by), line in self.gold.answers.items():
            row = self.pool.rows.get(text_hash)
            if row is not None and by == person:
                taken.add(row)
            elif row is not None and line.action != "skip":
                by_others.add(row)
        if self.options.second:
            open_ = by_others - taken
            return sorted(row for row, of in self._labels().items() if row in open_ and _lacks(of))
        return sorted({*range(len(self.pool))} - taken - by_others)

    def _labels(self) -> dict[int, list[Label]]:
        """By row, the labels that people gave."""
        labels: dict[int, list[Label]] = {}
        for line in self.gold.answers.values():
            row = self.pool.rows.get(line.content_hash)
            if row is not None and line.label is not None:
                labels.setdefault(row, []).append(line.label)
        return labels

    def _labelled(self, documents: Iterable[Document]) -> Bools:  # [rows]
        """Whether anybody gave the document a label."""
        answers = self.gold.answers.values()
        labelled = {line.content_hash for line in answers if line.label is not None}
        return np.array([document.hash in labelled for document in documents], np.bool_)

    def _answers(self, documents: Iterable[Document]) -> Floats:  # [rows, labels]; NaN: none
        none = (float("nan"),) * len(self.task.labels)
        return np.array([document.p or none for document in documents], np.float64)


def _lacks(labels: Sequence[Label]) -> bool:
    """Whether one person alone has labelled a document, or no label has a majority."""
    return len(labels) == 1 or majority(labels) is None


def uncertainty(p: Floats, kind: Literal["choice", "multi", "score"]) -> Floats:
    """[rows, labels] -> [rows]: minus the margin of the two likeliest labels.

    Of `multi`, minus the smallest margin of a label between yes and no. NaN without an answer.
    """
    if kind == "multi":
        return np.asarray(-np.abs(2 * p - 1).min(axis=1), np.float64)
    second, first = np.sort(p, axis=1)[:, -2:].T
    return np.asarray(second - first, np.float64)
