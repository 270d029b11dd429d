"""A score, from gold to a report: its figures are scikit-learn's of the label files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from changing_corpus import Corpus
from scipy.stats import spearmanr
from sklearn.metrics import cohen_kappa_score, mean_absolute_error

from pipeline.cli import main

SOURCE = np.random.default_rng(5)
SCORES = SOURCE.integers(0, 3, 80)
TASK: dict[str, Any] = {
    "name": "quality",
    "kind": "score",
    "question": "How good, 0 to 2?",
    "labels": [0, 1, 2],
}


@pytest.fixture
def corpus(modelled: Corpus, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("ASSAY_CACHE", str(modelled.cache))
    texts = ["".join(SOURCE.choice(list("abc"), 5)) + " xyz" * score for score in SCORES]
    modelled.write("d", [f"{n} {text}" for n, text in enumerate(texts)])
    readout = str(modelled.folder / "quality.safetensors")
    modelled.task = {**TASK, "question": None, "readout": readout}
    return modelled


def gold_of(corpus: Corpus, documents: range) -> str:
    file = corpus.folder / f"gold-{documents.start}.csv"
    lines = [f"d-{n},{float(SCORES[n])}" for n in documents]
    file.write_text("\n".join(["id,quality", *lines]))
    return str(file)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_score_from_gold_to_a_report(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(corpus.spec_file)
    fit = call(capsys, "fit", spec, "--gold", gold_of(corpus, range(40)), "--layers", "2")
    assert {"qwk", "mae", "spearman", "auroc"} <= fit["tasks"][0]["scores"].keys()
    corpus.run()
    others = gold_of(corpus, range(40, 80))
    corpus.settings = {"publish": {"gates": ["quality.qwk >= .1", "quality.mae <= 1.5"]}}
    spec = str(corpus.spec_file)
    figures = call(capsys, "eval", spec, "--gold", others)
    assert figures["passed"]
    rows = [corpus.rows()[f"d-{n}"] for n in range(40, 80)]
    truth, expected = SCORES[40:], [row["score"] for row in rows]
    oracle = {
        "qwk": cohen_kappa_score(truth, [int(row["label"]) for row in rows], weights="quadratic"),
        "mae": mean_absolute_error(truth, expected),
        "spearman": spearmanr(truth, expected).statistic,
    }
    headlines = figures["tasks"]["quality"]["scores"]["headlines"]
    assert {name: headlines[name]["value"] for name in oracle} == pytest.approx(oracle, abs=1e-6)

    corpus.settings = {"filter": {"keep": "quality.score >= 1"}}
    spec = str(corpus.spec_file)
    corpus.run()
    page = corpus.folder / "report.html"
    report = call(capsys, "report", spec, "--gold", others, "--to", str(page))
    [task] = report["tasks"]
    scores = [row["score"] for row in corpus.rows().values()]
    assert task["score"]["mean"] == pytest.approx(np.mean(scores), abs=1e-6)
    assert sum(task["score"]["counts"]) == len(scores)
    assert "Mean score" in page.read_text() and "quadratic weighted kappa" in page.read_text()
