"""Two specs on the same gold rows: both figures, and the difference with its interval."""

from __future__ import annotations

import numpy as np
import pytest
from judged import Bench
from sklearn.metrics import roc_auc_score

from pipeline.evaluation.metrics import paired


@pytest.mark.parametrize("labels", [["clean", "toxic"], ["toxic", "clean"]])
def test_both_are_judged_by_the_same_rows_and_the_difference_has_an_interval(
    labels: list[str], bench: Bench
) -> None:
    spec, other = bench.spec.read_text(), bench.folder / "other.yaml"
    asked = [{"name": "toxic", "question": "Ruder?", "labels": labels}]
    assert bench.finish_as(output=str(bench.folder / "other"), tasks=asked, name="other") == 1
    other.write_text(bench.spec.read_text())
    bench.spec.write_text(spec)
    words = bench.write(bench.gold()), "--against", other
    report = bench.evaluate(*words, "--json").json
    comparison = report["against"]["tasks"]["toxic"]
    assert report["against"]["tasks"].keys() == {"toxic"} and report["against"]["spec"] == "other"
    assert comparison["rows"] == report["tasks"]["toxic"]["rows"]["evaluated"]
    for metric, both in comparison["figures"].items():
        figure = report["tasks"]["toxic"]["scores"]["headlines"][metric]
        assert both["value"] == pytest.approx(figure["value"]), metric
        difference = both["difference"]
        assert difference["value"] == pytest.approx(both["value"] - both["other"])
        assert difference["low"] < difference["value"] < difference["high"]
    alone = bench.assay("eval", other, "--gold", words[0], "--json").json["tasks"]["toxic"]
    for metric in ("accuracy", "f1", "auroc", "brier"):  # — the same for either order of labels
        figure = alone["scores"]["headlines"][metric]
        assert comparison["figures"][metric]["other"] == pytest.approx(figure["value"]), metric
    shown = bench.evaluate(*words).out
    assert f"toxic: both on the same {comparison['rows']} documents" in shown
    assert "not compared: topic" in shown
    # — where the gold judges nothing, there is nothing to compare, and the other spec is not wrong
    elsewhere = [row for row in bench.gold() if row["id"].startswith("other-")]
    nothing = bench.evaluate(bench.write(elsewhere), "--against", other, "--json", code=1).json
    assert nothing["against"] is None and not nothing["is_judged"]


def test_a_spec_without_such_answers_is_named(bench: Bench) -> None:
    other, content = bench.folder / "other.yaml", bench.spec.read_text()
    cases = {
        content.replace("name: toxic", "name: rude").replace("name: topic", "name: theme"): (
            "--against: has no task toxic or topic with the same labels"
        ),
        content.replace("question: ", "question: Now, "): f"{other}: question changed since",
        "name: [": f"{other}: is not plain YAML",
    }
    for text, line in cases.items():
        other.write_text(text)
        error = bench.evaluate(bench.write(bench.gold()), "--against", other, code=2).err
        assert error.startswith(line) and str(bench.spec) not in error, error


def answers(skill: float, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    truth = source.integers(0, 2, rows)
    first = 1 / (1 + np.exp(-(skill * (1 - 2 * truth) + source.normal(0, 1, rows))))
    return truth, np.stack([first, 1 - first], axis=1)


def test_the_interval_of_the_difference_holds_the_truth() -> None:
    """Of one kind of answers with more noise added; the truth is that of 200,000 rows."""

    def noisier(p: np.ndarray, seed: int) -> np.ndarray:
        logits = np.log(p[:, 0] / p[:, 1])
        first = 1 / (1 + np.exp(-(logits + np.random.default_rng(seed).normal(0, 1, len(p)))))
        return np.stack([first, 1 - first], axis=1)

    truth, p = answers(1.0, 200_000, 0)
    other = noisier(p, 1)
    expected = {
        "accuracy": float(((p.argmax(1) == truth) * 1.0 - (other.argmax(1) == truth)).mean()),
        "auroc": roc_auc_score(truth == 0, p[:, 0]) - roc_auc_score(truth == 0, other[:, 0]),
    }
    held = dict.fromkeys(expected, 0)
    for seed in range(100):
        truth, p = answers(1.0, 150, 10 + seed)
        result = paired(truth, p, noisier(p, 500 + seed), resamples=100)
        for name, value in expected.items():
            figure = result.figures[name].difference
            assert figure.low is not None and figure.high is not None
            held[name] += figure.low <= value <= figure.high
    assert all(times >= 89 for times in held.values()), held


def test_equal_answers_may_differ_on_rows_that_were_not_seen() -> None:
    truth, p = answers(1.0, 50, 3)
    result = paired(truth, p, p, resamples=20)
    for pair in result.figures.values():
        assert pair.difference.value == 0 and pair.difference.low is not None
        assert pair.difference.low < 0
