"""`assay fit`: from gold to a file that a spec may name, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from calls import Assay, WriteSpec
from finished import finish
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from pipeline.evaluation.readout_fitting import GoldStates
from pipeline.fitted.readout import parse_readout
from pipeline.inference.labels.tokenizer import DocumentTokenizer, chat_template
from pipeline.inference.loading import load_model, load_tokenizer
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.ledger.cells import record_specs
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.spec.parse import load_spec
from pipeline.spec.prompts import prompt_text
from pipeline.stores.local import LocalStore
from pipeline.verbs import gold_states
from pipeline.verbs.fit import _agreement, readout_path

SOURCE = np.random.default_rng(0)
TEXTS = ["".join(SOURCE.choice(list("abcdef" if n % 3 else "uvwxyz"), 12)) for n in range(45)]
LABELS = ["clean" if n % 3 else "toxic" for n in range(45)]
SCORES = [float(SOURCE.uniform(0.05, 0.6) + (0 if n % 3 else 0.35)) for n in range(45)]


@pytest.fixture
def spec_file(write_spec: WriteSpec, tmp_path: Path) -> Path:
    """A task that reads the document, and one that asks; a corpus with the gold's texts."""
    write(tmp_path / "corpus.jsonl", [{"id": f"d{n}", "text": t} for n, t in enumerate(TEXTS)])
    named = {"readout": str(tmp_path / "named" / "toxic.safetensors")}
    toxic = {"name": "toxic", "question": None, "labels": ["toxic", "clean"], **named}
    asked = {"name": "asked", "question": "Rude?", "labels": {"toxic": ["y"], "clean": ["n"]}}
    return write_spec(documents={"max_tokens": 64}, tasks=[toxic, asked])


def in_spec(spec_file: Path, **gold: Any) -> None:
    """Writes how gold is read."""
    content = yaml.safe_load(spec_file.read_text())
    spec_file.write_text(yaml.safe_dump({**content, "gold": gold}))


