"""One review: whom it shows which document, and what the answers teach. Entry point: `Session`.

Use a session from one thread. It fits readouts in another.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import one_line
from pipeline.evaluation.gates import Gate
from pipeline.gold.people import AUDIT, Action, GoldFile, GoldLine, Label, Shown, majority
from pipeline.review.agreement import one_hot
from pipeline.review.choice import BATCH, Floats, Ints, Known, Order, ranked
from pipeline.review.refit import Refit, can_fit, labels_pay, refit
from pipeline.spec.tasks import TaskSpec

RESERVED_S = 600.0  # after that, a document that somebody has open is shown to others, too
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class RefusedAnswer(Exception):
    """An action that the session does not take; the message says why. Nothing was written."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The documents that may be shown, in random order, and their states."""

    doc_ids: Sequence[str]
    hashes: Sequence[str]  # of the contents; distinct
    texts: Sequence[str]
    states: NDArray[np.float32]  # [rows, layers, poolings, hidden]
    features: Floats  # [rows, dims], for `choice.Known`
    groups: Ints  # [rows]: equal for equal tokens
    ledger: Floats | None = None  # [rows, labels]: p of a run's answers; NaN: none
    sample: str | None = None  # the sample of `assay audit` that the rows are; its page is blind

    def __len__(self) -> int:
        return len(self.hashes)


