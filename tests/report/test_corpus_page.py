"""The page of a report begins with the result, and names every doubt."""

from __future__ import annotations

import html
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from reports import REPORT, change_of, printed, scores, shown, task

from pipeline.errors import SpecError, StorageError
from pipeline.integrity.diff import Comparison
from pipeline.report.charts import HEIGHT, LEAST_SHARE, histogram, histograms
from pipeline.report.console import json_value
from pipeline.report.corpus_page import show_corpus_report, write_report
from pipeline.stores.named_files import new_file
from pipeline.verbs.corpus_report import BARS
from pipeline.verbs.doubts import report_doubts


def headings(written: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(r"<h2[^>]*>([^<]*)</h2>", written)]


def first_screen(written: str) -> str:
    """What is above the first section."""
    return html.unescape(written.partition("<h2 id=")[0])


def test_the_page_begins_with_what_is_kept_how_good_it_is_and_what_to_do_next() -> None:
    first, names = first_screen(shown(REPORT)), headings(shown(REPORT))
    assert names[:4] == ["Kept and dropped", "Quality", "Doubts", "What to do next"]
    assert names[-1] == "What was labelled, and with what"
    assert "60 of 100 documents are kept, 40 are dropped (40.0%" in first
    assert re.search(r"kept <strong>60</strong> \(60.0%\).*dropped <strong>40</strong>", first)
    assert "<h2>Doubts</h2>\n<p>None.</p>" in first
    assert "There are no gold labels" in first and "assay review specs/job.yaml" in first
    unfiltered = first_screen(shown(replace(REPORT, filter=None)))
    assert "<h2>Documents</h2>" in unfiltered and "ok <strong>100</strong> (100.0%)" in unfiltered


def test_why_documents_are_dropped_is_counted_by_condition() -> None:
    section = shown(REPORT).partition("<h2 id='reasons'>")[2].partition("<h2")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", section)
    assert cells == ["not (a)", "30", "30.0%", "not (b)", "25", "25.0%"]


def test_local_paths_are_relative_to_the_folder_of_the_spec_where_it_is_near() -> None:
    written = shown(REPORT)
    assert "<dd>../../out/job</dd>" in written and "../../parts/a.jsonl" in written
    assert "/data/team" not in written
    assert "/elsewhere/b.jsonl" in written and "s3://corpus/parts" in written
    assert "<dd>/data/team/out/job</dd>" in shown(REPORT, "a/b/c/job.yaml")
    assert json_value(REPORT)["output"] == "/data/team/out/job"


def test_every_doubt_is_on_the_first_screen_and_on_the_terminal() -> None:
    assert list(report_doubts(REPORT)) == []
    constant = task("topic", {"ok": 98, "error:x": 2}, labels={"<art>": 98}, answered=98)
    before, after = np.array([90, 10]), np.array([10, 90])
    change = change_of("ab", before, after, np.eye(2, dtype=int))
    rows: Any = {"before": 100, "after": 100}
    texts: Any = {"before_alone": 0, "both": 100, "after_alone": 0}
    drift = Comparison("snapshot 00000006", "now", rows, texts, {"spam": change}, (), ())
    report = replace(REPORT, partial=True, tasks=(constant,), drift=drift)
    doubts = list(report_doubts(report))
    starts = (
        "the snapshot leaves out documents",
        "topic: 2 documents have no answer (error:x 2)",
        "topic: 98 of 98 documents have the label '<art>'",
        "since snapshot 00000006, the labels of spam shifted: PSI ",
    )
    assert [doubt[: len(start)] for doubt, start in zip(doubts, starts, strict=True)] == [*starts]
    first = first_screen(shown(report))
    on_terminal = printed(show_corpus_report, report)
    for doubt in doubts:
        assert doubt in first and f"warning: {doubt}" in on_terminal
    assert list(report.warnings) == doubts
    asked = change_of("ab", before, after, np.eye(2, dtype=int), questions=("<a>?", "b?"))
    reworded = replace(report, drift=replace(drift, tasks={"spam": asked}))
    assert list(report_doubts(reworded)) == doubts[:-1]
    page = html.unescape(shown(reworded))
    assert "<dt>question before</dt><dd><a>?</dd><dt>question after</dt><dd>b?</dd>" in page


@pytest.mark.parametrize(
    "counts", [{0: 1}, {0: 999, 1_000: 1}, {0: 9, 500: 1_000, 999: 12_345}, {0: 1, 900: 23_456_789}]
)
def test_a_histogram_has_a_bar_for_each_count_on_a_scale_of_powers_of_ten(
    counts: dict[int, int],
) -> None:
    chart = histogram(scores("toxic", counts))
    ticks = {int(text.replace(",", "").replace("M", "000000")): at for at, text in chart.y}
    assert all(len(text) <= len("100,000") for _, text in chart.y)
    top, expected = max(ticks), [count for _, count in sorted(counts.items())]
    assert set(ticks) == {10**n for n in range(round(math.log10(top)) + 1)}
    assert max(10, max(expected)) <= top < 10 * max(10, max(expected))
    unit = ticks[10] - ticks[1]
    for count, (_, place, words) in zip(expected, chart.bars, strict=True):
        assert place == pytest.approx(ticks[1] + unit * math.log10(count))
        assert words.endswith(f": {count:,}")
        assert HEIGHT * place > 4  # a bar of one document is visible


def test_only_labels_above_the_lowest_bar_have_a_figure_and_few_of_them() -> None:
    bar = 1_000 // BARS
    labels = {
        "none": {0: 100, bar - 1: 300},
        "some": {0: 1_000, bar: 50},
        "few": {0: 1_000, 900: 9},
        "most": {800: 900},
        "many": {0: 100, 500: 500},
        "more": {0: 100, 500: 400},
    }
    assert 9 / 1_009 < LEAST_SHARE < 50 / 1_050
    of_topic = tuple(scores("topic", counts, name) for name, counts in labels.items())
    written = shown(replace(REPORT, tasks=(task("topic", {"ok": 1}),), scores=of_topic))
    assert re.findall(r"aria-label='p of (\w+) ", written) == ["most", "many", "more"]
    assert "at most 3 of the 6 labels that --json has counts of" in written
    assert histograms([scores("topic", labels["few"], "few")]) == []
    pair = [scores("toxic", {0: 9, 999: 9}, name) for name in ("toxic", "clean")]
    assert [chart.name.split()[2] for chart in histograms(pair)] == ["toxic"]


def test_a_page_is_written_to_a_url_and_replaces_the_one_before() -> None:
    for name in ("one", "二"):
        target = new_file("memory://pages/report.html", {}, overwrite=True)
        write_report(replace(REPORT, spec=name), target, spec_file="spec.yaml")
        written = fsspec.filesystem("memory").cat("/pages/report.html").decode()
        assert f"<title>{name}: report</title>" in written and written.endswith("</html>")


def test_a_page_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "folder" / "report.html"
    write_report(REPORT, new_file(str(path), {}, overwrite=True), spec_file="spec.yaml")
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"report\.html: cannot be written: .*the disk is full"):
        write_report(REPORT, new_file(str(path), {}, overwrite=True), spec_file="spec.yaml")
    assert path.read_text() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("url", ["memory://pages/", "{folder}", "{folder}/sub/"])
def test_a_folder_is_no_page(url: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"to: is a folder; name a file \(got '"):
        new_file(url.format(folder=tmp_path), {}, overwrite=True)
