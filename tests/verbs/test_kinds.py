"""Several labels at once, and a score: from gold to a report, by scikit-learn's figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import Assay
from changing_corpus import Corpus
from judged import write_rows
from scipy.stats import spearmanr
from sklearn.metrics import cohen_kappa_score, f1_score, mean_absolute_error, roc_auc_score

from pipeline.fitted.readout import parse_readout

SOURCE = np.random.default_rng(3)
HAS = SOURCE.random((90, 2)) < (0.5, 0.3)  # [documents, labels]
MARKED = SOURCE.integers(0, 3, 90)
SCORES = np.where(SOURCE.random(90) < 0.2, SOURCE.integers(0, 3, 90), MARKED)  # a fifth is noise
LABELS = ["law", "a/b"]
MARKS = ["xyzxyz", "789789"]
TOPIC: dict[str, Any] = {"name": "topic", "kind": "multi", "labels": LABELS}
QUALITY: dict[str, Any] = {"name": "quality", "kind": "score", "labels": [0, 1, 2]}
CLEAN: dict[str, Any] = {"name": "clean", "question": "Clean?", "labels": ["yes", "no"]}


def text_of(has: np.ndarray, score: int) -> str:
    marks = [mark for mark, own in zip(MARKS, has, strict=True) if own]
    noise = "".join(SOURCE.choice(list("abcdef"), 6))
    return " ".join([noise, *marks]) + " ++++" * score


@pytest.fixture
def corpus(modelled: Corpus) -> Corpus:
    modelled.write("d", [text_of(*of) for of in zip(HAS, MARKED.tolist(), strict=True)])
    modelled.task, modelled.others = {**TOPIC, "question": "About {label}?"}, [CLEAN]
    return modelled


def gold_of(corpus: Corpus, documents: range) -> str:
    """The labels and the scores of some documents."""
    lines = []
    for n in documents:
        labels = [label for label, own in zip(LABELS, HAS[n], strict=True) if own]
        lines.append({"id": f"d-{n}", "topic": labels, "quality": float(SCORES[n])})
    return write_rows(corpus.folder / f"gold-{documents.start}.jsonl", lines)


def test_several_labels_and_a_score_from_gold_to_a_report(corpus: Corpus, assay: Assay) -> None:
    readouts, page = corpus.folder / "readouts", corpus.folder / "report.html"
    corpus.task = {**TOPIC, "readout": str(readouts)}
    corpus.before = [{**QUALITY, "readout": str(corpus.folder / "quality.safetensors")}]
    gold, others = gold_of(corpus, range(50)), gold_of(corpus, range(40, 90))
    fit = assay("fit", corpus.spec_file, "--gold", gold, "--layers", 2, "--json").json["tasks"]
    assert [of["task"] for of in fit] == ["quality", "topic.law", "topic.a/b"]
    assert {"qwk", "mae", "spearman", "auroc"} <= fit[0]["scores"].keys()
    assert fit[2]["labels"] == {"yes": HAS[:50, 1].sum(), "no": (~HAS[:50, 1]).sum()}
    assert {path.name for path in readouts.iterdir()} == {"law.safetensors", "a%2Fb.safetensors"}
    card = parse_readout((readouts / "a%2Fb.safetensors").read_bytes()).card
    assert card.labels == ("yes", "no") and card.task == "topic.a/b"

    corpus.run()
    gates = ["topic.macro_auroc >= .5", "topic.auroc.a/b >= .5"]
    gates += ["quality.qwk >= .1", "quality.mae <= 1.5"]
    rule = {"keep": "quality.score >= 1"}
    corpus.settings = {"publish": {"gates": gates}, "filter": rule}
    figures = assay("eval", corpus.spec_file, "--gold", others, "--json").json
    assert [decision["passed"] for decision in figures["gates"]] == [True] * 4
    assert figures["without_gold"] == ["clean"]
    of_label = "eval", corpus.spec_file, "--gold", others, "--task", "topic.a/b", "--json"
    only = assay(*of_label).json  # — the others, and the means over all labels, are not judged
    assert [decision["gate"] for decision in only["gates"]] == gates[1:2]
    assert only["without_gold"] == []
    rows, scores = corpus.rows("topic"), corpus.rows("quality")
    p = np.array([[rows[f"d-{n}"]["p"][label] for label in LABELS] for n in range(50, 90)])
    truth = HAS[50:]  # — the readouts were fitted to the first 50
    expected = {
        "macro_f1": f1_score(truth, p >= 0.5, average="macro"),
        "macro_auroc": roc_auc_score(truth, p, average="macro"),
    }
    assert expected["macro_auroc"] > 0.9
    assert_figures(figures["multi"]["topic"], expected)
    for number, label in enumerate(LABELS):
        own = figures["tasks"][f"topic.{label}"]
        assert own["rows"]["fitted"] == 10 and own["rows"]["evaluated"] == 40
        yes, _ = own["scores"]["labels"]
        assert yes["support"] == truth[:, number].sum()
        assert yes["auroc"] == pytest.approx(roc_auc_score(truth[:, number], p[:, number]))
    answered = [scores[f"d-{n}"] for n in range(50, 90)]
    means, best = [row["score"] for row in answered], [int(row["label"]) for row in answered]
    of_score = {
        "qwk": cohen_kappa_score(SCORES[50:], best, weights="quadratic"),
        "mae": mean_absolute_error(SCORES[50:], means),
        "spearman": spearmanr(SCORES[50:], means).statistic,
    }
    assert_figures(figures["tasks"]["quality"]["scores"]["headlines"], of_score)

    words = "report", corpus.spec_file, "--gold", others, "--to", page
    report = assay(*words, "--json").json
    quality, topic, _ = report["tasks"]
    for label in LABELS:
        assert topic["labels"][label] == sum(label in row["labels"] for row in rows.values())
    mean = np.mean([row["score"] for row in scores.values()])
    assert quality["score"]["mean"] == pytest.approx(mean, abs=1e-6)
    assert sum(quality["score"]["counts"]) == len(scores)
    for name in ("macro AUROC", "Mean score", "quadratic weighted kappa"):
        assert name in page.read_text()
    shown = [each["example"] for each in report["examples"] if each["example"]["task"] == "topic"]
    margins = {
        name: {label: abs(2 * p - 1) for label, p in row["p"].items()} for name, row in rows.items()
    }
    for each in shown:
        own = margins[each["doc_id"]]
        assert own[each["label"]] == min(own.values()) == pytest.approx(each["margin"], abs=1e-6)
    least = sorted(min(own.values()) for own in margins.values())
    assert [each["margin"] for each in shown] == pytest.approx(least[:3], abs=1e-6)


def assert_figures(figures: dict[str, Any], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        figure = figures[name]
        assert figure["value"] == pytest.approx(value, abs=1e-6), name
        assert figure["low"] < value <= figure["high"], name


def test_a_label_without_enough_gold_stops_a_fit_by_name(corpus: Corpus, assay: Assay) -> None:
    gold, to = corpus.folder / "gold.csv", corpus.folder / "one.safetensors"
    rows = [f"d-{n},{'law' if n % 2 else '-'}" for n in range(20)]
    gold.write_text("\n".join(["id,topic", *rows]))
    command = "fit", corpus.spec_file, "--gold", gold
    error = assay(*command, code=2).err
    assert "label 'a/b' of task topic has 0 documents, and one is needed in each of 5" in error
    shown = assay(*command, "--task", "topic.law", "--to", to).out
    assert "topic: a readout for each label, yes or no" in shown
    assert parse_readout(to.read_bytes()).card.task == "topic.law"
