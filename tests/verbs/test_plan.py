"""A plan counts, and extrapolates from a few documents what the rest would take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finished import commit_all

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.options import PlanOptions
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Machine, place, this_machine
from pipeline.runtime.plan import plan
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore
from pipeline.verbs import plan as planning
from pipeline.verbs.plan import estimate

ROWS = 12
ALONE = {"name": "tone", "question": "Kind?", "labels": ["yes", "no"]}


class Clock:
    """A model's time that is known: a second for each task of each document, on these cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, cores: int = 1) -> None:
        self.now = 0.0
        machine = Machine(gpus=(), cores=(cores,))
        monkeypatch.setattr(planning, "this_machine", lambda: machine)
        label_rows = planning.ShardAnswers.label_rows

        def counted(answers: planning.ShardAnswers, engine: Any, start: int, end: int) -> None:
            self.now += (end - start) * len(answers.tasks)
            label_rows(answers, engine, start, end)

        monkeypatch.setattr(planning.ShardAnswers, "label_rows", counted)
        monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def spec(write_spec: Callable[..., Path], tmp_path: Path) -> JobSpec:
    lines = [json.dumps({"id": f"d{n}", "text": "Hello. " * (n + 1)}) for n in range(ROWS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return load_spec(write_spec())


def finish(spec: JobSpec, cache_dir: Path) -> LocalStore:
    store = LocalStore(Path(spec.output))
    job = make_job(spec, place(spec.model, this_machine()), cache_dir)
    commit_all(store, plan(job, store).shards, job.fingerprints)
    return store


def no_model(*_: object, **__: object) -> None:
    raise AssertionError("the model was loaded")


def test_time_and_cost_are_those_of_the_documents_that_are_missing(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    found = estimate(spec, PlanOptions(workers=4, price=3.0, documents=5), cache_dir=tmp_path)
    (part,) = found.parts
    assert part.tasks == ("toxic", "topic") and part.documents == found.documents_for_model == ROWS
    assert part.seconds_per_document == 2.0
    assert found.measured is not None and found.measured.documents == 5
    assert (found.worker_seconds, found.seconds) == (24.0, 6.0)
    assert found.cost == pytest.approx(24 / 3600 * 3)
    assert not Path(spec.output).exists()


def test_a_task_that_is_added_is_measured_alone(
    spec: JobSpec,
    write_spec: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish(spec, tmp_path)
    tasks = [task.model_dump(exclude_unset=True) for task in spec.tasks]
    (tmp_path / "corpus_more.jsonl").write_text('{"id": "x", "text": "New."}\n')
    both = {"path": str(tmp_path / "corpus*.jsonl"), "id": "id"}
    more = load_spec(write_spec(tasks=[*tasks, ALONE], input=both))
    Clock(monkeypatch)
    found = estimate(more, PlanOptions(), cache_dir=tmp_path)
    parts = [(part.tasks, part.documents, part.seconds_per_document) for part in found.parts]
    assert parts == [(("tone",), ROWS, 1.0), (("toxic", "topic", "tone"), 1, 3.0)]
    assert found.worker_seconds == found.seconds == ROWS + 3


def test_a_machine_labels_with_all_engines_of_a_run(
    spec: JobSpec,
    write_spec: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(7):
        (tmp_path / f"corpus_{number}.jsonl").write_text('{"id": "x", "text": "New."}\n')
    both = {"path": str(tmp_path / "corpus*.jsonl"), "id": "id"}
    more = load_spec(write_spec(input=both))
    Clock(monkeypatch, cores=4)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    found = estimate(more, PlanOptions(), cache_dir=tmp_path)
    (part,) = found.parts
    assert threads == [1] and part.seconds_per_document == 2.0 / 4


def test_where_nothing_is_missing_no_model_is_loaded(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(spec, tmp_path)
    monkeypatch.setattr(planning, "reader_engine", no_model)
    found = estimate(spec, PlanOptions(price=1.0), cache_dir=tmp_path)
    assert found.parts == () and found.measured is None
    assert found.worker_seconds == found.cost == 0


def test_a_rate_that_is_known_needs_no_model(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "reader_engine", no_model)
    gpu = spec.model_copy(update={"model": spec.model.model_copy(update={"device": "cuda"})})
    found = estimate(gpu, PlanOptions(rate=0.5, workers=2), cache_dir=tmp_path)
    assert found.measured is None and found.seconds == ROWS / 0.5 / 2


def test_chunks_of_a_document_are_all_counted(spec: JobSpec, tmp_path: Path) -> None:
    chunks = {"max_tokens": 8, "too_long": "chunk", "overlap_tokens": 0}
    rules = type(spec.documents).model_validate(chunks)
    chunked = spec.model_copy(update={"documents": rules})
    whole = estimate(spec, PlanOptions(documents=ROWS), cache_dir=tmp_path).measured
    pieces = estimate(chunked, PlanOptions(documents=ROWS), cache_dir=tmp_path).measured
    assert whole is not None and pieces is not None
    assert pieces.tokens_per_document >= whole.tokens_per_document > 40  # and the head has 8


def test_a_plan_is_that_of_a_dry_run_with_the_same_options(
    spec: JobSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = ["--where", "id in ('d1', 'd2', 'd3')", "--json"]
    assert main(["run", str(tmp_path / "spec.yaml"), "--dry-run", *condition]) == 0
    dry = json.loads(capsys.readouterr().out)
    assert main(["plan", str(tmp_path / "spec.yaml"), "--rate", "2", *condition]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert dry["missing_documents"] == planned["documents_for_model"] == 3
    assert planned.items() >= dry.items() and planned["seconds"] == 1.5


@pytest.mark.parametrize("name", ["workers", "price", "rate", "documents"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_numbers_that_give_no_estimate_are_refused(name: str, value: float) -> None:
    with pytest.raises(SpecError, match=f"{name}: write a number above 0"):
        PlanOptions(**{name: value})  # type: ignore[arg-type]


def test_a_machine_without_the_gpu_says_what_to_give_instead(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = type(this_machine())(gpus=(), cores=(2,))
    monkeypatch.setattr(planning, "this_machine", lambda: laptop)
    gpu = spec.model_copy(update={"model": spec.model.model_copy(update={"device": "cuda"})})
    with pytest.raises(SpecError, match=r"rate: .*the summary of a run"):
        estimate(gpu, PlanOptions(), cache_dir=tmp_path)


def test_the_verb_prints_what_was_estimated(
    spec: JobSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "spec.yaml")
    command = ["plan", file, "--rate", "2", "--workers", "3", "--price", "1.5"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["documents_for_model"] == told["missing_documents"] == ROWS
    assert (told["worker_seconds"], told["seconds"], told["cost"]) == (6.0, 2.0, 0.0025)
    assert told["parts"] == [
        {"tasks": ["toxic", "topic"], "documents": ROWS, "seconds_per_document": 0.5}
    ]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "at most 12 documents, 0.5 s each: toxic, topic" in table
    assert "about 2.0 s of 3 workers, without their start-up" in table
    assert main(["plan", file, "--documents", "2"]) == 0
    assert "on 2 documents of " in capsys.readouterr().out
