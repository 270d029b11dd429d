"""A spec whose model is an encoder: the same ledger, resume and statuses, without a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import WITH_MODEL, assay
from encoders import WORDS, write_encoder

from pipeline.cli import main
from pipeline.errors import ModelError, SpecError
from pipeline.inference.encoder import EncoderEngine, load_encoder
from pipeline.inference.loading import load_tokenizer
from pipeline.labeller import Labeller
from pipeline.ledger.dataset import open_labels
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.spec.parse import load_spec

TONE = {"name": "tone", "labels": {"good": ["good"], "bad": ["bad", "ugly"]}}
TEXTS = [" ".join(WORDS[start : start + 7 * n + 1]) for n in range(8) for start in (0, 20, 30)]
TEXTS += ["", "words that nobody knows"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def write(folder: Path, encoder: Path, *tasks: dict[str, Any], **others: Any) -> Path:
    (folder / "in.jsonl").write_text(
        "\n".join(json.dumps({"id": f"{n}", "text": text}) for n, text in enumerate(TEXTS))
    )
    content = {
        "name": "job",
        "model": {"path": str(encoder), "kind": "encoder", "dtype": "float32"},
        "input": {"path": str(folder / "in.jsonl"), "id": "id"},
        "documents": {"max_tokens": 40},
        "output": str(folder / "out"),
        "tasks": tasks or [TONE],
        **others,
    }
    (folder / "spec.yaml").write_text(json.dumps(content))
    return folder / "spec.yaml"


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_run_has_the_probabilities_of_the_head_and_resumes(
    command: Sequence[str], encoder: Path, tmp_path: Path
) -> None:
    spec = write(tmp_path, encoder)
    code, first, errors = assay(spec, command=command)
    assert code == 0, errors
    read = len(TEXTS) - 1
    assert (first["documents_labelled"], first["documents_read_by_model"]) == (len(TEXTS), read)
    assert assay(spec, command=command)[1]["documents_labelled"] == 0
    engine = EncoderEngine(
        load_encoder(encoder, dtype="float32", device="cpu"),
        load_tokenizer(encoder),
        {"tone": {"good": ["good"], "bad": ["bad", "ugly"]}},
        max_batch_tokens=512,
    )
    number = {word: index for index, word in enumerate(WORDS, 4)}
    rows = open_labels(str(tmp_path / "out")).to_table(columns=["doc_id", "tone"]).to_pylist()
    by_id = {int(row["doc_id"]): row["tone"] for row in rows}
    for row, text in enumerate(TEXTS):
        ids = [number.get(word, 0) for word in text.split()]
        status = "empty" if not ids else "truncated" if len(ids) > 40 else "ok"
        assert by_id[row]["status"] == status and by_id[row]["n_tokens"] == min(40, len(ids))
        if ids:
            (log_probs,) = engine.label([ids[:40]]).log_probs
            assert by_id[row]["p"]["good"] == pytest.approx(np.exp(log_probs[0, 0]), abs=1e-5)
            assert by_id[row]["mass"] == pytest.approx(1, abs=1e-5)
    assert {"ok", "truncated", "empty"} == {row["status"] for row in by_id.values()}


def test_the_fingerprint_has_the_weights_and_not_the_prompt(encoder: Path, tmp_path: Path) -> None:
    def version(**others: Any) -> str:
        spec = load_spec(write(tmp_path, encoder, **others))
        return make_job(spec, Placement("cpu", "float32", 1, 1), tmp_path / "cache").fp["tone"]

    plain = version()
    assert version(prompt={"instruction": "Other."}) == plain
    assert version(documents={"max_tokens": 41}) != plain
    other = write_encoder(tmp_path / "other", problem_type="multi_label_classification")
    assert version(model={"path": str(other), "kind": "encoder", "dtype": "float32"}) != plain


def test_a_labeller_gives_the_answers_of_a_run(encoder: Path, tmp_path: Path) -> None:
    spec = write(tmp_path, encoder)
    assert assay(spec, command=WITH_MODEL[0].values[0])[0] == 0
    stored = open_labels(str(tmp_path / "out")).to_table(columns=["doc_id", "tone"]).to_pylist()
    answers = Labeller(spec, cache_dir=tmp_path / "cache").label(TEXTS).to_pylist()
    by_id = {int(row["doc_id"]): row["tone"]["p"] for row in stored}
    for row, answer in enumerate(answers):
        own, other = by_id[row], answer["tone"]["p"]
        assert (own is None) == (other is None)
        assert own is None or own["good"] == pytest.approx(other["good"], abs=1e-5)


@pytest.mark.parametrize(
    ("task", "others", "line"),
    [
        ({"question": "?"}, {}, "tasks.0.question: an encoder answers by its own head; remove"),
        ({"readout": "r"}, {}, "tasks.0.readout: an encoder answers by its own head; remove"),
        (
            {},
            {"quantize": "int8_dynamic"},
            "model.quantize: not supported for an encoder; remove it",
        ),
    ],
)
def test_what_an_encoder_has_not_is_one_line(
    task: dict[str, Any], others: dict[str, Any], line: str, encoder: Path, tmp_path: Path
) -> None:
    model = {"path": str(encoder), "kind": "encoder", **others}
    with pytest.raises(SpecError) as raised:
        load_spec(write(tmp_path, encoder, {**TONE, **task}, model=model))
    (problem,) = str(raised.value).splitlines()
    assert problem.startswith(line)


def test_a_document_that_is_longer_than_the_context_is_refused(
    encoder: Path, tmp_path: Path
) -> None:
    spec = write(tmp_path, encoder, documents={"max_tokens": 127})
    with pytest.raises(SpecError, match=r"documents.max_tokens: the encoder reads 126 tokens"):
        Labeller(spec, cache_dir=tmp_path / "cache")


def test_a_class_that_the_head_lacks_is_named(encoder: Path, tmp_path: Path) -> None:
    spec = write(tmp_path, encoder, {"name": "tone", "labels": ["good", "fine"]})
    with pytest.raises(ModelError, match="task 'tone': its head has no class 'fine'"):
        Labeller(spec, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("verb", ["check", "bench"])
def test_a_command_about_decoders_says_so(
    verb: str, encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(write(tmp_path, encoder))]) == 2
    assert capsys.readouterr().err.count("\n") == 1
