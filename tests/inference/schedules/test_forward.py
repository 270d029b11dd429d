"""A batch is laid out for a device without reading anything back from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.inference.attention.kernels import Attended
from pipeline.inference.attention.tree import Node, Tree
from pipeline.inference.attention.varlen import Runs
from pipeline.inference.labels.first_token import FirstTokens, first_token_log_probs
from pipeline.inference.loading import prepare
from pipeline.inference.model.loaded import LoadedModel, cut_last_layer
from pipeline.inference.schedules.forward import end_states, prefill


def on_paper(q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, scale: float) -> Attended:
    """A kernel that gives what has the shape of an answer."""
    tokens, heads, _ = q.shape
    return Attended(torch.empty_like(q)[None], q.new_empty(1, tokens, heads, dtype=torch.float32))


@pytest.fixture
def model_without_numbers(tiny_model: Callable[[str], LoadedModel]) -> Callable[..., LoadedModel]:
    """On the meta device, where whoever asks for a number gets an error."""

    def make(family: str, *, cut: bool) -> LoadedModel:
        whole = tiny_model(family)
        network = copy.deepcopy(whole.network).to("meta")
        stages = cut_last_layer(network.model) if cut else None
        return replace(whole, network=network, stages=stages, kernel=on_paper)

    return make


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_batch_goes_from_token_ids_to_answers_without_a_look_at_the_device(
    family: str, cut: bool, model_without_numbers: Callable[..., LoadedModel]
) -> None:
    model = model_without_numbers(family, cut=cut)
    first = FirstTokens.of([[4], [5, 6]], model.device)
    tree = Tree.of([40, 3], [Node(4, (Node(2), Node(3))), Node(6)], prefix_tokens=9)
    prefix = prefill(model, [1] * 9)
    ends = [span.stop - 1 for span in tree.spans]
    states = end_states(model, [1] * tree.tokens, tree, prefix=prefix, ends=ends)
    by_question = states.transpose(0, 1)
    answers = first_token_log_probs(by_question, [first] * len(ends), model.unembed)
    assert [answer.shape for answer in answers] == [(2, 2)] * len(ends)
    assert answers[0].is_meta


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_batch_on_a_gpu_never_makes_the_host_wait(
    family: str, tiny_model: Callable[[str], LoadedModel]
) -> None:
    network = copy.deepcopy(tiny_model(family).network).to("cuda", torch.bfloat16)
    model = prepare(network)
    tree = Tree.of([40, 3], [Node(4), Node(6)], prefix_tokens=9)
    prefix = prefill(model, [1] * 9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        states = end_states(model, [1] * tree.tokens, tree, prefix=prefix, ends=[3, 9])
        # — whoever waits does get an error here, so nothing above did
        with pytest.raises(RuntimeError, match="synchronizing"):
            states[0, 0, 0].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert states.shape == (2, 2, network.config.hidden_size)
    assert states.isfinite().all()
