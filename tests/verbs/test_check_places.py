"""`assay check` looks at output and input first, leaves nothing behind, and names doubts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calls import Assay, WriteSpec

from pipeline.labeller import Labeller
from pipeline.spec.parse import load_spec


def test_check_leaves_nothing_behind(write_spec: WriteSpec, tmp_path: Path, assay: Assay) -> None:
    new, own = tmp_path / "new" / "out", tmp_path / "own"
    shown = assay("check", write_spec(output=str(new)), "--documents", 0).out
    assert "conditional create works" in shown
    assert "not tested: no answers were compared" in shown
    assert not new.parent.exists()
    own.mkdir()
    spec = write_spec(output=str(own))
    assay("check", spec, "--documents", 0)
    assert list(own.iterdir()) == []
    refused = assay("check", spec, "--documents", -1, code=2).err.splitlines()
    assert refused[-1].startswith("--documents: write a number")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"output": "spec.yaml"}, "output: is a file; name a folder, or a new one (got "),
        ({"output": "spec.yaml/below"}, "output: {folder}/spec.yaml is a file; name a folder, or "),
        ({"input": {"path": "/nowhere"}}, "input.path: names no file"),
        ({"input": {"path": "corpus.jsonl", "text": "body"}}, "input.text: "),
        ({"input": {"path": "empty.jsonl"}}, "input.path: the file has no row; name a file with"),
    ],
)
def test_check_looks_at_the_output_and_the_input_before_the_model(
    changes: dict[str, Any],
    line: str,
    write_spec: WriteSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assay: Assay,
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    monkeypatch.chdir(tmp_path)
    output = str(tmp_path / changes.get("output", "out"))
    spec = write_spec(**{**changes, "output": output, "model": {"path": "/nowhere.gguf"}})
    assert assay("check", spec, code=2).error.startswith(line.replace("{folder}", str(tmp_path)))


def test_a_check_reports_what_the_answers_are_read_from(
    write_spec: WriteSpec, tmp_path: Path, assay: Assay
) -> None:
    corpus = tmp_path / "texts.jsonl"
    texts = ["Hello.", "Another text, and a longer one."]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task = {"name": "t", "question": "Which?", "labels": {"sports": ["sports"], "no": ["no", "n"]}}
    spec = write_spec(input={"path": str(corpus)}, tasks=[task])
    result = assay("check", spec, "--json").json
    rows = Labeller(load_spec(spec)).label(texts)["t"].to_pylist()
    facts = result["answers"]["t"]
    assert facts["mass"] == pytest.approx(max(row["mass"] for row in rows), rel=1e-4)
    # — a token of the toy model is a byte, so that a label is read by its first letter
    assert facts["fragments"] == {"sports": "s"}
    [warning, *_] = result["warnings"]
    assert warning.startswith("t: labels are scored by the first letters of a word: 's")
    assert f"warning: {warning}" in assay("check", spec).out


@pytest.mark.parametrize(("column", "repeated"), [("id", 2), ("own", 0), (None, 0)])
def test_a_check_warns_of_ids_that_several_documents_have(
    column: str | None, repeated: int, write_spec: WriteSpec, tmp_path: Path, assay: Assay
) -> None:
    corpus = tmp_path / "ids.jsonl"
    rows = [{"id": id, "own": n, "text": f"text {n}"} for n, id in enumerate("aba")]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = write_spec(input={"path": str(corpus), "id": column})
    result = assay("check", spec, "--documents", 0, "--json").json
    assert result["repeated_ids"] == repeated
    line = "input.id: 2 of the first 3 documents share their id with another document"
    assert any(each.startswith(line) for each in result["warnings"]) == bool(repeated)


def test_a_question_of_several_labels_that_names_none_is_shown_as_it_is_asked(
    write_spec: WriteSpec, assay: Assay
) -> None:
    plain = {"name": "topic", "kind": "multi", "question": "What is it?", "labels": ["law", "art"]}
    named = {**plain, "name": "other", "question": "Is it {label}?", "labels": ["law", "art"]}
    shown = assay("check", write_spec(tasks=[plain, named]), "--prompts").words
    assert shown.count("asked of each label:") == 1
    assert "topic asked of each label: What is it? {label}: yes or no" in shown
    assert "What is it? art: yes or no" in shown