def write(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_gold(folder: Path, *columns: str) -> Path:
    """Ids or texts, with a column of labels; and a row that cannot be read."""
    rows = [
        {"id": f"d{n}", "text": text, "toxic": label}
        for n, (text, label) in enumerate(zip(TEXTS, LABELS, strict=True))
    ]
    rows.append({"id": "nowhere", "text": "  ", "toxic": "clean"})
    return write(folder / "gold.jsonl", [{name: row[name] for name in columns} for row in rows])


def write_scores(folder: Path, scores: list[float]) -> Path:
    rows = [{"text": text, "s": score} for text, score in zip(TEXTS, scores, strict=False)]
    return write(folder / "scores.jsonl", rows)


def states_of(
    model: LoadedModel, spec_file: Path, fitted: dict[str, Any], layer: int
) -> NDArray[np.float64]:
    """transformers' own states of independent prompts, at a fit's position: [texts, hidden]."""
    spec, folder = load_spec(spec_file), Path(load_spec(spec_file).model.path)
    tokenizer = load_tokenizer(folder)
    text = prompt_text(spec.prompt, spec.tasks, render=chat_template(tokenizer))
    is_mean, task = (
        fitted["pooling"] == "mean",
        "asked" if fitted["kind"] == "question" else "toxic",
    )
    around = (text.prefix, "" if is_mean else text.suffixes[task])
    before, after = (tokenizer(span, add_special_tokens=False)["input_ids"] for span in around)
    states = []
    for each in TEXTS:
        ids = torch.tensor([[*before, *DocumentTokenizer(tokenizer).encode(each), *after]])
        with torch.inference_mode(), plain_attention(model.network, "eager"):
            output = model.network(ids, output_hidden_states=True)
        own = output.hidden_states[layer][0].double()
        states.append((own[len(before) :].mean(dim=0) if is_mean else own[-1]).numpy())
    return np.array(states)


def test_a_fitted_file_has_the_maps_of_the_fit(
    spec_file: Path, tmp_path: Path, assay: Assay
) -> None:
    gold, to = write_gold(tmp_path, "text", "toxic"), tmp_path / "to"
    in_spec(spec_file, columns={"asked": "toxic", "toxic": "toxic"})
    options = "--json", "--layers", "all", "--to", to, "--task", "asked"
    [result] = assay("fit", spec_file, "--gold", gold, *options).json["tasks"]
    readout = parse_readout((to / "asked.safetensors").read_bytes())
    assert (result["kind"], result["pooling"], result["rows"]) == ("document", "mean", 45)
    assert [each["position"] for each in result["positions"]] == ["document", "question"]
    assert readout.layers == [1, 2] and readout.card.layer == result["layer"]

    # — the map is scikit-learn's over the standardised states, times a temperature
    model = load_model(Path(load_spec(spec_file).model.path), dtype="float32", device="cpu")
    for layer in result["layers"]:
        states = states_of(model, spec_file, result, layer["layer"])
        x = StandardScaler().fit_transform(states)
        oracle = LogisticRegression(C=layer["strength"], tol=1e-8, max_iter=5_000)
        margin = oracle.fit(x, np.array(LABELS) == "toxic").decision_function(x)
        map_ = readout.maps[layer["layer"]]
        logits = states @ map_.weight.T.astype(np.float64) + map_.bias
        toxic = readout.card.labels.index("toxic")
        ratio = (logits[:, toxic] - logits[:, 1 - toxic]) / margin
        np.testing.assert_allclose(ratio, np.median(ratio), rtol=5e-3)
        assert np.median(ratio) > 0


def test_gold_with_ids_reads_the_corpus_and_the_spec_names_the_file(
    spec_file: Path, tmp_path: Path, assay: Assay
) -> None:
    gold = write_gold(tmp_path, "id", "toxic")
    command = "fit", spec_file, "--gold", gold, "--layers", 1
    report = assay(*command, "--json").json
    [result] = report["tasks"]
    assert report["left_out"] == {"not in the corpus, and the gold has no text": 1}
    assert result["labels"] == {"toxic": 15, "clean": 30} and result["kind"] == "document"
    assert result["scores"]["auroc"]["value"] > 0.9  # letters differ, also in random states
    spec = load_spec(spec_file)
    assert result["readout"] == spec.tasks[0].readout
    # — the spec's file is replaced only with --overwrite
    file = Path(result["readout"])
    first = file.read_bytes()
    assert assay(*command, code=2).err.startswith("--to: exists; ") and file.read_bytes() == first
    *_, last = assay(*command, "--hold-out", 0.1, "--overwrite").out.splitlines()
    assert last.split(maxsplit=1) == ["next", f"assay run {spec_file}"]
    assert file.read_bytes() != first
    # — what a run does first: it refuses a readout that was fitted for something else
    job = make_job(spec, place(spec.model, this_machine()), tmp_path / "cache")
    assert "toxic" in job.fingerprints
    # — of a cascade, it is the readout of the last stage
    content = yaml.safe_load(spec_file.read_text())
    content["tasks"][0]["cascade"] = "auto"
    spec_file.write_text(yaml.safe_dump(content))
    assay(*command, "--to", tmp_path / "whole.safetensors")
    whole = parse_readout((tmp_path / "whole.safetensors").read_bytes())
    np.testing.assert_array_equal(whole.maps[1].weight, parse_readout(first).maps[1].weight)


def test_a_readout_that_answered_the_last_snapshot_is_not_replaced_in_its_place(
    write_spec: WriteSpec, spec_file: Path, tmp_path: Path, assay: Assay
) -> None:
    tasks = yaml.safe_load(spec_file.read_text())["tasks"][:1]
    file = write_spec(documents={"max_tokens": 64}, tasks=tasks)
    command = "fit", file, "--gold", write_gold(tmp_path, "text", "toxic"), "--layers", 1
    assay(*command)
    spec = load_spec(file)
    job = make_job(spec, place(spec.model, this_machine()), tmp_path / "cache")
    store = LocalStore(Path(spec.output))
    record_specs(store, job.versions)
    finish(store, plan(job, store).shards, job.fingerprints, spec.name)
    refused = assay(*command, "--overwrite", code=2).err
    assert "--to: missing; snapshot 00000001 has answers of" in refused
    assay(*command, "--to", tmp_path / "new.safetensors")


@pytest.mark.parametrize("better", ["document", "question"])
def test_the_position_with_the_smaller_loss_is_written_and_both_are_printed(
    better: str, spec_file: Path, tmp_path: Path, assay: Assay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reading gives both: after the question, after the document, and the document's mean."""
    side = np.array([1.0 if label == "toxic" else -1.0 for label in LABELS])
    readings: list[int] = []

    def states(_model: Any, _prefix: Any, suffixes: Any, documents: Any, **options: Any) -> Any:
        readings.append(len(suffixes))
        shape = len(documents), len(options["layers"]), len(suffixes) + 1, 8
        made = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        made[:, :, 0 if better == "question" else 1, 0] += side[:, None]
        return made

    monkeypatch.setattr(gold_states, "document_states", states)
    gold = write_gold(tmp_path, "text", "toxic")
    gold.write_text("".join(gold.read_text().splitlines(keepends=True)[:45]))
    in_spec(spec_file, columns={"asked": "toxic"})
    command = "fit", spec_file, "--gold", gold, "--task", "asked", "--overwrite"
    [result] = assay(*command, "--json").json["tasks"]
    losses = {each["position"]: each["loss"]["value"] for each in result["positions"]}
    assert min(losses, key=losses.__getitem__) == better == result["kind"] and len(losses) == 2
    assert readings == [2], "documents are read once"
    card = parse_readout((tmp_path / "readouts" / "asked.safetensors").read_bytes()).card
    assert (card.kind, card.question) == (better, "Rude?" if better == "question" else None)

    shown = assay(*command).out
    names = ("document, ", "after the question")
    rows = [line for line in shown.splitlines() if line.removeprefix("→ ").startswith(names)]
    assert len(rows) == 2 and all(row.count(" to ") == 3 for row in rows)
    assert rows[0].startswith("→ ") and not rows[1].startswith("→ ")
    assert f"write into {spec_file}, task asked:" in shown
    keys = "    readout: readouts/asked.safetensors\n"
    assert ("    question: null\n" + keys in shown) == (better == "document") and keys in shown
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 200  # nothing is cut off


def test_scores_below_one_half_are_fitted_and_judged_by_rank(
    spec_file: Path, tmp_path: Path, assay: Assay
) -> None:
    gold = write_scores(tmp_path, [score / 2.5 for score in SCORES])
    in_spec(spec_file, scores={"toxic": "s"})
    command = "fit", spec_file, "--gold", gold, "--layers", 1, "--overwrite"
    [result] = assay(*command, "--json").json["tasks"]
    assert result["labels"] == {"toxic": 0, "clean": 45}
    assert result["scored"] == "toxic"
    assert result["scores"]["auroc"]["value"] is None
    agreement = result["agreement"]
    assert agreement["rank_correlation"] > 0.4 and agreement["mean_absolute_error"] < 0.1
    shown, rank = assay(*command).words, f"{agreement['rank_correlation']:.3f}"
    assert "targets scores of toxic; " in shown and f"rank correlation {rank}, mean" in shown


def test_the_agreement_with_scores_is_a_rank_correlation_and_a_mean_error() -> None:
    source = np.random.default_rng(4)
    scores, p = source.random(40).round(1), source.random(40)
    targets = np.stack([scores, 1 - scores], axis=1)
    gold = GoldStates(np.zeros((40, 1, 1, 1)), targets, np.arange(40), np.arange(40))
    held_out: Any = SimpleNamespace(held_out=np.stack([p, 1 - p], axis=1))
    own = _agreement(gold, held_out)
    assert own.rank_correlation == pytest.approx(spearmanr(scores, p).statistic)
    assert own.mean_absolute_error == pytest.approx(np.abs(scores - p).mean())
    held_out = SimpleNamespace(held_out=np.full((40, 2), 0.5))
    assert _agreement(gold, held_out).rank_correlation is None


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        (SCORES[:9], "has 9 documents with a score, and 2 are needed in each of 5 folds"),
        ([0.3] * 45, "are 0.3, and a fit needs documents of other scores"),
    ],
)
def test_scores_that_cannot_be_fitted_are_one_line(
    scores: list[float], line: str, spec_file: Path, tmp_path: Path, assay: Assay
) -> None:
    gold = write_scores(tmp_path, scores)
    in_spec(spec_file, scores={"toxic": "s"})
    error = assay("fit", spec_file, "--gold", gold, code=2).error
    assert error.startswith(f"{gold}: ") and f" task toxic {line}; add some, or name only" in error
    assert not (tmp_path / "named").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--layers 3", "--layers: write all, or numbers from 1 to 2"),
        ("--hold-out 1", "--hold-out: write a share, as in 0.2 (got 1.0)"),
        ("--hold-out 0.8", "{gold}: label 'toxic' of task toxic has 4 documents, and one is"),
        ("--to x.safetensors", "--to: is one file for 2 readouts"),
        ("--to {folder}", "--to: exists; write another name, or add --overwrite"),
    ],
)
def test_each_problem_is_one_line_and_exit_code_2(
    words: str, line: str, spec_file: Path, tmp_path: Path, assay: Assay
) -> None:
    gold = write_gold(tmp_path, "text", "toxic")
    (tmp_path / "toxic.safetensors").write_bytes(b"of an earlier fit")
    if "x.safetensors" in words:
        in_spec(spec_file, columns={"asked": "toxic"})
    options = words.format(folder=tmp_path).split()
    shown = assay("fit", spec_file, "--gold", gold, *options, code=2).err.splitlines()
    [error] = [each for each in shown if each.startswith(("--", str(gold)))]
    assert error.startswith(line.format(gold=gold))


