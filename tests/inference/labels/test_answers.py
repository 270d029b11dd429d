"""Maps answer as they do on the hidden states of transformers, at any layer and in any company."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from dense_oracle import attend_run_by_run
from fitted import bare_card
from torch import nn

from pipeline.errors import ModelError
from pipeline.fitted.readout import LinearMap, Readout
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import prepare
from pipeline.inference.model.loaded import LoadedModel, layer_alone, plain_attention
from pipeline.inference.schedules import fused

Pooling = Literal["last", "mean"]
# fp32 sums in another order, of states that grow from layer to layer.
TOLERANCE = 2e-4
LAYERS = 4
HIDDEN = 48
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": LAYERS},
    "gemma3_text": {
        "num_hidden_layers": LAYERS,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_moe": {"num_hidden_layers": LAYERS},
    "qwen3_5_text": {
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2": {"num_hidden_layers": LAYERS, "layer_types": ["conv", "full_attention"] * 2},
}
SUFFIX = (280, 281, 282)  # of the empty question
MakeNetwork = Callable[..., Any]
SEEN: dict[Any, list[np.ndarray]] = {}  # one prompt's states answer many tasks and tests


@pytest.fixture(scope="session")
def deep_model(make_network: MakeNetwork) -> Callable[[str], LoadedModel]:
    made: dict[str, LoadedModel] = {}

    def make(family: str) -> LoadedModel:
        if family not in made:
            made[family] = prepare(make_network(family, **CHANGES[family]))
        return made[family]

    return make


def executions(model: LoadedModel) -> dict[str, LoadedModel]:
    return {
        "in parts": model,
        "whole": replace(model, cuts_last_layer=False),
        "compiled": replace(model, kernel=attend_run_by_run),
    }


def some_ids(source: random.Random, tokens: int) -> list[int]:
    return [source.randrange(280) for _ in range(tokens)]


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


def question(name: str, token_ids: Sequence[int], labels: int) -> Question:
    return Question(name, tuple(token_ids), {f"l{i}": (i,) for i in range(labels)})


def all_kinds() -> tuple[PromptTokens, dict[str, Readout]]:
    """Plain and trained questions, document readouts at the end and over all tokens."""
    source = random.Random(7)
    asked = some_ids(source, 9)
    questions = (
        question("plain", asked, 3),
        question("trained", [*asked[:5], 3, 4], 2),
        question("shallow", [*asked[:5], 3, 4], 4),  # the same question at another layer
        question("document", SUFFIX, 5),
        question("document_too", SUFFIX, 2),
        question("averaged", SUFFIX, 3),
        question("averaged_deep", SUFFIX, 2),
    )
    readouts = {
        "trained": readout(2, layer=LAYERS),
        "shallow": readout(4, layer=1),
        "document": readout(5, layer=3),
        "document_too": readout(2, layer=3, seed=1),
        "averaged": readout(3, layer=2, pooling="mean"),
        "averaged_deep": readout(2, layer=LAYERS, pooling="mean"),
    }
    return PromptTokens(tuple(some_ids(source, 11)), questions), readouts


def hidden_states(model: LoadedModel, token_ids: Sequence[int]) -> list[np.ndarray]:
    """[layer][token, hidden] as transformers gives them for one prompt alone."""
    key = (id(model.network), tuple(token_ids))
    if key not in SEEN:
        SEEN[key] = forward(model, token_ids)
    return SEEN[key]


@torch.inference_mode()
def forward(model: LoadedModel, token_ids: Sequence[int]) -> list[np.ndarray]:
    with plain_attention(model.network, "eager"):
        output = model.network.model(
            input_ids=torch.tensor([token_ids]), output_hidden_states=True, use_cache=False
        )
    return [states[0].numpy() for states in output.hidden_states]


def oracle(
    model: LoadedModel,
    prompt: PromptTokens,
    document: Sequence[int],
    asked: Question,
    fitted: Readout,
    layer: int,
) -> np.ndarray:
    """[labels] by the mathematics alone: log softmax of W h + b."""
    before, below = list(prompt.prefix), list(asked.token_ids)
    if fitted.card.pooling == "mean":
        states = hidden_states(model, [*before, *document])[layer]
        state = states[len(before) :].astype(np.float64).mean(axis=0)
    else:
        state = hidden_states(model, [*before, *document, *below])[layer][-1]
    logits = fitted.maps[layer].weight @ state + fitted.maps[layer].bias
    return logits - np.logaddexp.reduce(logits)


def plain_oracle(
    model: LoadedModel, prompt: PromptTokens, document: Sequence[int], asked: Question
) -> np.ndarray:
    ids = torch.tensor([[*prompt.prefix, *document, *asked.token_ids]])
    with torch.inference_mode(), plain_attention(model.network, "eager"):
        log_probs = model.network(input_ids=ids, use_cache=False).logits[0, -1].log_softmax(-1)
    return log_probs[: len(asked.labels)].numpy()


def documents(lengths: Sequence[int] = (1, 2, 17, 40, 5)) -> list[list[int]]:
    source = random.Random(3)
    return [some_ids(source, tokens) for tokens in lengths]


@pytest.mark.parametrize("budget", [1, 80, 100_000], ids=["alone", "mixed", "together"])
@pytest.mark.parametrize("execution", ["in parts", "whole", "compiled"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_every_kind_of_answer_equals_the_states_of_independent_prompts(
    family: str, execution: str, budget: int, deep_model: Callable[[str], LoadedModel]
) -> None:
    model = executions(deep_model(family))[execution]
    assert_every_kind_equals_its_oracle(model, budget)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_recurrent_families_answer_as_independent_prompts_do(
    family: str, deep_model: Callable[[str], LoadedModel]
) -> None:
    assert deep_model(family).schedule == "staged"
    assert_every_kind_equals_its_oracle(deep_model(family), 100)


def assert_every_kind_equals_its_oracle(model: LoadedModel, budget: int) -> None:
    prompt, readouts = all_kinds()
    engine = LabelEngine(model, prompt, max_batch_tokens=budget, readouts=readouts)
    labelled = engine.label(documents())
    for asked, answers in zip(prompt.questions, labelled.log_probs, strict=True):
        for row, document in enumerate(documents()):
            if fitted := readouts.get(asked.name):
                layer = fitted.card.layer
                expected = oracle(model, prompt, document, asked, fitted, layer)
            else:
                expected = plain_oracle(model, prompt, document, asked)
            np.testing.assert_allclose(answers[row], expected, rtol=0, atol=TOLERANCE)


@contextmanager
def rows_through(model: LoadedModel) -> Iterator[list[int]]:
    """How many rows go through each layer's feed-forward."""
    projections = [block.mlp.gate_proj for block in model.network.model.layers]
    rows = [0] * len(projections)

    def count(at: int) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows[at] += inputs[0].shape[:-1].numel()

        return hook

    handles = [each.register_forward_pre_hook(count(i)) for i, each in enumerate(projections)]
    try:
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
    questions = [question(name, SUFFIX, 2 + i % 3) for i, name in enumerate(names)]
    return PromptTokens((1, 2, 3), tuple(questions)), readouts


