"""Tasks with readouts, from the documents' text to the rows of their label files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fitted import card_of, write_readout
from stages import label_and_commit, run_without_ray
from transformers import AutoModelForCausalLM

from pipeline.cli import main
from pipeline.fitted.cascade_file import Thresholds
from pipeline.fitted.readout import parse_readout
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_tokenizer
from pipeline.inference.schedules.forward import PackedStates
from pipeline.ledger.dataset import open_labels
from pipeline.runtime.job import make_job, plan
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.run import run
from pipeline.runtime.weights import locate
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import open_store

HIDDEN = 48
TEXTS = ["A first text.", "", "Short.", "A longer text, that is read in pieces. " * 3]
LABELS = {"mood": ["good", "bad", "none"], "form": ["x", "y"], "rude": ["rude", "civil"]}
TASKS: list[dict[str, Any]] = [
    {"name": "mood", "question": None, "labels": LABELS["mood"], "chunks": "mean"},
    {"name": "form", "question": None, "labels": LABELS["form"]},
    {"name": "rude", "question": "Rude?", "labels": LABELS["rude"]},
]
POOLING = {"mood": "last", "form": "mean", "rude": "last"}
LAYER = {"mood": 1, "form": 2, "rude": 2}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def write_spec_file(tmp_path: Path, model_folder: Path) -> Callable[..., Path]:
    """Writes a spec of three trained tasks and the readouts that fit it."""

    def write(**changes: Any) -> Path:
        corpus = tmp_path / "corpus.jsonl"
        rows = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(TEXTS)]
        corpus.write_text("\n".join(rows) + "\n")
        tasks = [{**task, "readout": str(tmp_path / task["name"])} for task in TASKS]
        content = {
            "name": "trained",
            "model": {"path": str(model_folder), "dtype": "float32", "device": "cpu"},
            "input": {"path": str(corpus), "id": "id"},
            "output": str(tmp_path / "out"),
            "documents": {"max_tokens": 40, "too_long": "chunk", "overlap_tokens": 8},
            "tasks": tasks,
            **changes,
        }
        spec = parse_spec(json.dumps(content))
        weights = dict(locate(spec.model, tmp_path / "cache").hashes)
        for seed, task in enumerate(spec.tasks):
            own = {"pooling": POOLING[task.name], "layer": LAYER[task.name]}
            card = card_of(spec, task, weights=weights, dtype="float32", **own)
            write_readout(tmp_path / task.name, card, hidden=HIDDEN, layers=[1, 2], seed=seed)
        file = tmp_path / "spec.yaml"
        file.write_text(json.dumps(content))
        return file

    return write


def label_files(spec: JobSpec, cache_dir: Path) -> dict[str, pa.Table]:
    """The label files of a run in this process, without Ray."""
    job = make_job(spec, place(spec.model, this_machine()), cache_dir)
    [work] = plan(job, open_store(spec.output, spec.storage_options)).work_items
    list(label_and_commit([work], job))
    files = Path(spec.output).glob("labels/*/*/*/*.parquet")
    return {file.parents[2].name: pq.read_table(file) for file in files}


def expected(spec: JobSpec, task: str, text: str, layer: int) -> np.ndarray:
    """[labels] by plain forwards of the saved model, piece by piece, and the map in numpy."""
    folder = Path(spec.model.path)
    tokenizer = load_tokenizer(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    suffix = next(q.token_ids for q in prompt.questions if q.name == task)
    [fitted] = [
        parse_readout(Path(t.readout or "").read_bytes()) for t in spec.tasks if t.name == task
    ]
    answers = []
    for piece in pieces(DocumentTokenizer(tokenizer).encode(text)):
        below = [] if POOLING[task] == "mean" else suffix
        ids = torch.tensor([[*prompt.prefix, *piece, *below]])
        with torch.inference_mode():
            states = network.model(ids, output_hidden_states=True).hidden_states[layer][0].numpy()
        first = len(prompt.prefix) if POOLING[task] == "mean" else -1
        logits = fitted.maps[layer].weight @ states[first:].mean(axis=0) + fitted.maps[layer].bias
        answers.append(np.exp(logits - np.logaddexp.reduce(logits)))
    mean = next(t.chunks for t in spec.tasks if t.name == task) == "mean"
    return np.mean(answers, axis=0) if mean else max(answers, key=lambda p: p[0])


def pieces(ids: Sequence[int]) -> list[Sequence[int]]:
    if len(ids) <= 40:
        return [ids]
    return [ids[start : start + 40] for start in [*range(0, len(ids) - 40, 32), len(ids) - 40]]


@pytest.mark.parametrize(
    "changes, layer", [({}, LAYER), ({"exit": {"layer": 1}}, dict.fromkeys(LAYER, 1))]
)
def test_label_files_hold_what_the_maps_say_of_each_document_and_no_mass(
    changes: dict[str, Any],
    layer: dict[str, int],
    write_spec_file: Callable[..., Path],
    tmp_path: Path,
) -> None:
    spec = parse_spec(write_spec_file(**changes).read_text())
    tables = label_files(spec, tmp_path / "cache")
    assert set(tables) == set(LABELS)
    for task, table in tables.items():
        rows = table.to_pylist()
        assert [row["status"] for row in rows] == ["ok", "empty", "ok", "ok"]
        assert [row["mass"] for row in rows] == [None] * 4
        assert rows[1]["p"] is None
        for row, text in zip(rows, TEXTS, strict=True):
            if text:
                p = [row["p"][label] for label in LABELS[task]]
                np.testing.assert_allclose(p, expected(spec, task, text, layer[task]), atol=1e-4)
                assert row["label"] == LABELS[task][int(np.argmax(p))]


@pytest.mark.parametrize(
    "changes, layer", [({}, LAYER), ({"exit": {"layer": 1}}, dict.fromkeys(LAYER, 1))]
)
def test_check_shows_readouts_and_proves_them_against_plain_forwards(
    changes: dict[str, Any],
    layer: dict[str, int],
    write_spec_file: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert main(["check", str(write_spec_file(**changes)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exactness"]["answers"] == 3 * 3
    assert report["label_tokens"] == {}
    assert {task: facts["layer"] for task, facts in report["readouts"].items()} == layer
    assert report["readouts"]["form"]["pooling"] == "mean"


def test_a_cascade_over_two_layers_reads_the_deeper_one_where_the_first_is_uncertain(
    write_spec_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write_spec_file()
    plain, cache = parse_spec(file.read_text()), tmp_path / "cache"
    readout, thresholds = str(tmp_path / "form"), tmp_path / "thresholds"
    stages = [{"readout": readout, "exit": {"layer": layer}} for layer in (1, 2)]
    cascade = {"stages": stages, "file": str(thresholds)}
    content = json.loads(file.read_text())
    content["tasks"] = [{"name": "form", "labels": LABELS["form"], "cascade": cascade}]
    spec = parse_spec(json.dumps(content))
    jobs = (make_job(own, place(own.model, this_machine()), cache) for [own] in spec.stage_specs())
    p_of_x = {text: float(expected(plain, "form", text, 1)[0]) for text in TEXTS if text}
    least, second, _ = sorted(p_of_x.values())
    fps = tuple(job.fp["form"] for job in jobs)
    decided = Thresholds("form", ("x", "y"), "x", fps, low=(least + second) / 2, high=1.5)
    thresholds.write_bytes(decided.json())
    run_without_ray(monkeypatch)
    run(spec, cache_dir=cache)
    rows = open_labels(spec.output).to_table(columns=["doc_id", "form"]).to_pylist()
    for row, text in zip(rows, TEXTS, strict=True):
        if text:
            layer = 1 if p_of_x[text] == least else 2
            assert row["form"]["stage"] == layer
            p = list(row["form"]["p"].values())
            np.testing.assert_allclose(p, expected(plain, "form", text, layer), atol=1e-4)


def test_check_says_so_where_a_readout_is_read_wrongly(
    write_spec_file: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    correct = PackedStates.means
    monkeypatch.setattr(PackedStates, "means", lambda batch: correct(batch).roll(1, dims=0))
    assert main(["check", str(write_spec_file())]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "NOT exact" in shown
    assert "x, y by the readout" in shown and "mean of layer 2 of 1, 2" in shown


def test_a_readout_fitted_for_another_spec_ends_with_2(
    write_spec_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_spec_file()
    content = json.loads(file.read_text())
    content["prompt"] = {"instruction": "Otherwise."}
    file.write_text(json.dumps(content))
    assert main(["check", str(file)]) == 2
    assert capsys.readouterr().err.count("another prompt.instruction") == 3
