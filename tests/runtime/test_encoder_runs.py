"""A spec whose model is an encoder: the same ledger, resume and statuses, without a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changing_corpus import Corpus
from command import WITH_MODEL, assay
from encoders import WORDS, write_encoder

from pipeline.cli import main
from pipeline.errors import ModelError, SpecError
from pipeline.inference.encoder import EncoderEngine, load_encoder
from pipeline.inference.loading import load_tokenizer
from pipeline.labeller import Labeller
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement

TONE = {"name": "tone", "labels": {"good": ["good"], "bad": ["bad", "ugly"]}}
TEXTS = [" ".join(WORDS[start : start + 7 * n + 1]) for n in range(8) for start in (0, 20, 30)]
TEXTS += ["", "words that nobody knows"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def encoded(modelled: Corpus, encoder: Path) -> Corpus:
    """A corpus with a task that an encoder answers."""
    modelled.model = {"path": str(encoder), "dtype": "float32"}
    modelled.task, modelled.settings = TONE, {"documents": {"max_tokens": 40}}
    modelled.write("a", TEXTS)
    return modelled


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_run_has_the_probabilities_of_the_head_and_resumes(
    command: Sequence[str], encoder: Path, encoded: Corpus
) -> None:
    code, first, errors = assay(encoded.spec_file, command=command)
    assert code == 0, errors
    read = len(TEXTS) - 1
    assert (first["documents_labelled"], first["documents_read_by_model"]) == (len(TEXTS), read)
    assert assay(encoded.spec_file, command=command)[1]["documents_labelled"] == 0
    engine = EncoderEngine(
        load_encoder(encoder, dtype="float32", device="cpu"),
        load_tokenizer(encoder),
        {"tone": {"good": ["good"], "bad": ["bad", "ugly"]}},
        max_batch_tokens=512,
    )
    number = {word: index for index, word in enumerate(WORDS, 4)}
    rows = encoded.rows()
    for name, text in encoded.texts.items():
        ids = [number.get(word, 0) for word in text.split()]
        status = "empty" if not ids else "truncated" if len(ids) > 40 else "ok"
        row = rows[name]
        assert row["status"] == status and row["n_tokens"] == min(40, len(ids))
        if ids:
            (log_probs,) = engine.label([ids[:40]]).log_probs
            assert row["p"]["good"] == pytest.approx(np.exp(log_probs[0, 0]), abs=1e-5)
            assert row["mass"] == pytest.approx(1, abs=1e-5)
    assert {"ok", "truncated", "empty"} == {row["status"] for row in rows.values()}


def test_outputs_that_exclude_nothing_are_the_labels_of_a_task_of_kind_multi(
    encoded: Corpus, tmp_path: Path
) -> None:
    encoded.task = {"name": "tone", "kind": "multi", "labels": ["bad", "ugly"]}
    with pytest.raises(ModelError, match=r"'tone\.bad': its head has no class 'not bad'.* needs a"):
        Labeller(encoded.spec_file, cache_dir=encoded.cache)
    folder = write_encoder(tmp_path / "many", problem_type="multi_label_classification")
    encoded.model["path"] = str(folder)
    encoded.run()
    network = load_encoder(folder, dtype="float32", device="cpu")
    row, ids = encoded.rows()["a-1"], [2, 24, 3]
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits[0].sigmoid()[1:].tolist()
    assert [row["p"][label] for label in ("bad", "ugly")] == pytest.approx(expected, abs=1e-5)
    labels = [name for name, p in zip(("bad", "ugly"), expected, strict=True) if p >= 0.5]
    assert row["labels"] == labels


def test_a_head_with_one_output_answers_a_task_of_kind_score(
    encoded: Corpus, tmp_path: Path
) -> None:
    encoded.task = {"name": "edu", "kind": "score", "labels": [0, 1, 2, 3, 4, 5]}
    own: dict[str, Any] = {"num_labels": 1, "id2label": None, "label2id": None}
    folder = write_encoder(tmp_path / "one", problem_type="regression", **own)
    encoded.model["path"] = str(folder)
    network = load_encoder(folder, dtype="float32", device="cpu")
    encoded.run()
    with torch.inference_mode():
        score = float(network(torch.tensor([[2, 24, 3]])).logits)
    row = encoded.rows("edu")["a-1"]
    assert row["score"] == pytest.approx(min(5, max(0, score)), abs=1e-5)
    encoded.verify()


def test_the_fingerprint_has_the_weights_and_not_the_prompt(
    encoded: Corpus, tmp_path: Path
) -> None:
    def version(**settings: Any) -> str:
        encoded.settings = {"documents": {"max_tokens": 40}, **settings}
        return make_job(encoded.spec, Placement("cpu", "float32", 1, 1), encoded.cache).fp["tone"]

    plain = version()
    assert version(prompt={"instruction": "Other."}) == plain
    assert version(documents={"max_tokens": 41}) != plain
    other = write_encoder(tmp_path / "other", problem_type="multi_label_classification")
    encoded.model["path"] = str(other)
    assert version() != plain


def test_a_labeller_gives_the_answers_of_a_run(encoded: Corpus) -> None:
    encoded.run()
    stored = encoded.rows().values()
    answers = Labeller(encoded.spec_file, cache_dir=encoded.cache).label(TEXTS).to_pylist()
    for row, answer in zip(stored, answers, strict=True):
        assert answer["tone"]["p"] == pytest.approx(row["p"], abs=1e-5)


def test_a_language_model_is_asked(encoded: Corpus, model_folder: Path) -> None:
    encoded.model = {"path": str(model_folder)}
    with pytest.raises(SpecError, match=r"tasks\.0\.question: missing; add it: a language model"):
        Labeller(encoded.spec_file, cache_dir=encoded.cache)


def test_a_document_that_is_longer_than_the_context_is_refused(encoded: Corpus) -> None:
    encoded.settings = {"documents": {"max_tokens": 127}}
    with pytest.raises(SpecError, match=r"documents.max_tokens: the encoder reads 126 tokens"):
        Labeller(encoded.spec_file, cache_dir=encoded.cache)


def test_a_command_about_decoders_is_refused(
    encoded: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(encoded.spec_file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