@pytest.mark.parametrize("tasks", [1, 9])
@pytest.mark.parametrize("pooling, below", [("last", len(SUFFIX)), ("mean", 0)])
def test_document_readouts_share_one_answer_position_or_need_none(
    tasks: int, pooling: Pooling, below: int, deep_model: Callable[[str], LoadedModel]
) -> None:
    prompt, readouts = document_tasks(tasks, pooling=pooling)
    model = deep_model("llama")
    usage = (
        LabelEngine(model, prompt, max_batch_tokens=99, readouts=readouts)
        .label([[7] * 20, [8] * 5])
        .usage
    )
    assert usage.prefix_tokens_computed == 25
    assert usage.question_tokens_computed == 2 * below


@pytest.mark.parametrize("execution", ["in parts", "whole"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("layer", [1, 2, 3, 4])
def test_exit_at_a_layer_reads_it_and_runs_nothing_deeper(
    layer: int, pooling: Pooling, execution: str, deep_model: Callable[[str], LoadedModel]
) -> None:
    model = executions(deep_model("llama"))[execution]
    prompt, readouts = document_tasks(3, pooling=pooling)
    readouts = {name: fitted.at(layer) for name, fitted in readouts.items()}
    engine = LabelEngine(model, prompt, max_batch_tokens=99, readouts=readouts)
    with rows_through(model) as rows:
        labelled = engine.label(documents())
    assert [count > 0 for count in rows] == [at < layer for at in range(LAYERS)]
    assert sorted(engine._schedule.prefix.layers) == list(range(layer)), "of the prefix, too"
    for asked, answers in zip(prompt.questions, labelled.log_probs, strict=True):
        fitted = readouts[asked.name]
        expected = [oracle(model, prompt, d, asked, fitted, layer) for d in documents()]
        np.testing.assert_allclose(answers, expected, rtol=0, atol=TOLERANCE)


def the_layer_before(decoder: nn.Module, number: int) -> nn.Module:
    return layer_alone(decoder, number - 1)


def test_a_decoder_that_cannot_be_cut_there_is_run_whole(
    deep_model: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep_model("llama")  # — proved before anything is replaced
    monkeypatch.setattr(fused, "layer_alone", the_layer_before)
    prompt, readouts = document_tasks(2, layer=3)
    engine = LabelEngine(model, prompt, max_batch_tokens=99, readouts=readouts)
    assert not engine.model.cuts_last_layer
    asked = prompt.questions[0]
    expected = [oracle(model, prompt, d, asked, readouts["t0"], 3) for d in documents()]
    answers = engine.label(documents()).log_probs[0]
    np.testing.assert_allclose(answers, expected, rtol=0, atol=TOLERANCE)


def test_states_that_are_wrong_either_way_are_refused(
    deep_model: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep_model("llama")  # — proved before anything is replaced
    monkeypatch.setattr(fused, "layer_alone", the_layer_before)

    def zeros(_decoder: object, layers: Sequence[int], on_states: Any, **inputs: Any) -> None:
        for layer in layers:
            on_states(layer, torch.zeros(1, inputs["position_ids"].shape[-1], HIDDEN))

    monkeypatch.setattr(fused, "run_to_layers", zeros)
    prompt, readouts = document_tasks(2, layer=3)
    with pytest.raises(ModelError, match="'llama' has other states between its layers"):
        LabelEngine(model, prompt, max_batch_tokens=99, readouts=readouts)


def test_a_map_of_another_model_is_refused(deep_model: Callable[[str], LoadedModel]) -> None:
    prompt, readouts = document_tasks(1)
    deep = Readout(readouts["t0"].card, {LAYERS + 1: readouts["t0"].maps[1]})
    with pytest.raises(ModelError, match="reads states of 48 numbers after layer 5; the model has"):
        LabelEngine(deep_model("llama"), prompt, max_batch_tokens=9, readouts={"t0": deep})
