"""A pool of documents with known labels, and sessions on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.gold.people import GoldFile, Label
from pipeline.options import ReviewOptions
from pipeline.review.session import Document, Pool, Session
from pipeline.spec.stages import QuestionTask
from pipeline.spec.tasks import TaskSpec

LABELS = {"choice": ["toxic", "clean"], "multi": ["law", "art"], "score": ["0", "1", "2"]}
WORDS = ("court judge crime", "paint colour brush", "goal ball match", "rain wind cloud")


def task_of(kind: str = "choice", labels: list[str] | None = None) -> TaskSpec:
    question = "Is it about {label}?" if kind == "multi" else "Is it rude?{answer}It is"
    own = {"name": "tone", "kind": kind, "labels": labels or LABELS[kind], "question": question}
    return QuestionTask.model_validate(own)


@dataclass
class Clock:
    """A clock that a test moves."""

    now: datetime = datetime(2026, 11, 26, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@dataclass
class Corpus:
    """Documents with true labels, of four topics; with `answered`, also with stored answers."""

    task: TaskSpec
    rows: int = 150
    answered: bool = False
    truth: NDArray[np.int64] = field(init=False)  # [rows, labels]: one hot, or several
    p: NDArray[np.float64] = field(init=False)  # [rows, labels]
    pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        source, labels = np.random.default_rng(0), len(self.task.labels)
        if self.task.kind == "multi":
            self.truth = source.integers(0, 2, (self.rows, labels))
            self.p = source.random((self.rows, labels))
        else:
            self.truth = np.eye(labels, dtype=np.int64)[source.integers(0, labels, self.rows)]
            self.p = source.dirichlet(np.ones(labels), self.rows)
        self.pool = Pool()
        for row, rank in enumerate(source.permutation(self.rows).tolist()):
            p = tuple(self.p[row].tolist()) if self.answered else None
            text = f"text {row}" + 5 * f" {WORDS[row % len(WORDS)]}"
            self.pool.add(Document(f"{row:032x}", f"d{row}", text, rank, p))

    def label(self, row: int) -> Any:
        """The true label, as the page sends it."""
        names = [n for n, own in zip(self.task.labels, self.truth[row], strict=True) if own]
        return names if self.task.kind == "multi" else names[0]

    @contextmanager
    def session(self, file: Path, *, now: Clock | None = None, **rules: Any) -> Iterator[Session]:
        options = ReviewOptions(str(file), **rules)
        with GoldFile.open(file, self.task) as gold:
            yield Session(self.pool, self.task, gold, options, now=now or Clock())

    def answers(
        self, session: Session, person: str, times: int, label: Callable[[int], Label] | None = None
    ) -> list[int]:
        """The person answers this number of documents; returns their rows."""
        rows = []
        for _ in range(times):
            asked = session.open_document(person)
            assert asked is not None
            text_hash = self.pool.documents[asked.row].hash
            session.answer(person, text_hash, "label", (label or self.label)(asked.row))
            rows.append(asked.row)
        return rows
