"""What people see of an evaluation: nothing hostile steers the page or the terminal."""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from pipeline.evaluation.gates import Decision
from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import score
from pipeline.evaluation.thresholds import Threshold
from pipeline.gold.labels import Gold, GoldTask
from pipeline.options import GoldOptions
from pipeline.report.console import escape_controls, truncate
from pipeline.report.evaluation_section import evaluation_section
from pipeline.report.evaluation_table import evaluation_json, headline, show_evaluation
from pipeline.report.page import document
from pipeline.verbs.evaluate import (
    Cut,
    Evaluation,
    LabelIssue,
    RowCounts,
    TaskEvaluation,
    VersionScores,
)

HOSTILE = "<script>alert('$x$')</script>\x1b[31m\u202e[red]\n\x00&\"日本"
HALF = Figure(0.5, 0.3, 0.7)
NOW = "2026-11-22T12:00:00+00:00"
SIGN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u202e]")


def evaluation(labels: tuple[str, ...], versions: tuple[str, ...] = ("raw",)) -> Evaluation:
    source = np.random.default_rng(0)
    truth = source.integers(0, len(labels), 50)
    scored = {}
    for version in versions:
        p = source.dirichlet(np.ones(len(labels)), 50)
        cuts = (
            Cut(
                labels[0],
                "recall",
                0.9,
                Threshold(0.25, HALF, HALF, 3),
            ),
            Cut(labels[1], "precision", 0.9, None),
        )
        scores = score(truth, p, labels, resamples=5)
        scored[version] = VersionScores(scores, cuts, np.arange(50), truth, p, np.ones(50))
    issue = LabelIssue(HOSTILE, labels[0], labels[1], 0.1, 0.9, HOSTILE * 40)
    task = TaskEvaluation(
        "toxic",
        labels,
        RowCounts(57, 1, 2, {"error:<b>": 4}, 0, 50),
        scored,
        (issue,),
        dict.fromkeys(versions, 0),
        (),
        None,
    )
    gold = Gold(HOSTILE, "doc_id", ("a",), {"toxic": GoldTask(labels, truth)}, None, 1, 2)
    decisions = (Decision(f"toxic.f1.{HOSTILE} >= 0.8", None, False),)
    return Evaluation(
        "job", "/out", 3, 4, 60, gold, 55, 2, (task,), ("topic",), decisions, HOSTILE, NOW
    )


