"""Audits of rules with several reasons, on a corpus whose every label is known."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping

import numpy as np
import pytest
from known_corpus import LABELS, TEXTS, Known, known_corpus
from numpy.typing import NDArray
from scipy.stats import binom
from sklearn.metrics import precision_score, recall_score

from pipeline.cli import main
from pipeline.evaluation.metrics import task_metrics
from pipeline.evaluation.survey import Estimate
from pipeline.ledger.snapshots import contents
from pipeline.options import EvalOptions
from pipeline.report.audit import show_audited
from pipeline.report.console import console_on
from pipeline.stores.local import LocalStore
from pipeline.verbs.audit import AuditResult
from pipeline.verbs.evaluate import evaluate

TOXIC, SPAM, ENGLISH = "toxic.p.toxic < 0.5", "spam.p.spam < 0.5", "language.label = 'English'"
DEMO = {"keep": f"{TOXIC} and {SPAM} and {ENGLISH}"}
MEASURES = ("precision", "recall", "prevalence")


Bools = NDArray[np.bool_]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return known_corpus(tmp_path_factory.mktemp("known"))


def decisions(known: Known) -> dict[str, tuple[Bools, Bools]]:
    """What each reason of the demo's rule drops, and what it should drop."""
    truth, p = known.truth, known.p
    return {
        TOXIC: (p["toxic"][:, 0] >= 0.5, truth["toxic"] == "toxic"),
        SPAM: (p["spam"][:, 0] >= 0.5, truth["spam"] == "spam"),
        ENGLISH: (p["language"].argmax(axis=1) != 0, truth["language"] != "English"),
    }


def any_of(parts: Mapping[str, tuple[Bools, Bools]]) -> tuple[Bools, Bools]:
    dropped, should = zip(*parts.values(), strict=True)
    return np.any(dropped, axis=0), np.any(should, axis=0)


def shares(dropped: Bools, should: Bools) -> dict[str, float]:
    return {
        "precision": precision_score(should, dropped),
        "recall": recall_score(should, dropped),
        "prevalence": float(should.mean()),
    }


def estimates(result: AuditResult) -> dict[str, Mapping[str, Estimate]]:
    """Those of the whole rule, under an empty name, and of each reason."""
    whole = {name: getattr(result, name) for name in MEASURES}
    return {"": whole, **result.reasons}


def assert_exact(found: Mapping[str, Estimate], dropped: Bools, should: Bools) -> None:
    for name, value in shares(dropped, should).items():
        assert found[name].estimate == pytest.approx(value), name
        assert found[name].low == found[name].high == found[name].estimate


def test_of_the_demos_rule_all_labels_give_what_scikit_learn_counts(known: Known) -> None:
    spec = known.spec(**DEMO)
    drawn = known.draw(spec, documents=1_000)
    assert drawn.drawn == drawn.texts == TEXTS
    assert drawn.tasks == LABELS and drawn.reasons == (TOXIC, SPAM, ENGLISH)
    known.label()
    result = known.audit(spec)
    parts = decisions(known)
    assert_exact(estimates(result)[""], *any_of(parts))
    assert list(result.reasons) == [TOXIC, SPAM, ENGLISH]
    for reason, (dropped, should) in parts.items():
        assert_exact(result.reasons[reason], dropped, should)
    # — rightly dropped spam counts as right; by one label alone it is a false positive
    _, toxic = parts[TOXIC]
    alone = known.audit(spec, positive="toxic.toxic")
    assert_exact(estimates(alone)[""], any_of(parts)[0], toxic)
    assert (alone.precision.estimate or 0) < (result.precision.estimate or 0) - 0.2
    assert alone.reasons == {} and alone.positive == "toxic.toxic"


