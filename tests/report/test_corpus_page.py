"""The page of a report says first what its reader came for, and names every doubt."""

from __future__ import annotations

import html
import io
import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from pipeline.evaluation.subgroups import SubgroupRate
from pipeline.filters.dry_run import Size
from pipeline.integrity.diff import Comparison, TaskChange
from pipeline.report.console import console_on
from pipeline.report.corpus_page import corpus_report_json, page, show_corpus_report
from pipeline.report.doubts import report_doubts
from pipeline.report.thresholds import BARS, LEAST_SHARE, histogram, histograms
from pipeline.verbs.corpus_report import (
    CorpusReport,
    FilterReport,
    ScoreCounts,
    SubgroupReport,
    TaskReport,
)

PAIR = (Size(60, 6_000, 1_200), Size(40, 4_000, 800))


def task(name: str, statuses: dict[str, int], **changes: Any) -> TaskReport:
    labels = {name: 30, "other": 70}
    made = TaskReport(name, "?", None, {"gguf": "ab" * 32}, "fp", labels, statuses, {}, None)
    return replace(made, **changes)


def scores(name: str, counts: dict[int, int], label: str | None = None) -> ScoreCounts:
    """Documents by thousandths of the score."""
    cells = [0] * 1_001
    for place, count in counts.items():
        cells[place] = count
    return ScoreCounts(name, label or name, 0.5, {"": cells}, (cells, cells, cells))


REPORT = CorpusReport(
    spec="job",
    model="models/tiny.gguf",
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
    filter=FilterReport(
        "a and b", "drop", {"not (a)": 30, "not (b)": 25}, 15, "not (a and b)", {}, False
    ),
    by="topic",
    groups={"art": PAIR},
    files={"/data/team/parts/a.jsonl": PAIR, "/elsewhere/b.jsonl": PAIR},
    lengths={"up to 200 characters": PAIR},
    examples=(),
    quality=None,
    subgroups=(),
    drift=None,
)


def shown(report: CorpusReport, spec_file: str = "specs/job.yaml") -> str:
    now = datetime(2026, 11, 2, tzinfo=UTC)
    return page(report, spec_file=spec_file, folder="/data/team/jobs", written_at=now)


def headings(written: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(r"<h2[^>]*>([^<]*)</h2>", written)]


def test_the_page_begins_with_the_summary_and_ends_with_the_provenance() -> None:
    names = headings(shown(REPORT))
    assert names[:5] == [
        "Summary",
        "Why documents are dropped",
        "Thresholds",
        "Kept and dropped by group",
        "Answers",
    ]
    assert names[-1] == "What was labelled, and with what"
    first = shown(REPORT).partition("<h2 id='reasons'>")[0]
    assert "It keeps 60 of 100 documents and drops 40 (40.0%" in first and "Doubts" not in first
    assert "--gold FILE" in first


def test_why_documents_are_dropped_is_counted_by_condition() -> None:
    section = shown(REPORT).partition("<h2 id='reasons'>")[2].partition("<h2")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", section)
    assert cells == ["not (a)", "30", "30.0%", "not (b)", "25", "25.0%"]
    assert "15 documents break more than one condition" in section


def test_a_count_of_statuses_is_in_one_place() -> None:
    assert shown(REPORT).count("truncated 10") == 1
    other = replace(REPORT, tasks=(REPORT.tasks[0], task("spam", {"ok": 100})))
    section = shown(other)
    assert "status of toxic</dt><dd>ok 90, truncated 10" in section
    assert "status of spam</dt><dd>ok 100" in section


def test_local_paths_are_relative_to_the_folder_of_the_spec_where_it_is_near() -> None:
    written = shown(REPORT)
    assert "<dd>../../out/job</dd>" in written and "../../parts/a.jsonl" in written
    assert "/data/team" not in written
    assert "/elsewhere/b.jsonl" in written and "s3://corpus/parts" in written
    assert "<dd>/data/team/out/job</dd>" in shown(REPORT, "a/b/c/job.yaml")
    assert corpus_report_json(REPORT)["output"] == "/data/team/out/job"