@dataclass(frozen=True, slots=True)
class Rules:
    """How a session chooses and shows documents, and when it ends."""

    order: Order
    until: Gate | None = None
    blind: bool = False  # the model's answer is hidden
    second: bool = False  # documents that another person labelled are shown
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A document that a person has open."""

    row: int
    chosen: str  # why
    p: Floats | None  # [labels]: the model's answer, also where it is hidden
    at: datetime


def _now() -> datetime:
    return datetime.now(UTC)


class Session:
    """The state of a review: what is in the gold file, what is open, and the fits so far."""

    def __init__(
        self,
        pool: Pool,
        task: TaskSpec,
        gold: GoldFile,
        rules: Rules,
        *,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self.pool, self.task, self.gold = pool, task, gold
        # — a label given in view of the model's answer is no evidence about it
        self.rules = replace(rules, blind=True) if pool.sample else rules
        self._now = now
        self._row_of = {text_hash: row for row, text_hash in enumerate(pool.hashes)}
        self._asked: dict[str, Asked] = {}  # by person
        self._queue: list[int] = []  # rows that are to be asked about next for diversity
        self.fits: list[Refit] = []
        self._fitted_at = self._places_at = 0  # labels
        self._fitting: Future[Refit] | None = None
        self.failed_fit: str | None = None  # why the last fit failed
        self.agreed: dict[tuple[str, str], bool] = {}  # whether the model gave the label, too
        for key, line in gold.answers.items():
            if line.label is not None and line.shown.p is not None:
                self._compare(key, line.label, np.array([*line.shown.p.values()]))
        self._start_fit()

    def open_document(self, person: str) -> Asked | None:
        """The document that the person has open, else the next one; None if there is none."""
        self.collect_fit()
        if person not in self._asked and not self.is_done and (following := self._next(person)):
            self._open(person, *following)
        return self._asked.get(person)

    def answer(self, person: str, text_hash: str, action: Action, label: object = None) -> None:
        """Appends the action to the gold file; RefusedAnswer, and nothing is written."""
        asked = self._asked.get(person)
        if asked is None or self.pool.hashes[asked.row] != text_hash:
            if (text_hash, person) in self.gold.answers:
                raise RefusedAnswer("You have answered this document already; undo that first.")
            raise RefusedAnswer("This document was not shown to you; reload the page.")
        checked = self._label(label) if action == "label" else None
        self.gold.append(self._line(person, asked, action, checked))
        del self._asked[person]
        if checked is not None and asked.p is not None:
            self._compare((text_hash, person), checked, asked.p)
        self._start_fit()

    def undo(self, person: str) -> None:
        """Takes the person's last answer back, and opens its document; RefusedAnswer if none."""
        last = self._last(person)
        if last is None or last.content_hash not in self._row_of:
            raise RefusedAnswer("There is no answer of yours to undo.")
        asked = Asked(self._row_of[last.content_hash], last.shown.chosen, None, self._now())
        self.gold.append(self._line(person, asked, "undo", None))
        self.agreed.pop(last.key, None)
        self._open(person, asked.row, asked.chosen)

    @property
    def is_done(self) -> bool:
        """Whether the readout has the quality at which the session ends."""
        until = self.rules.until
        if until is None or not self.fits:
            return False
        value = self.fits[-1].figures[until.metric].value
        return value is not None and until.admits(value)

    @property
    def labels_pay(self) -> bool | None:
        """See `refit.labels_pay`; None without two fits."""
        return labels_pay(self.task, self.fits) if self.fits else None

    @property
    def is_fitting(self) -> bool:
        return self._fitting is not None

    def counts(self) -> dict[str, Counter[str]]:
        """The current answers of each person, by action."""
        counts: dict[str, Counter[str]] = {}
        for line in self.gold.answers.values():
            counts.setdefault(line.by, Counter())[line.action] += 1
        return counts

    def collect_fit(self, timeout: float | None = 0) -> None:
        """Takes over a fit that is complete; without a timeout, waits for one that is going on.

        One that failed is logged and named on the page; after the next labels, it is tried again.
        """
        if self._fitting is not None and (self._fitting.done() or timeout is None):
            error = self._fitting.exception()
            if error is None:
                self.fits.append(self._fitting.result())
            else:
                logger.warning("warning: a readout could not be fitted", exc_info=error)
            self.failed_fit = None if error is None else one_line(error)
            self._fitting = None
            self._start_fit()

    def _open(self, person: str, row: int, chosen: str) -> None:
        p = self.fits[-1].p[row] if self.fits else None
        self._asked[person] = Asked(row, chosen, p, self._now())

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
        hidden = self.rules.blind or asked.p is None
        p = None if hidden else dict(zip(self.task.labels, asked.p.tolist(), strict=True))  # type: ignore[union-attr]
        shown = {"p": p, "blind": self.rules.blind, "chosen": asked.chosen}
        now = self._now()
        return GoldLine(
            doc_id=self.pool.doc_ids[asked.row],
            content_hash=self.pool.hashes[asked.row],
            task=self.task.name,
            action=action,
            label=label,
            by=person,
            at=now.isoformat(timespec="milliseconds"),
            seconds=round((now - asked.at).total_seconds(), 3),
            shown=Shown.of(self.task, **shown),
        )

    def _compare(self, key: tuple[str, str], label: Label, p: Floats) -> None:
        is_likely = p >= 0.5 if self.task.kind == "multi" else np.arange(len(p)) == p.argmax()
        self.agreed[key] = is_likely.tolist() == [*map(bool, one_hot(label, self.task))]

    def _last(self, person: str) -> GoldLine | None:
        """The person's last action that is not undone."""
        done: list[GoldLine] = []
        for line in self.gold.lines:
            if line.by == person:
                undoes = line.action == "undo"
                places = [n for n, one in enumerate(done) if one.key == line.key]
                if not undoes:
                    done.append(line)
                elif places:
                    done.pop(places[-1])
        return done[-1] if done else None

    def _next(self, person: str) -> tuple[int, str] | None:
        """The next row for the person, and why."""
        candidates = self._candidates(person)
        labelled, _ = self._labelled()
        order = self.rules.order.at(len(labelled) + len(self._asked), is_fitted=bool(self.fits))
        if order.name == "diverse" and self.rules.second:
            order = Order("random")
        if order.name == "diverse":
            return self._next_diverse(order, candidates)
        rows = ranked(order, self._known(), candidates, self.rules.seed)
        sample = self.pool.sample
        return (int(rows[0]), f"{AUDIT}{sample}" if sample else str(order)) if len(rows) else None

    def _next_diverse(self, order: Order, candidates: Ints) -> tuple[int, str] | None:
        left = [row for row in self._queue if row in candidates]
        left = left or ranked(order, self._known(), candidates, self.rules.seed).tolist()
        self._queue = left[1:]
        return (left[0], str(order)) if left else None

    def _candidates(self, person: str) -> Ints:
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
            row = self._row_of.get(text_hash)
            if row is not None and by == person:
                taken.add(row)
            elif row is not None and line.action != "skip":
                by_others.add(row)
        if self.rules.second:
            return np.array(sorted(by_others - taken), np.int64)
        if self.rules.order.name != "disagreement":
            taken |= by_others
        return np.array([row for row in range(len(self.pool)) if row not in taken], np.int64)

    def _labelled(self) -> tuple[Ints, Floats]:
        """The rows with labels, and their targets [rows, labels].

        Of people who disagree, the majority counts; ties are left out.
        """
        targets: dict[int, list[tuple[int, ...]]] = {}
        for (text_hash, _), line in self.gold.answers.items():
            if line.label is not None and text_hash in self._row_of:
                own = tuple(one_hot(line.label, self.task))
                targets.setdefault(self._row_of[text_hash], []).append(own)
        voted = {row: majority(each) for row, each in targets.items()}
        known = {row: target for row, target in voted.items() if target is not None}
        values = np.array([*known.values()], np.float64).reshape(-1, len(self.task.labels))
        return np.array([*known], np.int64), values

    def _known(self) -> Known:
        rows, targets = self._labelled()
        labelled = np.zeros(len(self.pool), np.bool_)
        labelled[rows] = True
        other = None
        if self.rules.order.name == "disagreement":
            empty = np.full((len(self.pool), len(self.task.labels)), np.nan)
            other = empty if self.pool.ledger is None else self.pool.ledger.copy()
            other[rows] = targets
        p = self.fits[-1].p if self.fits else None
        return Known(self.pool.features, labelled, self.task.kind, p, other)

    def _start_fit(self) -> None:
        """Fits in another thread if there is a batch of new labels; never to an audit's sample."""
        if self.pool.sample:
            return
        rows, targets = self._labelled()
        is_new = len(rows) >= self._fitted_at + BATCH
        if self._fitting is not None or not is_new or not can_fit(self.task, targets):
            return
        self._fitted_at = len(rows)
        places = self.fits[-1].places if self.fits else None
        if len(rows) >= 2 * self._places_at:
            self._places_at, places = len(rows), None
        pool = self.pool
        fitting = partial(refit, self.task, pool.states, pool.groups, rows, targets, places)
        self._fitting = _in_background(fitting)


def _in_background(call: Callable[[], Result]) -> Future[Result]:
    """The result of a call in a thread that does not keep the process from ending."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again where the result is taken
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