@pytest.mark.parametrize(
    "rule", ["and doc", "or doc", "case", "drop_top", "groups", "negated", "no conjunction"]
)
def test_other_rules_give_what_scikit_learn_counts(rule: str, known: Known) -> None:
    """Documents of one text differ where the rule reads the input."""
    forum = known.sources == "forum"
    by_demo = decisions(known)
    (toxic, is_toxic), (spam, is_spam) = by_demo[TOXIC], by_demo[SPAM]
    scores = known.p["spam"][:, 0]
    top = scores > np.quantile(scores, 0.9, method="inverted_cdf")
    by_language = np.full(len(scores), False)
    for label in range(3):
        own = known.p["language"].argmax(axis=1) == label
        by_language |= own & (scores > np.quantile(scores[own], 0.9, method="inverted_cdf"))
    of_source = "toxic.p.toxic <= case doc.source when 'forum' then 1 else 0.4 end"
    loose = (known.p["toxic"][:, 0] > 0.4) & ~forum
    part = {"share": 0.1, "of": "spam.p.spam"}
    content, whole, reasons = {
        "and doc": (
            {"keep": f"{TOXIC} and doc.source = 'web' and {SPAM}"},
            (toxic | forum | spam, is_toxic | forum | is_spam),
            {TOXIC: by_demo[TOXIC], SPAM: by_demo[SPAM]},
        ),
        "or doc": (
            {"keep": f"{TOXIC} or doc.source = 'forum'"},
            (toxic & ~forum, is_toxic & ~forum),
            {f"{TOXIC} or doc.source = 'forum'": (toxic & ~forum, is_toxic & ~forum)},
        ),
        "case": (
            {"keep": f"{SPAM} and {of_source}"},
            (spam | loose, is_spam | is_toxic & ~forum),
            {SPAM: by_demo[SPAM], of_source: (loose, is_toxic & ~forum)},
        ),
        "drop_top": (
            {"keep": TOXIC, "drop_top": part},
            (toxic | top, is_toxic | is_spam),
            {TOXIC: by_demo[TOXIC], "drop_top: spam.p.spam": (top, is_spam)},
        ),
        "groups": (
            {"drop_top": {**part, "by": "language", "smallest": 0}},
            (by_language, is_spam),
            {"drop_top: spam.p.spam": (by_language, is_spam)},
        ),
        "negated": (
            {"keep": f"not ({SPAM}) and {ENGLISH}"},
            (~spam | by_demo[ENGLISH][0], ~is_spam | by_demo[ENGLISH][1]),
            {f"(NOT {SPAM})": (~spam, ~is_spam), ENGLISH: by_demo[ENGLISH]},
        ),
        "no conjunction": (
            {"keep": f"not ({TOXIC} and {SPAM})"},
            (~(toxic | spam), ~(is_toxic | is_spam)),
            {f"not ({TOXIC} and {SPAM})": (~(toxic | spam), ~(is_toxic | is_spam))},
        ),
    }[rule]
    spec = known.spec(**content)
    known.draw(spec, documents=1_000)
    known.label()
    result = known.audit(spec, by=("doc.source",))
    assert_exact(estimates(result)[""], *whole)
    assert len(result.reasons) == len(reasons)
    for found, (dropped, should) in zip(result.reasons.values(), reasons.values(), strict=True):
        assert_exact(found, dropped, should)
    for source in ("web", "forum"):
        inside = known.sources == source
        assert result.groups[source]["prevalence"].estimate == pytest.approx(
            whole[1][inside].mean()
        )


