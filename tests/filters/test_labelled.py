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
    "export": ["export", "--to", "labels.parquet", "--overwrite"],
    "dry run": ["filter", "--dry-run"],
    "filter": ["filter", "--to", "kept"],
    "report": ["report", "--to", "report.html", "--overwrite"],
    "status": ["status"],
}
CONTENT: dict[str, Any] = {
    "name": "job",
    "model": {"path": "first", "dtype": "float32"},
    "input": {"path": "in", "id": "id"},
    "output": "out",
    "tasks": [{"name": n, "question": "?", "labels": list(of)} for n, of in LABELS.items()],
    "filter": {"keep": "toxic.p.toxic < 0.5", "on_error": "keep"},
}
Line = Callable[..., str]


def write_spec_in(folder: Path, **changes: Any) -> Path:
    file = folder / "spec.yaml"
    file.write_text(json.dumps({**CONTENT, **changes}))
    return file


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A corpus that the model `first` labelled, with another model and a copy of the first one."""
    root = tmp_path_factory.mktemp("labelled")
    models = {name: root / name for name in ("first", "second", "third")}
    for folder in models.values():
        shutil.copytree(model_folder, folder)
    file = models["second"] / "model.safetensors"
    weights = {name: values + 1 for name, values in safetensors.numpy.load_file(file).items()}
    safetensors.numpy.save_file(weights, file, metadata={"format": "pt"})
    corpus = Corpus(root / "in", root / "cache")
    corpus.write()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)  # a model's path is named as seen from here
        spec = load_spec(write_spec_in(root))
        job = make_job(spec, Placement("cpu", "float32", 1, 1), root / "cache")

    def answer(shard: Shard, task: str, fingerprint: Fingerprint) -> LabelFile:
        file = label_file(shard, task, fingerprint)
        metadata = job.metadata(fingerprint, [step for step in job.steps if step.task == task])
        return LabelFile(task, file.fp, file.sid, file.rows, metadata)

    store = LocalStore(root / "out")
    finish(store, corpus.shards(store), job.fingerprints, answer=answer)
    return root


@pytest.fixture
def run(
    labelled: Path, monkeypatch: pytest.MonkeyPatch, assay: Assay, caplog: pytest.LogCaptureFixture
) -> Line:
    """Runs a verb with a changed spec, and returns what it logged and printed."""
    monkeypatch.chdir(labelled)
    shutil.rmtree("kept", ignore_errors=True)

    def printed(verb: str, *words: str, **changes: Any) -> str:
        caplog.clear()
        name, *options = VERBS[verb]
        shown = assay(name, write_spec_in(labelled, **changes), *options, *words)
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
def test_each_verb_names_answers_to_an_older_question_alone_and_the_model_that_answered(
    run: Line, verb: str
) -> None:
    assert not older(run(verb))
    [line] = older(run(verb, tasks=tasks(question="Rude?")))
    assert "warning: toxic: these are answers of first to an older wording" in line
    assert "differs in question. A run (assay run) publishes" in line


@pytest.mark.parametrize("by", [{"task": "toxic"}, {"order": "audit"}])
def test_a_review_of_answers_to_an_older_question_logs_a_warning(
    by: dict[str, Any],
    labelled: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(labelled)
    spec = load_spec(write_spec_in(labelled, tasks=tasks(question="Rude?")))
    options = ReviewOptions(str(tmp_path / "gold.jsonl"), **by)
    with open_review(spec, options, cache_dir=tmp_path / "cache"):
        [line] = older("\n".join(caplog.messages))
    assert "warning: toxic: these are answers of first to an older wording" in line


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
    assert not older(run("head", **changes))


def test_a_file_that_is_missing_now_is_one_line_and_no_error(run: Line) -> None:
    printed = run("head", tasks=tasks(readout="nowhere.safetensors"))
    [line] = [line for line in printed.splitlines() if "warning: " in line]
    assert "cannot be compared with the current spec: tasks.0.readout: " in line


def test_the_report_names_the_model_that_answered(run: Line, labelled: Path) -> None:
    printed = run("report", model={"path": "second", "dtype": "float32"})
    page = unescape((labelled / "report.html").read_text())
    [row] = [line for line in printed.splitlines() if line.startswith("model ")]
    assert row.split() == ["model", "first"] and len(older(printed)) == 2
    assert "<dd>first</dd>" in page and page.count("to an older wording of the spec") == 2
    result = json.loads(re.search(r"^{.*}$", run("report", "--json"), re.M)[0])  # type: ignore[index]
    assert result["model"] == "first" and not older("\n".join(result["warnings"]))


def test_a_model_of_the_hub_that_answered_is_named_with_its_revision(
    write_spec: WriteSpec,
) -> None:
    spec = load_spec(write_spec(model={"path": "org/model", "revision": "v1"}))
    assert spec.model.name == "org/model@v1"
