"""Synthetic scores are reproducible, and readouts find in them what people labelled."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.perspective import ATTRIBUTES, measure, scored_comments
from pipeline.spec.parse import load_spec

REPOSITORY = Path(__file__).parents[2]


def test_the_scores_are_reproducible_and_no_comment_is_on_both_sides(tmp_path: Path) -> None:
    fitted, compared = scored_comments()
    assert (len(fitted.texts), len(compared.texts)) == (699, 300)
    assert not set(fitted.texts) & set(compared.texts)
    assert np.array_equal(scored_comments()[0].scores, fitted.scores)
    threat = fitted.scores[:, list(ATTRIBUTES).index("THREAT")]
    assert threat.min() > 0 and threat.max() < 0.5  # a rare attribute
    fitted.write(file := tmp_path / "new" / "scores.csv")
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert tuple(row["text"] for row in rows) == fitted.texts


def test_the_spec_has_a_task_for_each_attribute_and_its_label_has_the_tasks_name() -> None:
    tasks = load_spec(REPOSITORY / "jobs" / "specs" / "perspective.yaml").tasks
    assert [task.name.upper() for task in tasks] == list(ATTRIBUTES)
    for task in tasks:
        assert task.question is None and task.readout is not None
        assert list(task.labels) == [task.name, "other"]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_readouts_fitted_to_noisy_scores_agree_with_people(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is averaged out: a readout is at least nearly as good as the scores themselves."""
    model = "models/smollm2-135m-instruct.gguf"  # as the spec names it
    (tmp_path / model).parent.mkdir()
    (tmp_path / model).symlink_to(smollm2_gguf)
    (tmp_path / "jobs").symlink_to(REPOSITORY / "jobs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    figures = measure(tmp_path / "out")
    for attribute in ATTRIBUTES:
        of = figures[attribute]
        assert of.people.value is not None and of.scores is not None and of.rank is not None
        assert of.people.value > of.scores - 0.03, attribute
        assert of.rank > 0.3, attribute
    toxicity, people = figures["TOXICITY"].people.value, figures["people's labels"].people.value
    assert toxicity is not None and people is not None and toxicity > 0.93
    assert people > toxicity - 0.01
