"""Encoders: a document's answer is the same in any batch, and alone; other models are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import FAMILIES, write_encoder
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from pipeline.errors import ModelError
from pipeline.inference.encoder import EncoderEngine, encoder_context, load_encoder
from pipeline.inference.loading import load_tokenizer

# Families whose positions begin after the number of the padding token, and others.
OFFSET = {
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "xmod",
    "data2vec-text", "roberta-prelayernorm", "ibert", "luke", "esm", "markuplm",
}  # fmt: skip
UNBOUNDED = {"modernbert"}  # its positions are rotary
FULL = sorted(OFFSET | UNBOUNDED | {"bert", "albert", "deberta-v2", "distilbert", "electra"})

LABELS = {"a": {"x": ["good"], "y": ["bad", "ugly"]}, "b": {"u": ["ugly"], "g": ["good"]}}


def engine_of(folder: Path, max_batch_tokens: int = 512) -> EncoderEngine:
    network = load_encoder(folder, dtype="float32", device="cpu")
    tokenizer = load_tokenizer(folder)
    return EncoderEngine(network, tokenizer, LABELS, max_batch_tokens=max_batch_tokens)


def random_documents(count: int) -> list[list[int]]:
    source = random.Random(3)
    return [source.choices(range(4, 94), k=source.randrange(1, 120)) for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_answers_as_each_document_alone_and_as_transformers(
    family: str, tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path, family)
    engine, documents, batches = engine_of(folder), random_documents(40), []
    labelled = engine.label(documents, on_batch=batches.append)
    assert len(batches) > 2 and sorted(i for batch in batches for i in batch) == [*range(40)]
    assert labelled.usage.prefix_tokens_computed == sum(len(each) + 2 for each in documents)
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    for document in documents:
        with torch.inference_mode():
            logits = network(input_ids=torch.tensor([[2, *document, 3]])).logits[0]
        expected.append(logits.softmax(dim=0).numpy())
    good, bad, ugly = np.stack(expected).T
    of_a, of_b = map(np.exp, labelled.log_probs)
    np.testing.assert_allclose(of_a, np.stack([good, bad + ugly], axis=1), atol=1e-5)
    np.testing.assert_allclose(of_b, np.stack([ugly, good], axis=1), atol=1e-5)
    assert np.ptp(good) > 0.1, "the answers do not depend on the document"
    alone = np.concatenate([engine.label([each], tasks=["b"]).log_probs[0] for each in documents])
    np.testing.assert_allclose(np.exp(alone), of_b, atol=1e-5)


def test_each_output_of_a_head_that_excludes_nothing_is_a_class_with_an_opposite(
    tmp_path: Path,
) -> None:
    folder = write_encoder(tmp_path, problem_type="multi_label_classification")
    network = load_encoder(folder, dtype="float32", device="cpu")
    labels = {"ugly": {"yes": ["ugly"], "no": ["not ugly"]}}
    engine = EncoderEngine(network, load_tokenizer(folder), labels, max_batch_tokens=512)
    documents = random_documents(5)
    (log_probs,) = engine.label(documents).log_probs
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=1), 1, atol=1e-6)
    with torch.inference_mode():
        logits = network(input_ids=torch.tensor([[2, *documents[0], 3]])).logits[0]
    assert np.exp(log_probs[0, 0]) == pytest.approx(float(logits[2].sigmoid()), abs=1e-5)


def test_a_head_with_one_output_gives_the_mean_of_a_score(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, num_labels=1, id2label=None, label2id=None)
    network = load_encoder(folder, dtype="float32", device="cpu")
    numbers = (-2.0, 0.0, 0.5, 3.0)
    labels = {"edu": {str(number): [str(number)] for number in numbers}}
    engine = EncoderEngine(
        network, load_tokenizer(folder), labels, {"edu": numbers}, max_batch_tokens=512
    )
    documents = random_documents(30)
    p = np.exp(engine.label(documents).log_probs[0])
    with torch.inference_mode():
        scores = [float(network(torch.tensor([[2, *each, 3]])).logits) for each in documents]
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(p @ numbers, np.clip(scores, -2, 3), atol=1e-5)
    assert ((p > 0).sum(axis=1) <= 2).all() and np.ptp(scores) > 0.1


def test_where_memory_is_short_batches_are_halved_and_a_document_alone_has_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, documents = engine_of(write_encoder(tmp_path), 2_000), random_documents(30)
    documents.append([5] * 126)
    expected = engine.label(documents).log_probs
    forward = engine._network.forward

    sizes: list[int] = []

    def short(**arguments: Any) -> Any:
        sizes.append(arguments["input_ids"].numel())
        if arguments["input_ids"].numel() > 127:
            raise torch.OutOfMemoryError
        return forward(**arguments)

    monkeypatch.setattr(engine._network, "forward", short)
    labelled = engine.label(documents)
    assert labelled.out_of_memory == {30}
    assert max(size for size in sizes if size <= 127) > 64  # no smaller than necessary
    for by_task, whole in zip(labelled.log_probs, expected, strict=True):
        assert np.isnan(by_task[30]).all()
        np.testing.assert_allclose(by_task[:30], whole[:30], atol=1e-5)


@pytest.mark.parametrize("family", FULL)
def test_the_context_leaves_room_for_special_tokens_and_unused_positions(
    family: str, tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path, family)
    room = encoder_context(folder, load_tokenizer(folder))
    assert room == 128 - 2 - 2 * (family in OFFSET)
    engine = engine_of(folder)
    assert np.isfinite(engine.label([[5] * room]).log_probs[0]).all()
    if family not in UNBOUNDED:
        with pytest.raises((IndexError, RuntimeError)):
            engine.label([[5] * (room + 1)])


def test_an_encoder_that_states_no_longest_text_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "xlnet", "n_layer": 1}))
    with pytest.raises(ModelError, match="states no max_position_embeddings"):
        encoder_context(folder, load_tokenizer(folder))


def test_an_encoder_that_cannot_be_built_is_a_model_error_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    folder = write_encoder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "other"}))
    with pytest.raises(ModelError, match=f"^{folder}: cannot be loaded: .*other"):
        encoder_context(folder, load_tokenizer(folder))


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, head=AutoModelForMaskedLM)
    with pytest.raises(ModelError, match=r"its files lack \d .* use a model with a trained"):
        load_encoder(folder, dtype="float32", device="cpu")


def test_a_decoder_without_a_padding_token_needs_a_control_token_in_its_place(
    tmp_path: Path,
) -> None:
    folder = write_encoder(tmp_path, "llama")
    network, tokenizer = load_encoder(folder, dtype="float32", device="cpu"), load_tokenizer(folder)
    tokenizer.pad_token = None
    with pytest.raises(ModelError, match=r"config\.json states no pad_token_id, and the tokenizer"):
        EncoderEngine(network, tokenizer, LABELS, max_batch_tokens=512)
    tokenizer.bos_token, network.config.pad_token_id = "[CLS]", None
    EncoderEngine(network, tokenizer, LABELS, max_batch_tokens=512)
    assert network.config.pad_token_id == 2


def test_a_class_that_the_head_lacks_and_a_head_with_one_output_are_named(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "three")
    network, tokenizer = load_encoder(folder, dtype="float32", device="cpu"), load_tokenizer(folder)
    with pytest.raises(ModelError, match="task 'a': its head has no class 'fine'; its 3 classes"):
        labels = {"a": {"x": ["fine"], "y": ["bad"]}}
        EncoderEngine(network, tokenizer, labels, max_batch_tokens=9)
    network.config.id2label = {1: "good", 2: "bad", 3: "ugly"}
    with pytest.raises(ModelError, match="no class 'ugly'; its 3 classes are 0, good, bad"):
        EncoderEngine(network, tokenizer, LABELS, max_batch_tokens=9)
    network.config.id2label = {0: "good", 1: "bad", 2: "bad"}
    with pytest.raises(ModelError, match="several classes of id2label are 'bad'"):
        EncoderEngine(network, tokenizer, {"a": {"x": ["good"], "y": ["bad"]}}, max_batch_tokens=9)
    names: dict[str, Any] = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    folder = write_encoder(tmp_path / "one", **names)
    network = load_encoder(folder, dtype="float32", device="cpu")
    with pytest.raises(ModelError, match="task 'a': its head has one output, a score; write kind"):
        EncoderEngine(network, tokenizer, LABELS, max_batch_tokens=9)
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "score"}
    network.config.problem_type, network.config.num_labels = "regression", 2
    with pytest.raises(ModelError, match="its head has 2 scores; use one with a single output"):
        EncoderEngine(network, tokenizer, LABELS, max_batch_tokens=9)