@pytest.mark.parametrize("samples", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_the_intervals_of_the_rule_and_of_each_reason_hold_the_truth(
    samples: int, known: Known
) -> None:
    """The bound is the lower end of a binomial count's 99.9 % range around .92."""
    spec, parts = known.spec(**DEMO), decisions(known)
    truth = {"": shares(*any_of(parts)), **{name: shares(*part) for name, part in parts.items()}}
    held: dict[tuple[str, str], int] = {}
    for seed in range(samples):
        known.draw(spec, documents=150, seed=seed)
        known.label()
        for part, found in estimates(known.audit(spec)).items():
            for name, of in found.items():
                assert of.low is not None and of.high is not None and of.low < of.high
                inside = of.low <= truth[part][name] <= of.high
                held[part, name] = held.get((part, name), 0) + inside
    assert len(held) == 4 * 3
    assert min(held.values()) >= binom.ppf(0.001, samples, 0.92), held
    assert sum(held.values()) >= binom.ppf(0.001, 12 * samples, 0.92), held


def test_a_row_counts_where_its_labels_are_enough(known: Known) -> None:
    """One label that drops it is enough for the whole rule; a reason needs its own label."""
    spec = known.spec(**DEMO)
    known.draw(spec, documents=300)
    known.label(seed=1)
    result = known.audit(spec)
    with (known.folder / "sample.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    bad = {"toxic": {"toxic"}, "spam": {"spam"}, "language": {"Spanish", "French"}}
    decided = [
        any(row[task] in bad[task] for task in LABELS) or all(row[task] for task in LABELS)
        for row in rows
    ]
    assert 0 < sum(decided) < 300
    assert (result.labels, result.unlabelled) == (sum(decided), 300 - sum(decided))
    some = [any(row[task] for task in LABELS) for row in rows]
    assert result.unfinished == sum(some) - sum(decided) > 0
    for reason, task in zip((TOXIC, SPAM, ENGLISH), LABELS, strict=True):
        assert result.reasons[reason]["prevalence"].labels == sum(bool(r[task]) for r in rows)


def test_a_reason_whose_column_nobody_filled_in_has_no_estimate(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor has the whole rule: the only rows that count would be those that should be dropped."""
    spec = known.spec(**DEMO)
    known.draw(spec, documents=1_000)
    known.label(("toxic", "spam"))
    result = known.audit(spec)
    for part in ("", ENGLISH):
        assert {of.estimate for of in estimates(result)[part].values()} == {None}
    for reason in (TOXIC, SPAM):
        assert_exact(result.reasons[reason], *decisions(known)[reason])
    assert (result.labels, result.unlabelled, result.unfinished) == (0, TEXTS, TEXTS)
    show_audited(result, console_on(sys.stdout))
    shown = capsys.readouterr().out
    assert "too few labels" in shown and f"{result.unfinished} of these have labels" in shown


def test_a_condition_on_the_input_decides_without_a_label(known: Known) -> None:
    spec = known.spec(keep=f"{TOXIC} and doc.source = 'web'")
    known.draw(spec, documents=1_000)
    known.label(seed=2)
    result = known.audit(spec)
    with (known.folder / "sample.csv").open(newline="") as file:
        labelled = {row["_text"].removeprefix("'") for row in csv.DictReader(file) if row["toxic"]}
    in_web = {str(text) for text in known.texts[known.sources == "web"]}
    assert result.labels == len(labelled | (known.by_text.keys() - in_web)) < TEXTS
    assert result.unfinished == 0


def test_the_command_shows_the_rule_and_each_reason(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, sample = known.folder / "spec.yaml", known.folder / "sample.csv"
    spec.write_text(json.dumps(known.content(**DEMO)))
    sample.unlink(missing_ok=True)
    assert main(["audit", str(spec), "--to", str(sample), "--documents", "200"]) == 0
    shown = capsys.readouterr().out
    assert "write English or Spanish or French" in shown and "column spam" in shown
    assert "--positive" not in shown
    # — a spreadsheet runs none of the texts, and the labels are of the texts as they were
    with sample.open(newline="") as file:
        assert all(row["_text"].startswith("'=") for row in csv.DictReader(file))
    known.label()
    assert main(["audit", str(spec), "--gold", str(sample)]) == 0
    shown = capsys.readouterr().out
    assert all(f"reason {reason}" in shown for reason in (TOXIC, SPAM))
    assert main(["audit", str(spec), "--gold", str(sample), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values["reasons"][SPAM]) == set(MEASURES)
    assert {"estimate", "low", "high"} <= values["precision"].keys()


@pytest.mark.parametrize("samples", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_an_evaluation_on_a_sample_has_the_figures_of_the_corpus_within_its_intervals(
    samples: int, known: Known
) -> None:
    """The bound is the lower end of a binomial count's 99.9 % range around .92."""
    spec = known.spec(**DEMO)
    snapshot = contents(LocalStore(known.folder / "out"), 1)
    inside, tries = 0, 0
    for seed in range(samples):
        known.draw(spec, documents=150, seed=seed)
        known.label()
        options = EvalOptions(str(known.folder / "sample.csv"), resamples=1)
        places = {"cache_dir": known.folder / "cache", "candidate": snapshot}
        for task in evaluate(spec, options, **places).tasks.values():
            assert task.gold == "sample"
            assert task.represented == pytest.approx(1)
            hits = known.p[task.task].argmax(axis=1) == [
                LABELS[task.task].index(label) for label in known.truth[task.task]
            ]
            assert task.scores is not None
            accuracy = task.scores.headlines["accuracy"]
            assert accuracy.low is not None and accuracy.high is not None
            inside += accuracy.low <= hits.mean() <= accuracy.high
            tries += 1
    assert tries == 3 * samples and inside >= binom.ppf(0.001, tries, 0.92), inside


def test_a_sample_of_all_texts_evaluates_to_the_corpus(known: Known) -> None:
    spec = known.spec(**DEMO)
    known.draw(spec, documents=1_000)
    known.label()
    options = EvalOptions(str(known.folder / "sample.csv"), resamples=1)
    snapshot = contents(LocalStore(known.folder / "out"), 1)
    places = {"cache_dir": known.folder / "cache", "candidate": snapshot}
    for task in evaluate(spec, options, **places).tasks.values():
        truth = np.array([LABELS[task.task].index(each) for each in known.truth[task.task]])
        p = known.p[task.task].astype(np.float64)
        expected = task_metrics(truth, p)
        assert task.scores is not None
        figures = task.scores.headlines
        for name in figures.keys() - {"ece"}:  # its noise is taken out by simulation
            assert figures[name].value == pytest.approx(expected[name], abs=1e-6), name
