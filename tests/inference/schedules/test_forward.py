"""A batch is laid out for a device without reading anything back from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from dense_oracle import on_paper
from random_trees import Node, tree_of
from torch import Tensor

from pipeline.inference.attention.reference import Attended, attend_plainly
from pipeline.inference.labels.scoring import LabelScorer
from pipeline.inference.labels.trie import LabelTrie
from pipeline.inference.loading import prepare
from pipeline.inference.model.llama import LlamaDecoder
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.model.operations import PLAIN
from pipeline.inference.schedules.forward import ReadPoint
from pipeline.inference.schedules.fused import FusedReader, FusedSchedule
from pipeline.inference.schedules.inputs import batch_inputs


@pytest.fixture
def model_without_numbers(tiny_model: Callable[[str], LoadedModel]) -> Callable[..., LoadedModel]:
    """On the meta device, where reading a number is an error."""

    def make(family: str, *, cut: bool) -> LoadedModel:
        whole = tiny_model(family)
        network = copy.deepcopy(whole.network).to("meta")
        assert whole.llama or not cut
        llama = LlamaDecoder(network.model, PLAIN) if cut else None
        return replace(whole, network=network, llama=llama, kernel=on_paper)

    return make


def last_layer_reader(model: LoadedModel, *suffixes: tuple[int, ...]) -> FusedReader:
    return FusedSchedule.from_prefix(model, [1] * 9).reader([ReadPoint(model.layers, suffixes)])


def read_two_documents(reader: FusedReader) -> Tensor:
    """[suffixes, docs, hidden] below a prefix and two documents."""
    [read] = reader.read([[1] * 40, [1] * 3])
    return read.at_suffixes


@pytest.mark.parametrize(
    "family, cut", [*product(["llama", "qwen2", "qwen3"], [True, False]), ("gemma3_text", False)]
)
def test_a_batch_goes_from_token_ids_to_answers_without_a_read_from_the_device(
    family: str, cut: bool, model_without_numbers: Callable[..., LoadedModel]
) -> None:
    model = model_without_numbers(family, cut=cut)
    scorer = LabelScorer([LabelTrie.of([[(4,)], [(5,), (6,)]])] * 4, model.device)
    suffixes = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7, 8, 9), (1, 2, 3, 4), (5, 6))
    states = read_two_documents(last_layer_reader(model, *suffixes))
    answers = scorer.log_probs(states, model.unembed)
    assert [answer.shape for answer in answers] == [(2, 2)] * 4
    assert answers[0].is_meta


@pytest.mark.parametrize("cut", [True, False])
def test_the_attention_of_all_documents_and_questions_is_one_call_a_layer(
    cut: bool, tiny_model: Callable[[str], LoadedModel]
) -> None:
    whole, calls = tiny_model("llama"), list[int]()

    def counted(q: Tensor, *inputs: Any) -> Attended:
        calls.append(len(q))
        return attend_plainly(q, *inputs)

    model = replace(whole, kernel=counted, llama=whole.llama if cut else None)
    reader = last_layer_reader(model, (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7, 8, 9), (5, 6))
    calls.clear()  # of the prefix
    read_two_documents(reader)
    assert len(calls) == model.layers


class Tokens(np.ndarray[Any, Any]):
    """An array that is slow to read number by number, which is an error here."""

    def __iter__(self) -> Any:
        raise AssertionError("read number by number")


def test_documents_in_arrays_are_joined_as_arrays(
    tiny_model: Callable[[str], LoadedModel],
) -> None:
    documents: list[Any] = [np.arange(n).view(Tokens) for n in (5, 3)]
    tree = tree_of([5, 3], [Node(2)], prefix_tokens=0)
    inputs = batch_inputs(tiny_model("llama"), tree, documents, [7, 8], None)
    assert inputs["input_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 7, 8, 7, 8]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_batch_on_a_gpu_never_makes_the_host_wait(
    family: str, tiny_model: Callable[[str], LoadedModel]
) -> None:
    network = copy.deepcopy(tiny_model(family).network).to("cuda", torch.bfloat16)
    model = prepare(network)
    reader = last_layer_reader(model, (1, 2, 3, 4), (5, 6, 7, 8, 9, 10))
    torch.cuda.set_sync_debug_mode("error")
    try:
        states = read_two_documents(reader)
        # — a read is an error here, so nothing above read
        with pytest.raises(RuntimeError, match="synchronizing"):
            states[0, 0, 0].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert states.shape == (2, 2, network.config.hidden_size)
    assert states.isfinite().all()
