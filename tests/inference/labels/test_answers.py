"""Readouts at every layer of a deeper model: what is read, what is run, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import reference
import torch
from fitted import bare_card
from torch import nn

from pipeline.errors import ModelError
from pipeline.fitted.readout import LinearMap, Readout
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import prepare
from pipeline.inference.model.llama import _LlamaLayer
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules import fused
from pipeline.inference.schedules.forward import run_to_layers

Pooling = Literal["last", "mean"]
# fp32 sums in another order, of states that grow from layer to layer.
TOLERANCE = 2e-4
LAYERS = 4
HIDDEN = 48
DOCUMENTS = [random.Random(n).choices(range(280), k=n) for n in (1, 2, 17, 40, 5)]
SUFFIX = (280, 281, 282)  # of the empty question
MakeNetwork = Callable[..., Any]


@pytest.fixture(scope="session")
def deep_model(make_network: MakeNetwork) -> LoadedModel:
    return prepare(make_network("llama", num_hidden_layers=LAYERS))


def readout(labels: int, *, layer: int, pooling: Pooling = "last", seed: int = 0) -> Readout:
    """Maps of chance for every layer."""
    source = np.random.default_rng([seed, labels, layer])
    maps = {
        at: LinearMap(
            (source.normal(size=(labels, HIDDEN)) / HIDDEN).astype(np.float32),
            source.normal(size=labels).astype(np.float32),
        )
        for at in range(1, LAYERS + 1)
    }
    card = bare_card(labels, pooling=pooling, layer=layer)
    return Readout(card, maps)


@contextmanager
def rows_through(model: LoadedModel) -> Iterator[list[int]]:
    """How many rows go through each layer's feed-forward."""
    rows, feed_forward = [0] * LAYERS, _LlamaLayer._feed_forward

    def of_layer(layer: _LlamaLayer, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        rows[layer._number] += len(states)
        return feed_forward(layer, states, attended)

    def count(at: int) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows[at] += inputs[0].shape[:-1].numel()

        return hook

    modules = [] if model.llama else model.network.model.layers
    handles = [each.mlp.register_forward_pre_hook(count(i)) for i, each in enumerate(modules)]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_LlamaLayer, "_feed_forward", of_layer)
            yield rows
    finally:
        for handle in handles:
            handle.remove()


def document_tasks(
    tasks: int, *, layer: int = LAYERS, pooling: Pooling = "last"
) -> tuple[PromptTokens, dict[str, Readout]]:
    names = [f"t{i}" for i in range(tasks)]
    readouts = {
        name: readout(2 + i % 3, layer=layer, pooling=pooling, seed=i)
        for i, name in enumerate(names)
    }
    labels = [{f"l{n}": () for n in range(2 + i % 3)} for i in range(tasks)]
    pairs = zip(names, labels, strict=True)
    questions = tuple(Question(name, SUFFIX, of_task) for name, of_task in pairs)
    return PromptTokens((1, 2, 3), questions), readouts


def expected_of(
    model: LoadedModel, prompt: PromptTokens, asked: Question, readouts: dict[str, Readout]
) -> list[np.ndarray]:
    return [
        reference.readout_log_probs(model, prompt.prefix, d, asked.token_ids, readouts[asked.name])
        for d in DOCUMENTS
    ]


@pytest.mark.parametrize("tasks", [1, 9])
@pytest.mark.parametrize("pooling, below", [("last", len(SUFFIX)), ("mean", 0)])
def test_document_readouts_share_one_answer_position_or_need_none(
    tasks: int, pooling: Pooling, below: int, deep_model: LoadedModel
) -> None:
    prompt, readouts = document_tasks(tasks, pooling=pooling)
    model = deep_model
    usage = (
        LabelEngine(model, prompt, max_batch_tokens=99, readouts=readouts)
        .label([[7] * 20, [8] * 5])
        .usage
    )
    assert usage.prefix_tokens_computed == 25
    assert usage.question_tokens_computed == 2 * below


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("layer", [1, 2, 3, 4])
def test_a_readout_is_read_at_its_layer_and_no_deeper_layer_runs(
    layer: int, pooling: Pooling, cut: bool, deep_model: LoadedModel
) -> None:
    model = deep_model if cut else replace(deep_model, llama=None)
    prompt, readouts = document_tasks(3, pooling=pooling, layer=layer)
    engine = LabelEngine(model, prompt, max_batch_tokens=99, readouts=readouts)
    with rows_through(model) as rows:
        labelled = engine.label(DOCUMENTS)
    assert [count > 0 for count in rows] == [at < layer for at in range(LAYERS)]
    for asked, answers in zip(prompt.questions, labelled.log_probs, strict=True):
        expected = expected_of(model, prompt, asked, readouts)
        np.testing.assert_allclose(answers, expected, rtol=0, atol=TOLERANCE)


def test_states_that_are_not_those_of_transformers_are_refused(
    deep_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_layer_less(decoder: Any, layers: Sequence[int], on_states: Any, **inputs: Any) -> None:
        def shifted(layer: int, states: torch.Tensor) -> None:
            on_states(layer + 1, states)

        run_to_layers(decoder, [layer - 1 for layer in layers], shifted, **inputs)

    monkeypatch.setattr(fused, "run_to_layers", one_layer_less)
    model = replace(deep_model, llama=None)
    prompt, readouts = document_tasks(2, layer=3)
    with pytest.raises(ModelError, match="'llama' has other states between its layers"):
        LabelEngine(model, prompt, max_batch_tokens=99, readouts=readouts)


def test_a_map_of_another_model_is_refused(deep_model: LoadedModel) -> None:
    prompt, readouts = document_tasks(1)
    deep = Readout(readouts["t0"].card, {LAYERS + 1: readouts["t0"].maps[1]})
    with pytest.raises(ModelError, match="reads states of 48 numbers after layer 5; the model has"):
        LabelEngine(deep_model, prompt, max_batch_tokens=9, readouts={"t0": deep})
