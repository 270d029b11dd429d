"""`assay check` warns of answers and ids that mean little."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.labeller import Labeller
from pipeline.spec.parse import load_spec

WriteSpec = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


def test_a_check_says_what_the_answers_are_read_from_and_whether_they_depend_on_the_document(
    write_spec: WriteSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "texts.jsonl"
    texts = ["Hello.", "Another text, and a longer one."]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task = {"name": "t", "question": "Which?", "labels": {"sports": ["sports"], "no": ["no", "n"]}}
    spec = write_spec(input={"path": str(corpus)}, tasks=[task])
    assert main(["check", str(spec), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = Labeller(load_spec(spec)).label([*texts, "N/A", "[MASK]"])["t"].to_pylist()
    p = np.array([[row["p"][label] for label in task["labels"]] for row in rows])
    distance = max(abs(one - p[2:].mean(axis=0)).sum() / 2 for one in p[:2])
    facts = found["answers"]["t"]
    assert facts["mass"] == pytest.approx(max(row["mass"] for row in rows[:2]), rel=1e-4)
    assert facts["distance"] == pytest.approx(distance, abs=1e-5)
    # — a token of the toy model is a byte, so that a label is read by its first letter
    assert facts["fragments"] == {"sports": "s"}
    start = "t: labels are scored by the first letters of a word: 's"
    assert found["warnings"][0].startswith(start)
    assert main(["check", str(spec)]) == 0
    assert f"warning: {found['warnings'][0]}" in capsys.readouterr().out


@pytest.mark.parametrize(("column", "repeated"), [("id", 2), ("own", 0), (None, 0)])
def test_a_check_warns_of_ids_that_several_documents_have(
    column: str | None,
    repeated: int,
    write_spec: WriteSpec,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus = tmp_path / "ids.jsonl"
    rows = [{"id": id, "own": n, "text": f"text {n}"} for n, id in enumerate("aba")]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = write_spec(input={"path": str(corpus), "id": column})
    assert main(["check", str(spec), "--documents", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["repeated_ids"] == repeated
    line = "input.id: 2 of the first 3 documents share their id with another document"
    assert any(each.startswith(line) for each in found["warnings"]) == bool(repeated)


def test_a_question_of_several_labels_that_names_none_is_shown_as_it_is_asked(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"name": "topic", "kind": "multi", "question": "What is it?", "labels": ["law", "art"]}
    named = {**plain, "name": "other", "question": "Is it {label}?", "labels": ["law", "art"]}
    spec = write_spec(tasks=[plain, named])
    assert main(["check", str(spec), "--prompts"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("asked of each label:") == 1
    assert "topic asked of each label: What is it? {label}: yes or no" in shown
    assert "What is it? art: yes or no" in shown