def test_the_path_of_a_readout_is_that_of_to_or_that_of_the_spec() -> None:
    path = partial(readout_path, "a", usual="folder/readouts")
    assert path(named=None, to=None) == "folder/readouts/a.safetensors"
    assert path(named="b.safetensors", to=None) == "b.safetensors"
    assert path(named="b", to="s3://x/y/") == "s3://x/y/a.safetensors"


def test_only_gold_rows_with_a_label_are_read_and_nan_states_are_left_out(
    spec_file: Path, tmp_path: Path, assay: Assay, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, counts = gold_states.document_states, []

    def overflown(*args: Any, **named: Any) -> NDArray[np.float32]:
        counts.append(len(args[3]))
        states = read(*args, **named)
        states[3, 0, 0, 2] = np.nan  # as float16 may give
        return states

    monkeypatch.setattr(gold_states, "document_states", overflown)
    gold = write_gold(tmp_path, "text", "toxic")
    with gold.open("a") as file:
        file.writelines(json.dumps({"text": f"new {n}", "toxic": None}) + "\n" for n in range(30))
    options = "--json", "--layers", "1,2"
    report = assay("fit", spec_file, "--gold", gold, *options).json
    assert max(counts) == len(TEXTS)
    assert report["left_out"][gold_states.NO_LABEL] == 30
    assert report["left_out"][gold_states.OVERFLOWN] == 1
    [result] = report["tasks"]
    assert sum(result["labels"].values()) == len(TEXTS) - 1
    assert np.isfinite(result["scores"]["auroc"]["value"])
