"""A pool of documents whose states say their label, and sessions on it."""

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
from pipeline.review.choice import Order, features
from pipeline.review.session import Pool, Rules, Session
from pipeline.spec.tasks import QuestionTask, TaskSpec

LABELS = {"choice": ["toxic", "clean"], "multi": ["law", "art"], "score": ["0", "1", "2"]}


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
class World:
    """Documents with true labels, of which the states are noisy copies."""

    task: TaskSpec
    rows: int = 150
    noise: float = 0.6
    truth: NDArray[np.int64] = field(init=False)  # [rows, labels]: one hot, or several
    pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        source, labels = np.random.default_rng(0), len(self.task.labels)
        if self.task.kind == "multi":
            self.truth = source.integers(0, 2, (self.rows, labels))
        else:
            self.truth = np.eye(labels, dtype=np.int64)[source.integers(0, labels, self.rows)]
        seen = np.concatenate([self.truth, np.zeros((self.rows, 4))], axis=1)
        states = seen[:, None, None] + self.noise * source.normal(
            size=(self.rows, 1, 1, labels + 4)
        )
        texts = [f"text {row}" for row in range(self.rows)]
        hashes = [f"{row:032x}" for row in range(self.rows)]
        self.pool = Pool(
            doc_ids=[f"d{row}" for row in range(self.rows)],
            hashes=hashes,
            texts=texts,
            states=states.astype(np.float32),
            features=features(states[:, 0, 0], 0),
            groups=np.arange(self.rows),
        )

    def label(self, row: int) -> Any:
        """The true label, as the page sends it."""
        names = [n for n, own in zip(self.task.labels, self.truth[row], strict=True) if own]
        return names if self.task.kind == "multi" else names[0]

    @contextmanager
    def session(self, file: Path, *, now: Clock | None = None, **rules: Any) -> Iterator[Session]:
        with GoldFile.open(file, self.task) as gold:
            yield Session(
                self.pool,
                self.task,
                gold,
                Rules(**{"order": Order("mixed"), **rules}),
                now=now or Clock(),
            )

    def answers(
        self, session: Session, person: str, times: int, label: Callable[[int], Label] | None = None
    ) -> list[int]:
        """The person answers this number of documents; returns their rows."""
        rows = []
        for _ in range(times):
            asked = session.open_document(person)
            assert asked is not None
            session.answer(
                person, self.pool.hashes[asked.row], "label", (label or self.label)(asked.row)
            )
            session.collect_fit(None)
            rows.append(asked.row)
        return rows
