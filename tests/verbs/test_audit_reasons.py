"""Audits of rules with several reasons, on a corpus whose every label is known."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished import documents_of
from label_tables import label_table
from numpy.typing import NDArray
from scipy.stats import binom
from sklearn.metrics import precision_score, recall_score

from pipeline.cli import main
from pipeline.evaluation.metrics import task_metrics
from pipeline.evaluation.survey import Estimate
from pipeline.ledger.cells import committed, record_specs
from pipeline.ledger.cuts import load_or_cut
from pipeline.ledger.label_files import LabelFile, commit_shard
from pipeline.ledger.snapshots import SnapshotTask, contents, publish
from pipeline.options import AuditOptions, EvalOptions, GoldOptions
from pipeline.report.audit import show_audited
from pipeline.report.console import console_on
from pipeline.sources.source import find_objects
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import Columns, JobSpec
from pipeline.stores.local import LocalStore
from pipeline.verbs.audit import AuditResult, audit
from pipeline.verbs.audit_sample import DrawnSample, draw_sample
from pipeline.verbs.evaluate import evaluate

TEXTS, COPIES = 560, 40
LABELS = {
    "toxic": ("toxic", "clean"),
    "spam": ("spam", "other"),
    "language": ("English", "Spanish", "French"),
}
TOXIC, SPAM, ENGLISH = "toxic.p.toxic < 0.5", "spam.p.spam < 0.5", "language.label = 'English'"
DEMO = {"keep": f"{TOXIC} and {SPAM} and {ENGLISH}"}
MEASURES = ("precision", "recall", "prevalence")

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Known:
    """A labelled corpus, with the truth and the answers of each document."""

    folder: Path
    truth: Mapping[str, NDArray[np.str_]]  # [documents] of each task
    p: Mapping[str, NDArray[np.float32]]  # [documents, labels] of each task
    sources: NDArray[np.str_]  # [documents]
    texts: NDArray[np.str_]  # [documents]
    by_text: Mapping[str, Mapping[str, str]]

    def spec(self, **rule: Any) -> JobSpec:
        return parse_spec(json.dumps(self.content(**rule)))

    def content(self, **rule: Any) -> dict[str, Any]:
        tasks = [{"name": t, "question": "?", "labels": [*each]} for t, each in LABELS.items()]
        places = {"input": {"path": str(self.folder / "in.jsonl"), "id": "id"}}
        model = {"model": {"path": "none"}, "output": str(self.folder / "out")}
        return {"name": "job", **model, **places, "tasks": tasks, "filter": rule}

    def draw(self, spec: JobSpec, **options: Any) -> DrawnSample:
        to = self.folder / "sample.csv"
        to.unlink(missing_ok=True)
        named = AuditOptions(to=str(to), **options)
        return draw_sample(spec, named, cache_dir=self.folder / "cache")

    def label(self, tasks: tuple[str, ...] = tuple(LABELS), seed: int | None = None) -> None:
        """Fills in the sheet; with a seed, every third label is missing."""
        path, random = self.folder / "sample.csv", np.random.default_rng(seed)
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            for task in tasks:
                if task in row and (seed is None or random.random() < 2 / 3):
                    row[task] = self.by_text[row["_text"].removeprefix("'")][task]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def audit(self, spec: JobSpec, **options: Any) -> AuditResult:
        named = AuditOptions(gold=str(self.folder / "sample.csv"), **options)
        return audit(spec, named, cache_dir=self.folder / "cache")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """600 documents, of which 40 have the text of another one, mostly in another source."""
    folder, random = tmp_path_factory.mktemp("known"), np.random.default_rng(0)
    same = np.concatenate([np.arange(TEXTS), random.choice(TEXTS, COPIES, replace=False)])
    shares = {"toxic": (0.2, 0.8), "spam": (0.25, 0.75), "language": (0.7, 0.2, 0.1)}
    truth = {t: random.choice(LABELS[t], TEXTS, p=p)[same] for t, p in shares.items()}
    sources = random.choice(["web", "forum"], len(same))
    texts = [f"={number} is a text" for number in same]
    p = {}
    for task, labels in LABELS.items():
        is_true = truth[task][:, None] == np.array(labels)
        raw = random.gamma(0.4 + 1.6 * is_true)
        raw[TEXTS:] = raw[same[TEXTS:]]  # — of equal texts the answers are equal
        p[task] = (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32)
    rows = [
        {"id": str(number), "text": text, "source": str(source)}
        for number, (text, source) in enumerate(zip(texts, sources, strict=True))
    ]
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _publish(folder, p)
    by_text = {
        text: {task: str(truth[task][number]) for task in LABELS}
        for number, text in enumerate(texts)
    }
    return Known(folder, truth, p, sources, np.array(texts), by_text)


def _publish(folder: Path, p: Mapping[str, NDArray[np.float32]]) -> None:
    store = LocalStore(folder / "out")
    objects = find_objects(str(folder / "in.jsonl"), folder / "cache")
    shards = load_or_cut(store, objects, Columns("text", "id"), 9_000).shards
    assert len(shards) > 2
    fingerprints = {task: Fingerprint({"task": task}) for task in LABELS}
    fp = {task: each.id for task, each in fingerprints.items()}
    record_specs(store, fp, {task: each.json() for task, each in fingerprints.items()})
    for shard in shards:
        documents = documents_of(shard)
        rows, size = slice(shard.piece.start_row, shard.piece.end_row), documents.num_rows
        files = []
        for task, labels in LABELS.items():
            ones = np.ones(size)
            status = ["ok"] * size
            mass = ones.astype(np.float32)
            table = label_table(
                documents["doc_id"], p[task][rows], mass, ones, ones, status, labels
            )
            files.append(LabelFile(task, fp[task], table, {"task": task, "fp": fp[task]}))
        commit_shard(store, shard, documents, files)
    done = committed(store, fp, [shard.id for shard in shards])
    tasks = {task: SnapshotTask(fp[task], labels) for task, labels in LABELS.items()}
    publish(store, "job", tasks, shards, done, created_at="2026-11-01T00:00:00Z")


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
    drawn = known.draw(spec, sample=1_000)
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
    "rule", ["and doc", "or doc", "thresholds", "drop_top", "groups", "negated", "no conjunction"]
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
    at_forum = {"of": "toxic.p.toxic", "by": "doc.source", "at": {"forum": 1.0}, "otherwise": 0.4}
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
        "thresholds": (
            {"keep": SPAM, "thresholds": at_forum},
            (spam | loose, is_spam | is_toxic & ~forum),
            {SPAM: by_demo[SPAM], "thresholds: toxic.p.toxic": (loose, is_toxic & ~forum)},
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
    known.draw(spec, sample=1_000)
    known.label()
    result = known.audit(spec, by="doc.source")
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
        known.draw(spec, sample=150, seed=seed)
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
    known.draw(spec, sample=300)
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
    known.draw(spec, sample=1_000)
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
    known.draw(spec, sample=1_000)
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
    assert main(["audit", str(spec), "--to", str(sample), "--sample", "200"]) == 0
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


def test_an_evaluation_on_a_sample_has_the_figures_of_the_corpus_within_its_intervals(
    known: Known,
) -> None:
    spec = known.spec(**DEMO)
    snapshot = contents(LocalStore(known.folder / "out"), 1)
    inside, tries = 0, 0
    for seed in range(20):
        known.draw(spec, sample=150, seed=seed)
        known.label()
        evaluation = evaluate(
            spec,
            str(known.folder / "sample.csv"),
            GoldOptions(),
            EvalOptions(resamples=1),
            cache_dir=known.folder / "cache",
            candidate=snapshot,
        )
        for task in evaluation.tasks:
            assert evaluation.gold.kind(task.task) == "sample"
            assert task.stands_for == pytest.approx(1)
            hits = known.p[task.task].argmax(axis=1) == [
                LABELS[task.task].index(label) for label in known.truth[task.task]
            ]
            accuracy = task.versions["raw"].scores.headlines["accuracy"]
            assert accuracy.low is not None and accuracy.high is not None
            inside += accuracy.low <= hits.mean() <= accuracy.high
            tries += 1
    assert tries == 60 and inside / tries >= 0.92, inside


def test_a_sample_of_all_texts_evaluates_to_the_corpus(known: Known) -> None:
    spec = known.spec(**DEMO)
    known.draw(spec, sample=1_000)
    known.label()
    source, options = str(known.folder / "sample.csv"), EvalOptions(resamples=1)
    snapshot = contents(LocalStore(known.folder / "out"), 1)
    places = {"cache_dir": known.folder / "cache", "candidate": snapshot}
    evaluation = evaluate(spec, source, GoldOptions(), options, **places)
    for task in evaluation.tasks:
        truth = np.array([LABELS[task.task].index(each) for each in known.truth[task.task]])
        p = known.p[task.task].astype(np.float64)
        expected = task_metrics(truth, p)
        for name, figure in task.versions["raw"].scores.headlines.items():
            assert figure.value == pytest.approx(expected[name], abs=1e-6), name
