"""Several labels at once, from gold to a report: each has a readout and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changing_corpus import Corpus
from sklearn.metrics import f1_score, roc_auc_score

from pipeline.cli import main
from pipeline.fitted.readout import parse_readout

SOURCE = np.random.default_rng(3)
HAS = SOURCE.random((90, 2)) < (0.5, 0.3)  # [documents, labels]
LABELS = ["law", "a/b"]
MARKS = ["xyzxyz", "789789"]
TASK: dict[str, Any] = {
    "name": "topic",
    "kind": "multi",
    "question": "About {label}?",
    "labels": LABELS,
}
CLEAN: dict[str, Any] = {"name": "clean", "question": "Clean?", "labels": ["yes", "no"]}


def text_of(has: np.ndarray) -> str:
    marks = [mark for mark, own in zip(MARKS, has, strict=True) if own]
    noise = "".join(SOURCE.choice(list("abcdef"), 6))
    return " ".join([noise, *marks])


@pytest.fixture
def corpus(modelled: Corpus, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("ASSAY_CACHE", str(modelled.cache))
    modelled.write("d", [text_of(has) for has in HAS])
    modelled.task, modelled.others = TASK, [CLEAN]
    return modelled


def gold_of(corpus: Corpus, documents: range) -> str:
    """The labels of some documents, in one column."""
    lines = [
        {"id": f"d-{n}", "topic": [label for label, own in zip(LABELS, HAS[n], strict=True) if own]}
        for n in documents
    ]
    file = corpus.folder / f"gold-{documents.start}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_several_labels_from_gold_to_a_report(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    readouts = corpus.folder / "readouts"
    corpus.task = {**TASK, "question": None, "readout": str(readouts)}
    spec = str(corpus.spec_file)
    fit = call(capsys, "fit", spec, "--gold", gold_of(corpus, range(50)), "--layers", "2")
    assert [of["task"] for of in fit["tasks"]] == ["topic.law", "topic.a/b"]
    assert {path.name for path in readouts.iterdir()} == {"law.safetensors", "a%2Fb.safetensors"}
    card = parse_readout((readouts / "a%2Fb.safetensors").read_bytes()).card
    assert card.labels == ("yes", "no") and card.task == "topic.a/b"
    assert fit["tasks"][1]["labels"] == {"yes": HAS[:50, 1].sum(), "no": (~HAS[:50, 1]).sum()}

    corpus.run()
    others = gold_of(corpus, range(40, 90))
    gates = ["topic.macro_auroc >= .5", "topic.auroc.a/b >= .5"]
    corpus.settings = {"publish": {"gates": gates}}
    spec = str(corpus.spec_file)
    figures = call(capsys, "eval", spec, "--gold", others)
    assert all(decision["passed"] for decision in figures["gates"]) and len(figures["gates"]) == 2
    assert figures["without_gold"] == ["clean"]
    rows = corpus.rows("topic")
    p = np.array([[rows[f"d-{n}"]["p"][label] for label in LABELS] for n in range(50, 90)])
    truth = HAS[50:]  # — the readouts were fitted to the first 50
    macro = figures["multi"]["topic"]
    assert macro["macro_f1"]["value"] == pytest.approx(f1_score(truth, p >= 0.5, average="macro"))
    auroc = roc_auc_score(truth, p, average="macro")
    assert macro["macro_auroc"]["value"] == pytest.approx(auroc)
    assert auroc > 0.9
    for number, label in enumerate(LABELS):
        own = figures["tasks"][f"topic.{label}"]
        assert own["rows"]["fitted"] == 10 and own["rows"]["evaluated"] == 40
        yes, _ = own["scores"]["labels"]
        assert yes["support"] == truth[:, number].sum()
        assert yes["auroc"] == pytest.approx(roc_auc_score(truth[:, number], p[:, number]))

    spec = str(corpus.spec_file)
    page = corpus.folder / "report.html"
    words = ["report", spec, "--gold", others, "--to", str(page)]
    report = call(capsys, *words)
    counts = report["tasks"][0]["labels"]
    rows = corpus.rows("topic")
    for label in LABELS:
        assert counts[label] == sum(label in row["labels"] for row in rows.values())
    assert "macro AUROC" in page.read_text()
    shown = [each["example"] for each in report["examples"] if each["example"]["task"] == "topic"]
    margins = {
        name: {label: abs(2 * p - 1) for label, p in row["p"].items()} for name, row in rows.items()
    }
    for each in shown:
        own = margins[each["doc_id"]]
        assert own[each["label"]] == min(own.values()) == pytest.approx(each["margin"], abs=1e-6)
    least = sorted(min(own.values()) for own in margins.values())
    assert [each["margin"] for each in shown] == pytest.approx(least[:3], abs=1e-6)


def test_a_label_without_enough_gold_stops_a_fit_by_name(
    corpus: Corpus, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"id": f"d-{n}", "topic": "law" if n % 2 else "-"} for n in range(20)]
    gold = tmp_path / "gold.jsonl"
    gold.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["fit", str(corpus.spec_file), "--gold", str(gold)]) == 2
    said = capsys.readouterr().err
    assert "label 'a/b' of task topic has 0 documents, and one is needed in each of 5" in said
    to = ["--to", str(tmp_path / "one.safetensors")]
    assert (
        main(["fit", str(corpus.spec_file), "--gold", str(gold), "--task", "topic.law", *to]) == 0
    )
    card = parse_readout((tmp_path / "one.safetensors").read_bytes()).card
    assert card.question == "About law?"
    assert "topic: a readout for each label, yes or no" in capsys.readouterr().out
