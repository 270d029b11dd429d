"""A report with known numbers, its page, and what a report prints."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from rich.console import Console

from pipeline.filters.decisions import Size
from pipeline.filters.result import FilterResult, Sizes
from pipeline.filters.tally import BARS, ScoreCounts
from pipeline.report.console import console_on
from pipeline.report.corpus_page import page
from pipeline.runtime.plan import Plan
from pipeline.verbs.corpus_report import CorpusReport, TaskReport
from pipeline.verbs.forecast import Forecast

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
    seconds=20.0,
    docs_per_s=4.5,
    tasks=(task("toxic", {"ok": 90, "truncated": 10}), task("spam", {"ok": 90, "truncated": 10})),
    scores=(scores("toxic", {0: 900, 500: 1, 1_000: 99}),),
    limits={"toxic.p.toxic": (0.25,)},
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
        several=15,
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


def forecast_of(planned: Plan) -> Forecast:
    """Of an output without labels."""
    return Forecast(
        **asdict(planned.counts),
        plan=planned,
        documents_for_model=planned.rows_for_model,
        tokens_per_document=None,
        docs_per_s=None,
        price=None,
    )
