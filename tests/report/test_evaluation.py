"""What people see of an evaluation: nothing hostile controls the page or the terminal."""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import asdict, replace
from functools import cache
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from reports import REPORT, shown
from rich.console import Console

from pipeline.evaluation.gates import Decision
from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import score
from pipeline.evaluation.operating_points import Threshold
from pipeline.gold.answers import JudgedRows, RowCounts
from pipeline.gold.labels import GoldCounts
from pipeline.report.console import escape_controls, json_value, truncate
from pipeline.report.evaluation import sections, show_evaluation
from pipeline.verbs.evaluate import Cut, Evaluation, LabelIssue, TaskEvaluation

HOSTILE = "<script>alert('$x$')</script>\x1b[31m\u202e[red]\n\x00&\"日本"
HALF = Figure(0.5, 0.3, 0.7)
NOW = "2026-11-22T12:00:00+00:00"
SIGN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u202e]")


def evaluation(labels: tuple[str, ...]) -> Evaluation:
    source = np.random.default_rng(0)
    truth = source.integers(0, len(labels), 50)
    p = source.dirichlet(np.ones(len(labels)), 50)
    cuts = (
        Cut(labels[0], "recall", 0.9, Threshold(0.25, HALF, HALF, 3)),
        Cut(labels[1], "precision", 0.9, None),
    )
    scores = score(truth, p, labels, resamples=5)
    task = TaskEvaluation(
        task="toxic",
        labels=labels,
        rows=RowCounts(57, 1, 2, {"error:<b>": 4}, 0, 50),
        gold="people",
        scores=scores,
        thresholds=cuts,
        mislabelled=(LabelIssue(HOSTILE, labels[0], labels[1], 0.1, 0.9, HOSTILE * 40),),
        judged=JudgedRows(np.arange(50), truth, p),
    )
    return Evaluation(
        spec="job",
        output="/out",
        snapshot=3,
        newest_snapshot=4,
        labelled_at=NOW,
        corpus_rows=60,
        gold=GoldCounts(HOSTILE, "doc_id", 57, repeated=1, contradictory=2),
        in_corpus=55,
        repeated_in_corpus=2,
        tasks={"toxic": task},
        multi={},
        without_gold=("topic",),
        gates=(Decision(f"toxic.f1.{HOSTILE} >= 0.8", None, False),),
    )


class ElementsOfPage(HTMLParser):
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
    return shown(replace(REPORT, scores=(), quality=evaluation), "my spec.yaml")


@cache
def page_of(labels: tuple[str, ...]) -> str:
    return page(evaluation(labels))


@pytest.mark.parametrize("labels", [(HOSTILE, "clean"), ("a", HOSTILE, "$y", "b")])
def test_a_page_runs_and_fetches_nothing_whatever_it_shows(labels: tuple[str, ...]) -> None:
    written = page_of(labels)
    elements = ElementsOfPage()
    elements.feed(written)
    assert {"table", "svg", "style"} <= elements.tags
    assert elements.tags.isdisjoint({"script", "img", "image", "link", "iframe", "object", "b"})
    assert not [
        name for name in elements.attributes if re.match(r"on\w+=|src=|\w*:?href=(?!#)", name)
    ]
    assert any("default-src 'none'" in name for name in elements.attributes)
    assert SIGN.search(written) is None
    assert "<script>alert('$x$')</script>\\x1b[31m\\u202e[red]" in elements.text
    for svg in re.findall(r"<svg.*?</svg>", written, re.DOTALL):
        ElementTree.fromstring(svg)


