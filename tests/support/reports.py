"""A report with known numbers, its page, what a report prints, and a task's change."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from pipeline.filters.decisions import Size
from pipeline.filters.result import FilterResult, Sizes
from pipeline.integrity.diff import Answers, Move, TaskChange, psi
from pipeline.report.console import console_on
from pipeline.report.corpus_page import page
from pipeline.verbs.corpus_report import BARS, CorpusReport, ScoreCounts, TaskReport

Result = TypeVar("Result")
PAIR = (Size(60, 6_000, 1_200), Size(40, 4_000, 800))


def task(name: str, statuses: dict[str, int], **changes: Any) -> TaskReport:
    labels = {name: 30, "other": 70}
    made = TaskReport(
        name,
        "?",
        None,
        ("models/tiny.gguf",),
        {"gguf": "ab" * 32},
        "fp",
        labels,
        statuses,
        {},
        None,
        None,
        "choice",
        100,
        None,
    )
    return replace(made, **changes)


def scores(name: str, counts: dict[int, int], label: str | None = None) -> ScoreCounts:
    """Documents by thousandths of the score."""
    bars = [0] * BARS
    for place, count in counts.items():
        bars[min(place * BARS // 1_000, BARS - 1)] += count
    return ScoreCounts(name, label or name, tuple(bars))


REPORT = CorpusReport(
    spec="job",
    model="models/tiny.gguf",
    older_answers=(),
    instruction="Read.",
    output="/data/team/out/job",
    input="s3://corpus/parts",
    snapshot=7,
    labelled_at="2026-11-01T00:00:00+00:00",
    partial=False,
    whole=PAIR,
    statuses={"ok": 100},
    tasks=(task("toxic", {"ok": 90, "truncated": 10}), task("spam", {"ok": 90, "truncated": 10})),
    scores=(scores("toxic", {0: 900, 500: 1, 1_000: 99}),),
    filter=FilterResult(
        snapshot=7,
        rule="a and b",
        on_error="drop",
        removes="not (a and b)",
        documents=100,
        dropped=40,
        sizes=Sizes(*PAIR),
        groups=(),
        reasons={"not (a)": 30, "not (b)": 25},
        failed={},
        missing_rows=0,
        missing_files=0,
        limit=None,
    ),
    by="topic",
    groups={"art": PAIR},
    files={"/data/team/parts/a.jsonl": PAIR, "/elsewhere/b.jsonl": PAIR},
    lengths={"up to 200 characters": PAIR},
    examples=(),
    quality=None,
    drift=None,
)


def shown(report: CorpusReport, spec_file: str = "specs/job.yaml") -> str:
    now = datetime(2026, 11, 2, tzinfo=UTC)
    return page(report, spec_file=spec_file, folder="/data/team/jobs", written_at=now)


def printed(show: Callable[[Result, Console], None], result: Result) -> str:
    """What a report prints on a stream that is no terminal."""
    stream = io.StringIO()
    show(result, console_on(stream))
    return stream.getvalue()


def change_of(
    labels: Sequence[str],
    before: NDArray[np.int64],
    after: NDArray[np.int64],
    flips: NDArray[np.int64],
    *,
    failing: int = 0,
    questions: tuple[str, str] | None = None,
) -> TaskChange:
    """A task between two snapshots, by texts of each label; of one version, or reworded."""
    asked = questions or (None, None)
    versions = zip("fg" if questions else "ff", asked, strict=True)
    sides = [
        Answers(*version, int(counts.sum()), dict(zip(labels, counts.tolist(), strict=True)))
        for version, counts in zip(versions, (before, after), strict=True)
    ]
    cells = [(int(flips[x, y]), x, y) for x, y in np.argwhere(flips) if x != y]
    moves = [Move(labels[x], labels[y], texts) for texts, x, y in cells]
    return TaskChange(
        *sides,
        changed=() if questions is None else ("question",),
        psi=psi(before, after),
        texts=int(flips.sum()),
        flipped=sum(move.texts for move in moves),
        moves=tuple(moves),
        newly_failing=failing,
        failing_ids=(),
    )