class Seen(HTMLParser):
    """Which elements and attributes a browser would find, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {f"{name}={value}" for name, value in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def page(evaluation: Evaluation) -> str:
    return document("a page", evaluation_section(evaluation, "my spec.yaml"))


@cache
def page_of(labels: tuple[str, ...], versions: tuple[str, ...] = ("raw",)) -> str:
    return page(evaluation(labels, versions))


@pytest.mark.parametrize(
    ("labels", "versions"),
    [((HOSTILE, "clean"), ("raw", "calibrated")), (("a", HOSTILE, "$y", "b"), ("raw",))],
)
def test_a_page_runs_and_fetches_nothing_whatever_it_shows(
    labels: tuple[str, ...], versions: tuple[str, ...]
) -> None:
    written = page_of(labels, versions)
    seen = Seen()
    seen.feed(written)
    assert {"table", "svg", "style"} <= seen.tags
    assert seen.tags.isdisjoint({"script", "img", "image", "link", "iframe", "object", "b"})
    assert not [name for name in seen.attributes if re.match(r"on\w+=|src=|\w*:?href=(?!#)", name)]
    assert any("default-src 'none'" in name for name in seen.attributes)
    assert SIGN.search(written) is None
    assert "<script>alert('$x$')</script>\\x1b[31m\\u202e[red]" in seen.text
    for svg in re.findall(r"<svg.*?</svg>", written, re.DOTALL):
        ElementTree.fromstring(svg)


def test_a_page_has_axis_names_and_all_scores() -> None:
    written = page_of((HOSTILE, "clean"), ("raw", "calibrated"))
    for words in (
        "confidence: p of the answer",
        "share of correct answers",
        "recall",
        "false positive rate",
        "share of documents",
        "answer (raw)",
        "macro F1",
        "15 bins of equal mass",
        "not the newest",
        "4 without an answer (error:&lt;b&gt;)",
        "2 not in the corpus",
        "FAILED",
    ):
        assert words in written, words


def test_a_page_says_what_to_do_next_and_the_headline_has_the_main_figures() -> None:
    whole = evaluation(("a", "b"), ("raw", "calibrated"))
    (task,) = whole.tasks
    headlines = task.versions["raw"].scores.headlines
    written = page(whole)
    auroc = headlines["auroc"]
    first = f"AUROC {auroc.value:.3f} ({auroc.low:.3f} to {auroc.high:.3f}), accuracy "
    begin, _, _ = written.partition("<h3>toxic</h3>")
    shown = headline(task, whole.gold)
    assert shown.startswith(first) and "on 50 documents, by " in shown
    assert "of job<" in begin and NOW in begin and "<dt>model</dt>" in begin
    assert "a gate failed" in begin and "read the 1 gold labels that may be wrong" in begin
    options = GoldOptions(
        id="key", columns=(("toxic", "is it"), ("topic", "t")), values=(("1", "a"),)
    )
    renamed = replace(whole, gold=replace(whole.gold, source="gold.csv", options=options))
    assert task.at_chance
    words = "--gold gold.csv --id key --task toxic --column 'toxic=is it' --value 1=a</code>"
    assert f"assay fit 'my spec.yaml' {words}" in html.unescape(page(renamed))
    passed = replace(whole, decisions=(), tasks=())
    command = "<code>assay filter 'my spec.yaml' --to FOLDER</code>"
    bare = html.unescape(page(passed))
    assert f"write a rule as <code>filter.keep</code> in the spec, then run {command}" in bare
    ruled = html.unescape(page(replace(passed, rule="a.p.b < 0.5")))
    assert f"that the spec's rule, <code>a.p.b < 0.5</code>, keeps: {command}" in ruled


def test_no_rule_of_the_page_breaks_words_of_a_narrow_column() -> None:
    css = re.search(r"<style>(.*?)</style>", page_of(("a", "b")), re.DOTALL)
    assert css
    rules = re.findall(r"([^{}]+){([^}]*)}", css[1])
    broken = {selector.strip() for selector, rule in rules if "overflow-wrap: anywhere" in rule}
    assert broken == {"td.long", "dd", "code, pre"}  # each has a width of its own


def test_a_chart_is_readable_on_a_telephone() -> None:
    """400 pixels less the margins are 368; a chart is not shrunk below nine tenths of its size."""
    written = page_of(("a", HOSTILE, "$y", "b"))
    widths = [float(width) for width in re.findall(r'<svg[^>]* width="([\d.]+)pt"', written)]
    assert len(widths) == 8
    narrow = widths[:3] + widths[4:]
    assert all(368 / (width * 96 / 72) >= 0.9 for width in narrow), narrow


def test_ids_of_a_pages_plots_are_unique() -> None:
    written = page_of(("a", HOSTILE, "$y", "b"))
    svgs = re.findall(r"<svg.*?</svg>", written, re.DOTALL)
    assert len(svgs) == 3 + 1 + 4
    ids = [id for svg in svgs for id in set(re.findall(r'id="([mp][0-9a-f]{10})"', svg))]
    assert len(ids) > len(svgs) and len(set(ids)) == len(ids)


def test_control_characters_do_not_reach_a_terminal() -> None:
    stream = io.StringIO()
    show_evaluation(evaluation((HOSTILE, "clean")), Console(file=stream, width=300))
    shown = stream.getvalue()
    assert SIGN.search(shown) is None and "\\x1b[31m\\u202e[red]" in shown
    assert "[/" not in shown and "no threshold reaches this" in shown
    assert "50 of 57 gold documents evaluated" in shown


def test_with_many_labels_the_terminal_shows_the_most_frequent_confusions() -> None:
    whole = evaluation(tuple(f"label {n}" for n in range(13)))
    stream = io.StringIO()
    show_evaluation(whole, Console(file=stream, width=200))
    counts = np.array(whole.tasks[0].versions["raw"].scores.confusion)
    np.fill_diagonal(counts, 0)
    gold, answer = np.unravel_index(counts.argmax(), counts.shape)
    _, _, table = stream.getvalue().partition("the most frequent confusions")
    first = [cell.strip() for cell in re.findall(r"│([^│\n]+)", table)[:3]]
    assert first == [f"label {gold}", f"label {answer}", str(counts.max())]


def test_with_many_labels_the_page_draws_the_most_frequent() -> None:
    """Drawn whole, the square of a thousand has a million cells."""
    whole = evaluation(tuple(f"label {n}" for n in range(120)))
    written = page(whole)
    assert "(the 40 most frequent of 120 labels)" in written
    square = re.findall(r"<svg.*?</svg>", written, re.DOTALL)[3]
    assert written.count("<div class='plots wide'>") == 1
    named = {int(n) for n in re.findall(r">label (\d+)<", square)}
    support = np.bincount(whole.tasks[0].versions["raw"].truth, minlength=120)
    assert len(named) == 40 and support[list(named)].min() >= np.sort(support)[-40]
    headline = re.search(r"AUROC</td><td[^>]*>([^<]*)<", written)
    assert headline is None or "(" not in headline[1]
    stream = io.StringIO()
    show_evaluation(whole, Console(file=stream, width=200))
    (auroc,) = re.findall(r"│ AUROC +│ +([^│]*)│", stream.getvalue())
    assert re.fullmatch(r"0\.\d{3} *", auroc)
    value = evaluation_json(whole)["tasks"]["toxic"]["versions"]["raw"]["headlines"]["auroc"]
    assert value["value"] is not None and value["low"] is None and value["high"] is None


def test_a_task_without_an_evaluated_row_has_no_scores() -> None:
    whole = evaluation(("a", "b"))
    empty = TaskEvaluation(
        "toxic",
        ("a", "b"),
        RowCounts(3, 0, 3, {}, 0, 0),
        {},
        (),
        {"raw": 0},
        (),
        None,
    )
    parts = {name: getattr(whole, name) for name in Evaluation.__dataclass_fields__}
    nothing = Evaluation(**{**parts, "tasks": (empty,)})
    assert "0 of 3 gold documents evaluated, 3 not in the corpus" in page(nothing)
    assert evaluation_json(nothing)["tasks"]["toxic"]["versions"] == {}


def test_the_json_form_has_numbers_or_null() -> None:
    value = evaluation_json(evaluation(("a", "b"), ("raw", "calibrated")))
    assert json.loads(json.dumps(value, allow_nan=False)) == value | {
        "tasks": json.loads(json.dumps(value["tasks"])),
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é日", "plain é日"), ("a\nb\tc", "a b c"), ("\x1b\u202e\ud800", "\\x1b\\u202e\\ud800")],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert escape_controls(text) == shown


def test_a_long_text_is_cut_with_a_mark() -> None:
    assert truncate("abcdef", 6) == "abcdef" and truncate("abcdefg", 6) == "abcde…"
