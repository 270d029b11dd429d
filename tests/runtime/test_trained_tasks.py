"""Tasks with readouts, from the documents' text to the rows of their label files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from calls import Assay
from changing_corpus import Corpus
from fitted import card_of, write_readout

from pipeline.fitted.readout import parse_readout, readout_file
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_model, load_tokenizer
from pipeline.inference.schedules.forward import PackedStates
from pipeline.runtime.weights import locate
from pipeline.spec.schema import JobSpec

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


@pytest.fixture
def trained(modelled: Corpus) -> Corpus:
    """A corpus with three trained tasks, and the readouts that fit them."""
    modelled.write("d", TEXTS)
    folder = modelled.folder
    modelled.task, *modelled.others = [
        {**task, "readout": str(folder / task["name"])} for task in TASKS
    ]
    rules = {"max_tokens": 40, "too_long": "chunk", "overlap_tokens": 8}
    modelled.settings = {"documents": rules}
    spec = modelled.spec
    weights = dict(locate(spec.model, modelled.cache).hashes)
    for seed, task in enumerate(spec.tasks):
        places = {"pooling": POOLING[task.name], "layer": LAYER[task.name]}
        card = card_of(spec, task, weights=weights, dtype="float32", **places)
        write_readout(folder / task.name, card, hidden=HIDDEN, layers=[1, 2], seed=seed)
    return modelled


def expected(spec: JobSpec, task: str, text: str, layer: int) -> np.ndarray:
    """[labels] by plain forwards, piece by piece, and the map in numpy."""
    folder, own = Path(spec.model.path), spec.task(task)
    tokenizer, model = load_tokenizer(folder), load_model(folder, dtype="float32", device="cpu")
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    [suffix] = [question.token_ids for question in prompt.questions if question.name == task]
    fitted = parse_readout(Path(own.readout or "").read_bytes())
    fitted = replace(fitted, card=fitted.card.model_copy(update={"layer": layer}))
    answers = [
        np.exp(reference.readout_log_probs(model, prompt.prefix, piece, suffix, fitted))
        for piece in reference.pieces(DocumentTokenizer(tokenizer).encode(text))
    ]
    return np.mean(answers, axis=0) if own.chunks == "mean" else max(answers, key=lambda p: p[0])


def test_label_files_have_the_probabilities_of_the_maps_and_no_mass(trained: Corpus) -> None:
    assert trained.run().complete
    for task, labels in LABELS.items():
        rows = [*trained.rows(task).values()]
        assert [row["status"] for row in rows] == ["ok", "empty", "ok", "ok"]
        assert [row["mass"] for row in rows] == [None] * 4
        assert rows[1]["p"] is None
        for row, text in zip(rows, TEXTS, strict=True):
            if text:
                p = [row["p"][label] for label in labels]
                likely = expected(trained.spec, task, text, LAYER[task])
                np.testing.assert_allclose(p, likely, atol=1e-4)
                assert row["label"] == labels[int(np.argmax(p))]


def test_check_shows_readouts_and_proves_them_against_plain_forwards(
    trained: Corpus, assay: Assay
) -> None:
    report = assay("check", trained.spec_file, "--json").json
    assert report["exactness"]["answers"] == 3 * 3
    assert report["label_tokens"] == {}
    assert {task: facts["layer"] for task, facts in report["readouts"].items()} == LAYER
    assert report["readouts"]["form"]["pooling"] == "mean"


def read_at(path: Path, layer: int) -> str:
    """A copy of a readout's file that is read at this layer."""
    readout = parse_readout(path.read_bytes())
    card = {**readout.card.model_dump(mode="json"), "layer": layer}
    copy = path.with_name(f"{path.name}-{layer}")
    copy.write_bytes(readout_file(readout.maps, card))
    return str(copy)


def test_a_cascade_over_two_layers_reads_the_deeper_one_where_the_first_is_uncertain(
    trained: Corpus,
) -> None:
    plain = trained.spec
    stages = [{"readout": read_at(trained.folder / "form", layer)} for layer in (1, 2)]
    cascade = {"recall": 0.9, "stages": stages}
    trained.task = {"name": "form", "labels": LABELS["form"], "cascade": cascade}
    trained.others = []
    p_of_x = {text: float(expected(plain, "form", text, 1)[0]) for text in TEXTS if text}
    least, second, _ = sorted(p_of_x.values())
    trained.decide((least + second) / 2, 1.5, task="form", label="x")
    trained.run()
    for row, text in zip(trained.rows().values(), TEXTS, strict=True):
        if text:
            layer = 1 if p_of_x[text] == least else 2
            assert row["stage"] == layer
            p = list(row["p"].values())
            np.testing.assert_allclose(p, expected(plain, "form", text, layer), atol=1e-4)


def test_check_reports_a_readout_that_is_read_wrongly(
    trained: Corpus, monkeypatch: pytest.MonkeyPatch, assay: Assay
) -> None:
    correct = PackedStates.means
    monkeypatch.setattr(PackedStates, "means", lambda batch: correct(batch).roll(1, dims=0))
    shown = assay("check", trained.spec_file, code=1).words
    assert shown.startswith("differs: ")
    assert "x, y by the readout" in shown and "mean of layer 2; its file also has 1" in shown
