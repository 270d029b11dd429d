"""Answers to an older wording, or of another model than the spec's, are named by each verb."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from calls import Assay, WriteSpec
from finished import LABELS, Corpus, finish, label_file

from pipeline.ledger.label_files import LabelFile
from pipeline.options import ReviewOptions
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.sources.shards import Shard
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore
from pipeline.verbs.review import open_review

VERBS = {
    "head": ["export", "--head=9"],
    "export": ["export", "--to", "labels.parquet"],
    "dry run": ["filter", "--dry-run"],
    "filter": ["filter", "--to", "kept"],
    "report": ["report", "--to", "report.html"],
    "status": ["status"],
}
Line = Callable[..., str]


@pytest.fixture
def run(
    tmp_path: Path,
    model_folder: Path,
    write_spec: WriteSpec,
    monkeypatch: pytest.MonkeyPatch,
    assay: Assay,
    caplog: pytest.LogCaptureFixture,
) -> Line:
    """Labels a corpus, changes the spec, runs a verb, and returns what it logged and printed."""
    monkeypatch.chdir(tmp_path)
    models = {name: tmp_path / name for name in ("first", "second", "third")}
    for folder in models.values():
        shutil.copytree(model_folder, folder)
    file = models["second"] / "model.safetensors"
    weights = {name: values + 1 for name, values in safetensors.numpy.load_file(file).items()}
    safetensors.numpy.save_file(weights, file, metadata={"format": "pt"})
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    content: dict[str, Any] = {
        "name": "job",
        "model": {"path": "first", "dtype": "float32"},
        "input": {"path": "in", "id": "id"},
        "output": "out",
        "tasks": [{"name": n, "question": "?", "labels": list(of)} for n, of in LABELS.items()],
        "filter": {"keep": "toxic.p.toxic < 0.5", "on_error": "keep"},
    }
    spec = load_spec(write_spec(**content))
    job = make_job(spec, Placement("cpu", "float32", 1, 1), tmp_path / "cache")

    def answer(shard: Shard, task: str, fingerprint: Fingerprint) -> LabelFile:
        file = label_file(shard, task, fingerprint)
        metadata = job.metadata(fingerprint, [step for step in job.steps if step.task == task])
        return LabelFile(task, file.fp, file.sid, file.rows, metadata)

    store = LocalStore(tmp_path / "out")
    finish(store, corpus.shards(store), job.fingerprints, answer=answer)

    def printed(verb: str, *words: str, **changes: Any) -> str:
        name, *options = VERBS[verb]
        shown = assay(name, write_spec(**{**content, **changes}), *options, *words)
        return "\n".join([*caplog.messages, shown.out, shown.err])

    return printed


def older(text: str) -> list[str]:
    return [line for line in text.splitlines() if "an older wording of the spec" in line]


def tasks(**changes: Any) -> list[dict[str, Any]]:
    return [
        {"name": name, "question": "?", "labels": list(of), **(changes if name == "toxic" else {})}
        for name, of in LABELS.items()
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_names_answers_to_an_older_question_and_the_model_that_answered(
    run: Line, verb: str
) -> None:
    [line] = older(run(verb, tasks=tasks(question="Rude?")))
    assert "warning: toxic: these are answers of first to an older wording" in line
    assert "differs in question. A run (assay run) publishes" in line


@pytest.mark.parametrize("by", [{"task": "toxic"}, {"order": "audit"}])
def test_a_review_of_answers_to_an_older_question_says_so(
    by: dict[str, Any], run: Line, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    run("head", tasks=tasks(question="Rude?"))
    caplog.clear()
    options = ReviewOptions(str(tmp_path / "gold.jsonl"), **by)
    with open_review(load_spec(tmp_path / "spec.yaml"), options, cache_dir=tmp_path / "cache"):
        [line] = older("\n".join(caplog.messages))
    assert "warning: toxic: these are answers of first to an older wording" in line


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_doubts_answers_to_the_spec_as_it_is(run: Line, verb: str) -> None:
    assert not older(run(verb))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model": {"path": "second", "dtype": "float32"}}, "the model"),
        ({"model": {"path": "some/other-model", "dtype": "float32"}}, "the model"),
        ({"model": {"path": "s3://bucket/model", "dtype": "float32"}}, "the model"),
        ({"model": {"path": "first", "dtype": "bfloat16"}}, "dtype"),
        ({"model": {"path": "first", "dtype": "float32", "kv": "int8"}}, "kv"),
        ({"prompt": {"instruction": "Read with care."}}, "prompt"),
        ({"documents": {"max_tokens": 7}}, "documents"),
    ],
)
def test_what_all_tasks_share_is_named_for_each(
    run: Line, changes: dict[str, Any], names: str
) -> None:
    lines = older(run("head", **changes))
    assert len(lines) == 2 and all(f"differs in {names}. A run" in line for line in lines)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"path": "third", "dtype": "float32"}},  # the same files in another folder
        {"model": {"path": "first", "dtype": "auto"}},
        {"max_error_rate": 0.5},
        {"filter": {"keep": "toxic.p.toxic < 0.1", "on_error": "keep"}},
    ],
)
def test_what_changes_no_answer_is_no_reason_for_doubt(run: Line, changes: dict[str, Any]) -> None:
    assert not older(run("filter", **changes))


def test_a_file_that_is_missing_now_is_one_line_and_no_error(run: Line) -> None:
    printed = run("head", tasks=tasks(readout="nowhere.safetensors"))
    [line] = [line for line in printed.splitlines() if "warning: " in line]
    assert "cannot be compared with the current spec: tasks.0.readout: " in line


def test_the_report_names_the_model_that_answered(run: Line, tmp_path: Path) -> None:
    printed = run("report", model={"path": "second", "dtype": "float32"})
    page = unescape((tmp_path / "report.html").read_text())
    [row] = [line for line in printed.splitlines() if line.startswith("model ")]
    assert row.split() == ["model", "first"] and len(older(printed)) == 2
    assert "<dd>first</dd>" in page and page.count("to an older wording of the spec") == 2
    result = json.loads(re.search(r"^{.*}$", run("report", "--json", "--overwrite"), re.M)[0])  # type: ignore[index]
    assert result["model"] == "first" and not older("\n".join(result["warnings"]))


def test_a_model_of_the_hub_that_answered_is_named_with_its_revision(
    write_spec: WriteSpec,
) -> None:
    spec = load_spec(write_spec(model={"path": "org/model", "revision": "v1"}))
    assert spec.model.name == "org/model@v1"
