"""A model whose layers lie on several devices answers as one that lies on one.

Here all devices are the processor: what is proved is that the hooks which move states leave the
tree's answers as they were, and which part would lie where.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import ModelError
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import device_map, dispatch, prepare
from pipeline.inference.model.loaded import LoadedModel
from pipeline.verbs.gold_states import document_states


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "qwen3_next"])
def test_a_spread_model_answers_as_before(
    family: str, make_network: Callable[..., Any], tiny_model: Callable[[str], LoadedModel]
) -> None:
    network = make_network(family)
    dispatch(network, ["cpu", "cpu"])
    assert all(hasattr(layer, "_hf_hook") for layer in network.model.layers)
    model = prepare(network, dispatched=True)
    assert model.stages is None
    assert model.kernel is None

    source = random.Random(family)
    ids = [[source.randrange(300) for _ in range(n)] for n in (9, 4, 17, 1, 30, 55)]
    labels = {"a": (1,), "b": (2, 3)}
    questions = tuple(Question(f"q{i}", tuple(ids[i]), labels) for i in (1, 2))
    prompt, documents = PromptTokens(tuple(ids[0]), questions), ids[3:]
    found, expected = (
        LabelEngine(one, prompt, max_batch_tokens=80).label(documents).log_probs
        for one in (model, tiny_model(family))
    )
    # The same sums, in a batch cut at another layer: float32's rounding alone.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_states_between_layers_come_home(
    make_network: Callable[..., Any], tiny_model: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    network = make_network("llama")
    dispatch(network, ["cpu", "cpu"])
    found, expected = (
        document_states(
            model,
            [5, 6],
            [[7]],
            [[1, 2, 3], [4]],
            layers=[1, 2],
            max_batch_tokens=50,
            folder=tmp_path,
        )
        for model in (prepare(network, dispatched=True), tiny_model("llama"))
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_layers_lie_in_order_and_all_else_on_the_first_device(
    make_network: Callable[..., Any],
) -> None:
    network = make_network("llama", num_hidden_layers=5)
    where = device_map(network, ["cuda:0", "cuda:1", "cuda:2"])
    layers = [where[f"model.layers.{i}"] for i in range(5)]
    assert layers == ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cuda:2"]
    rest = {name: device for name, device in where.items() if ".layers." not in name}
    assert set(rest.values()) == {"cuda:0"}
    named = [name for name, _ in network.named_parameters()]
    assert all(any(name.startswith(f"{part}.") for part in where) for name in named)


def test_more_devices_than_layers_are_refused(make_network: Callable[..., Any]) -> None:
    network = make_network("llama", num_hidden_layers=2)
    with pytest.raises(ModelError, match="has 2 layers; write gpus: 2 or fewer"):
        dispatch(network, ["cpu"] * 3)