def test_every_doubt_is_on_the_first_screen_and_on_the_terminal() -> None:
    assert list(report_doubts(REPORT)) == []
    constant = task("topic", {"ok": 98, "error:x": 2}, labels={"<art>": 98})
    before, after = np.array([90, 10]), np.array([10, 90])
    change = TaskChange(
        "spam", ("a", "b"), ("f", "f"), before, after, np.eye(2, dtype=int), 0, (), {}
    )
    drift = Comparison("snapshot 00000006", "now", (100, 100), (0, 100, 0), (change,), (), ())
    rate = SubgroupRate("group books", 50, 25, 0.5, 0.4, 0.6, 0.1, 0.001, True)
    report = replace(
        REPORT,
        partial=True,
        tasks=(constant,),
        subgroups=(SubgroupReport("toxic", "toxic", (rate,)),),
        drift=drift,
    )
    doubts = list(report_doubts(report))
    starts = (
        "the snapshot leaves out documents",
        "topic: 2 documents have no answer (error:x 2)",
        "topic: 98 of 98 documents have the label '<art>'",
        "toxic: group books has a false positive rate of 50.0% for toxic, all other documents",
        "since snapshot 00000006, the labels of spam shifted: PSI ",
    )
    assert [doubt[: len(start)] for doubt, start in zip(doubts, starts, strict=True)] == [*starts]
    first = html.unescape(shown(report).partition("<h2 id='reasons'>")[0])
    stream = io.StringIO()
    show_corpus_report(report, console_on(stream))
    for doubt in doubts:
        assert doubt in first and f"warning: {doubt}" in stream.getvalue()
    assert corpus_report_json(report)["warnings"] == doubts


@pytest.mark.parametrize("counts", [{0: 1}, {0: 999, 1_000: 1}, {0: 9, 500: 1_000, 999: 12_345}])
def test_a_histogram_has_a_bar_for_each_count_on_a_scale_of_powers_of_ten(
    counts: dict[int, int],
) -> None:
    figure = histogram(scores("toxic", counts))
    bars = re.findall(r"<rect [^>]*y='([\d.]+)'[^>]*height='([\d.]+)'.*?: ([\d,]+)</title>", figure)
    expected = [count for _, count in sorted(counts.items())]
    assert [int(count.replace(",", "")) for *_, count in bars] == expected
    ticks = {
        int(text.replace(",", "")): float(y)
        for y, text in re.findall(r"y1='([\d.]+)'[^>]*/><text [^>]*'end'>([\d,]+)<", figure)
    }
    top = max(ticks)
    assert set(ticks) == {10**n for n in range(round(math.log10(top)) + 1)}
    assert max(10, max(expected)) <= top < 10 * max(10, max(expected))
    unit = ticks[1] - ticks[10]
    for y, height, count in bars:
        assert float(y) == pytest.approx(
            ticks[1] - unit * math.log10(int(count.replace(",", ""))), abs=0.2
        )
        assert float(height) > 4  # a bar of one document is visible
    assert re.findall(r"text-anchor='middle'>([\d.]+)<", figure) == ["0", "0.5", "1"]


def test_only_labels_with_something_to_show_have_a_figure_and_few_of_them() -> None:
    bar = 1_000 // BARS
    labels = {
        "none": {0: 100, bar: 300},
        "some": {0: 1_000, bar + 1: 50},
        "few": {0: 1_000, 900: 9},
        "most": {800: 900},
        "many": {0: 100, 500: 500},
        "more": {0: 100, 500: 400},
    }
    assert 9 / 1_009 < LEAST_SHARE < 50 / 1_050
    shown = histograms([scores("topic", counts, name) for name, counts in labels.items()])
    assert re.findall(r"aria-label='p of (\w+) ", shown) == ["most", "many", "more"]
    assert "3 more labels; --json has" in shown
    assert histograms([scores("topic", labels["few"], "few")]) == ""
    pair = [scores("toxic", {0: 9, 999: 9}, name) for name in ("toxic", "clean")]
    assert re.findall(r"aria-label='p of (\w+) ", histograms(pair)) == ["toxic"]