def test_a_page_says_what_to_do_next_and_the_headline_has_the_main_figures() -> None:
    whole = evaluation(("a", "b"))
    task = whole.tasks["toxic"]
    written, auroc = page(whole), task.auroc
    first = f"AUROC {auroc.value:.3f} ({auroc.low:.3f} to {auroc.high:.3f}), accuracy "
    screen, _, main = written.partition("<h2 id='answers'>")
    begin, _, _ = main.partition("<h2 id='quality'>")[2].partition("<h3>toxic</h3>")
    [section] = sections(whole)
    line = section.headline
    assert line.startswith(first) and "on 50 documents, by " in line
    assert "of job<" in begin and NOW in begin and "<dt>model</dt>" in begin
    assert line in html.unescape(screen)
    assert "read the 1 gold labels that may be wrong" in screen
    renamed = replace(whole, gold=replace(whole.gold, source="gold.csv"))
    assert task.at_chance
    command = "assay fit 'my spec.yaml' --gold gold.csv --task toxic</code>"
    assert command in html.unescape(page(renamed))
    # — the readout that answered stays
    fitted = tuple(replace(own, readout="a.safetensors") for own in REPORT.tasks)
    written = shown(replace(REPORT, tasks=fitted, scores=(), quality=renamed), "my spec.yaml")
    assert command.replace("</", " --to FOLDER</") in html.unescape(written)
    passed = replace(whole, tasks={})
    command = "<code>assay filter 'my spec.yaml' --to FOLDER</code>"
    assert f"write the documents that the rule keeps: {command}" in html.unescape(page(passed))
    unruled = shown(replace(REPORT, filter=None, quality=passed), "my spec.yaml")
    line = "write a rule as filter.keep in the spec, then run: "
    assert line + command in html.unescape(unruled)


def test_control_characters_do_not_reach_a_terminal() -> None:
    stream = io.StringIO()
    show_evaluation(evaluation((HOSTILE, "clean")), Console(file=stream, width=300))
    shown = stream.getvalue()
    assert SIGN.search(shown) is None and "\\x1b[31m\\u202e[red]" in shown
    assert "[/" not in shown and "no threshold reaches this" in shown
    counts = "50 of 57 gold documents", "2 not in the corpus", "4 without an answer (error:<b>)"
    assert all(count in shown for count in counts)


def test_with_many_labels_the_terminal_shows_the_most_frequent_confusions() -> None:
    whole = evaluation(tuple(f"label {n}" for n in range(13)))
    scores = whole.tasks["toxic"].scores
    assert scores is not None
    counts = np.array(scores.confusion)
    np.fill_diagonal(counts, 0)
    gold, answer = np.unravel_index(counts.argmax(), counts.shape)
    [section] = sections(whole)
    first, *_ = section.grids[-1].rows
    assert first == (f"label {gold}", f"label {answer}", str(counts.max()))


def test_with_many_labels_a_ranking_has_no_interval() -> None:
    whole = evaluation(tuple(f"label {n}" for n in range(120)))
    written = page(whole)
    assert "the most frequent confusions; --json has all" in written
    headline = re.search(r"AUROC</td>\s*<td[^>]*>([^<]*)<", written)
    assert headline is not None and re.fullmatch(r"0\.\d{3}", headline[1])
    values = json_value(whole)
    value = values["tasks"]["toxic"]["scores"]["headlines"]["auroc"]
    assert value["value"] is not None and value["low"] is None and value["high"] is None


def test_the_json_form_has_numbers_or_null() -> None:
    value = json_value(evaluation(("a", "b")))
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    odd = {"a": float("nan"), "b": HALF, "c": float("-inf"), "d": "caf\udce9"}  # a path
    assert json_value(odd) == {"a": None, "b": asdict(HALF), "c": None, "d": "caf\udce9"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é日", "plain é日"),
        ("a\nb\tc", "a b c"),
        ("\x1b\u202e\ud800", "\\x1b\\u202e\\ud800"),
        ("\u0645\u200c\u062e \u65e5\u3000\u672c", "\u0645\u200c\u062e \u65e5 \u672c"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert escape_controls(text) == shown


def test_a_long_text_is_cut_with_a_mark() -> None:
    assert truncate("abcdef", 6) == "abcdef" and truncate("abcdefg", 6) == "abcde…"
