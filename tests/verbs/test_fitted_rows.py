"""Rows that an answer was fitted to are no evidence, in whichever command they come again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from stages import run_without_ray

from pipeline.cli import main
from pipeline.gold.answers import GoldAnswers, GoldTaskAnswers
from pipeline.gold.fitted_texts import LEAST_ROWS, is_held_out
from pipeline.gold.labels import Gold, GoldCounts
from pipeline.gold.values import GoldTask
from pipeline.options import EvalOptions
from pipeline.spec.tasks import QuestionTask
from pipeline.verbs.evaluate import TaskEvaluation, _evaluate_task

DOCUMENTS = 120


class Corpus:
    """Documents with random labels, and a spec whose task has a readout of the document."""

    def __init__(self, folder: Path, write_spec: Callable[..., Path]) -> None:
        source = np.random.default_rng(0)
        self.folder, self._write_spec = folder, write_spec
        self.texts = ["".join(source.choice(list("abcdefgh"), 12)) for _ in range(DOCUMENTS)]
        self.labels = source.choice(["toxic", "clean"], DOCUMENTS).tolist()
        self._write("corpus", [{"id": f"d{n}", "text": t} for n, t in enumerate(self.texts)])
        self.spec = self.spec_with()

    def spec_with(self, **task: Any) -> Path:
        readout = {"question": None, "readout": str(self.folder / "toxic.safetensors")}
        toxic = {"name": "toxic", "labels": ["toxic", "clean"], **readout, **task}
        return self._write_spec(
            input={"path": str(self.folder / "corpus.jsonl"), "id": "id"},
            documents={"max_tokens": 64},
            tasks=[toxic],
            gold={"text": "text"},
        )

    def gold(self, name: str, rows: range, **more: str) -> str:
        """Gold labels of these documents, by text: another file, with other ids."""
        content = [
            {"id": f"other-{n}", "text": self.texts[n], "toxic": self.labels[n], **more}
            for n in rows
        ]
        return self._write(name, content)

    def _write(self, name: str, rows: list[dict[str, str]]) -> str:
        file = self.folder / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(file)


@pytest.fixture
def corpus(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Corpus:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    run_without_ray(monkeypatch)
    return Corpus(tmp_path, write_spec)


def evaluated(
    corpus: Corpus, gold: str, capsys: pytest.CaptureFixture[str], *more: str, code: int = 0
) -> dict[str, Any]:
    words = ["eval", str(corpus.spec), "--gold", gold]
    capsys.readouterr()
    assert main([*words, *more, "--json"]) == code
    task: dict[str, Any] = json.loads(capsys.readouterr().out)["tasks"]["toxic"]
    return task


def test_after_fit_and_run_the_same_gold_judges_nothing_in_any_command(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = corpus.gold("gold", range(100))
    fit = ["fit", str(corpus.spec), "--gold", gold, "--layers", "1"]
    assert main(fit) == 0
    assert main(["run", str(corpus.spec)]) == 0
    # — before, the accuracy of random labels was near 1 here
    content = yaml.safe_load(corpus.spec.read_text())
    publish = {"gates": ["toxic.accuracy >= 0"]}
    corpus.spec.write_text(yaml.safe_dump({**content, "publish": publish}))
    task = evaluated(corpus, gold, capsys, code=1)
    assert task["scores"] is None and task["rows"]["fitted"] == 100
    words = ["eval", str(corpus.spec), "--gold", gold]
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "100 left out, because the readout or the cascade was fitted to them" in shown
    assert "warning: toxic: nothing is judged" in shown and shown.count("AUROC") == 1
    assert "toxic: by cross-validation of the fit itself: AUROC 0." in shown
    page = corpus.folder / "page.html"
    report = ["report", str(corpus.spec), "--gold", gold, "--to", str(page)]
    assert main([*report, "--json"]) == 0
    quality = json.loads(capsys.readouterr().out)["quality"]["tasks"]["toxic"]
    assert quality["scores"] is None and "nothing is judged" in page.read_text()


def test_a_superset_is_judged_by_its_other_rows_if_there_are_enough(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = corpus.gold("fitted", range(60))
    assert main(["fit", str(corpus.spec), "--gold", fitted, "--layers", "1"]) == 0
    assert main(["run", str(corpus.spec)]) == 0
    few = evaluated(corpus, corpus.gold("few", range(60 + LEAST_ROWS - 1)), capsys, code=1)
    assert few["scores"] is None and few["rows"]["evaluated"] == LEAST_ROWS - 1
    assert few["cross_validated"]["auroc"]["value"] is not None
    enough = evaluated(corpus, corpus.gold("enough", range(60 + LEAST_ROWS)), capsys)
    assert enough["rows"] | {"fitted": 60, "evaluated": LEAST_ROWS} == enough["rows"]
    alone = evaluated(corpus, corpus.gold("alone", range(60, 60 + LEAST_ROWS)), capsys)
    assert enough["scores"] == alone["scores"] and alone["rows"]["fitted"] == 0
    accuracy = enough["scores"]["headlines"]["accuracy"]
    assert accuracy["low"] <= 0.5 <= accuracy["high"], "the labels are random"


def test_rows_that_a_fit_holds_out_are_judged_without_being_told(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = corpus.gold("gold", range(DOCUMENTS))
    fit = ["fit", str(corpus.spec), "--gold", gold, "--layers", "1", "--json"]
    assert main([*fit, "--hold-out", "0.4"]) == 0
    report = json.loads(capsys.readouterr().out)
    held_out = report["left_out"]["held out for assay eval"]
    assert 35 <= held_out <= 61 and report["tasks"][0]["rows"] == DOCUMENTS - held_out
    assert main(["run", str(corpus.spec)]) == 0
    task = evaluated(corpus, gold, capsys)
    assert task["rows"]["evaluated"] == held_out


def test_the_share_that_is_held_out_follows_from_the_texts_alone() -> None:
    hashes = [f"{n:032x}" for n in range(4_000)]
    parts = {share: {h for h in hashes if is_held_out(h, share)} for share in (0.0, 0.2, 0.5)}
    assert not parts[0.0] and parts[0.2] < parts[0.5]
    assert abs(len(parts[0.2]) - 800) < 4 * np.sqrt(4_000 * 0.2 * 0.8)
    assert {h for h in reversed(hashes) if is_held_out(h, 0.2)} == parts[0.2]


Floats = NDArray[np.float64]


def judged(hashes: list[str], fitted: list[str], truth: NDArray[np.int64], p: Floats) -> Any:
    """The evaluation of answers of which some were fitted to the gold."""
    keys = tuple(hashes)
    gold = Gold(
        GoldCounts("gold", "content_hash", len(keys)),
        keys,
        {"t": GoldTask(("a", "b"), truth)},
        None,
    )
    names = np.array(hashes, object)
    answer = GoldTaskAnswers(p, np.full(len(names), "ok", object))
    answers = GoldAnswers(names, names, np.ones(len(names), np.int64), {"t": answer})
    task = QuestionTask(name="t", question="?", labels=list(gold.tasks["t"].labels))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipeline.gold.answers.fitted_texts", lambda _spec, _task: set(fitted))
        return _evaluate_task(cast(Any, None), task, gold, answers, EvalOptions())


def test_the_intervals_hold_the_truth_where_four_fifths_of_the_gold_were_fitted_to() -> None:
    """200 times: fit to 80 % of 400 rows, judge by all; the truth is that of 20,000 documents."""
    dimensions, held, naive = 40, {"accuracy": 0, "auroc": 0}, 0
    direction = np.random.default_rng(0).normal(size=dimensions) * 0.18

    def documents(source: np.random.Generator, rows: int) -> tuple[Floats, NDArray[np.int64]]:
        states = source.normal(size=(rows, dimensions))
        return states, (source.random(rows) > 1 / (1 + np.exp(states @ direction))).astype(np.int64)

    corpus, corpus_truth = documents(np.random.default_rng(1), 20_000)
    names = [f"{n:032x}" for n in range(400)]
    for seed in range(200):
        states, truth = documents(np.random.default_rng(100 + seed), 400)
        model = LogisticRegression(C=10.0).fit(states[:320], truth[:320])
        task: TaskEvaluation = judged(names, names[:320], truth, model.predict_proba(states))
        assert task.rows.fitted == 320 and task.rows.evaluated == 80
        p = model.predict_proba(corpus)
        whole = {
            "accuracy": float((p.argmax(axis=1) == corpus_truth).mean()),
            "auroc": float(roc_auc_score(corpus_truth, p[:, 1])),
        }
        assert task.scores is not None
        for name in held:
            figure = task.scores.headlines[name]
            assert figure.low is not None and figure.high is not None
            held[name] += figure.low <= whole[name] <= figure.high
        all_rows = judged(names, [], truth, model.predict_proba(states)).scores
        low = all_rows.headlines["accuracy"].low
        naive += low is not None and low > whole["accuracy"]
    assert all(184 <= times <= 196 for times in held.values()), held
    assert naive > 100, "of all rows, most intervals are above the truth"
