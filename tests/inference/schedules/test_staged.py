"""Levels are attended to as one span would be, viewed where they lie, and never written again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from dense_oracle import SCALE, assert_same, dense, pointer, some, some_kv
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from pipeline.inference.attention.kernels import Attended, LayerKV
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.forward import ReadPoint
from pipeline.inference.schedules.staged import (
    Level,
    StagedAttention,
    StagedSchedule,
    read_level,
)

TinyModel = Callable[[str], LoadedModel]

COPIES, TOKENS, HEADS, KV_HEADS = 4, 5, 6, 2


def kept(seed: int, keys: int, stop: int, layer: DynamicLayer, spans: int = 1) -> Level:
    """A level of random keys, kept as transformers keeps them."""
    kv = some_kv(seed, spans, KV_HEADS, keys)
    cache = Cache(layers=[layer])
    cache.update(kv.k, kv.v, 0)
    return Level(cache, stop, spans)  # type: ignore[arg-type]


def joined(above: list[Level], own: LayerKV, copy: int) -> LayerKV:  # of one copy
    """The keys and values of the spans that the copy is below, and its own."""
    parts = [(level.kv(0), copy * level.spans // COPIES) for level in above] + [(own, copy)]
    k, v = (torch.cat([getattr(kv, name)[n] for kv, n in parts])[None] for name in ("k", "v"))
    return LayerKV(k, v)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 16, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("spans", [(), (1,), (1, 1), (1, 2), (2, 4)])
def test_attending_to_levels_equals_attending_to_one_span(
    window: int | None, softcap: float | None, spans: tuple[int, ...]
) -> None:
    sizes = [(9, 7, 7), (8, 11, 18)]  # seed, keys, stop
    above = [
        kept(*size, DynamicLayer(), of_level) for size, of_level in zip(sizes, spans, strict=False)
    ]
    q, own = some(0, COPIES, TOKENS, HEADS), some_kv(1, COPIES, TOKENS, KV_HEADS)
    attended = StagedAttention(tuple(above)).attend(
        0, q, own, scale=SCALE, window=window, softcap=softcap
    )
    start = above[-1].stop if above else 0
    seen = torch.ones(start + TOKENS, start + TOKENS, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    for copy in range(COPIES):
        found = Attended(attended.out[copy, None], attended.lse[copy, None])
        expected = dense(q[copy, None], joined(above, own, copy), seen[start:], softcap)
        assert_same(found, expected)


@pytest.mark.parametrize("window", [4, 9, 16])
def test_a_level_that_kept_a_window_of_its_keys_is_read_like_a_whole_one(window: int) -> None:
    q, own = some(0, COPIES, TOKENS, HEADS), some_kv(1, COPIES, TOKENS, KV_HEADS)
    whole, part = (
        StagedAttention((kept(9, 7, 7, make()), kept(8, 11, 18, make()))).attend(
            0, q, own, scale=SCALE, window=window, softcap=None
        )
        for make in (DynamicLayer, partial(DynamicSlidingWindowLayer, window))
    )
    assert_same(part, whole)


def read_levels(model: LoadedModel) -> tuple[Level, Level]:
    """A prefix of 9 tokens and a document of 40."""
    last = [model.layers]
    _, prefix = read_level(model, (), torch.arange(9)[None], last)
    _, document = read_level(model, (prefix,), torch.arange(100, 140)[None], last)
    return prefix, document


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "nemotron_h", "granitemoehybrid"])
def test_the_kernel_reads_every_level_in_one_copy_where_it_was_left(
    family: str, tiny_model: TinyModel, read_by_kernel: list[tuple[Tensor, Tensor]]
) -> None:
    model = tiny_model(family)
    prefix, document = read_levels(model)
    read_by_kernel.clear()
    read_level(model, (prefix, document), torch.arange(4 * 6).view(4, 6), [model.layers])
    for level, tokens in ((prefix, 9), (document, 40)):
        found = [pair for pair in read_by_kernel if pair[0].shape[-2] == tokens]
        assert len(found) == 1  # of the only attention layer, whatever the number of questions
        of_layer = next(x for x in level.cache.layers if isinstance(x, DynamicLayer))
        for tensor, left in zip(found[0], (of_layer.keys, of_layer.values), strict=True):
            assert pointer(tensor) == pointer(left)


@pytest.mark.parametrize("prefix, left", [(0, 0), (1, 1), (2, 1)])
def test_documents_read_the_last_token_of_the_prefix(
    prefix: int, left: int, tiny_model: TinyModel
) -> None:
    model = tiny_model("lfm2")
    point = ReadPoint(model.layers, ((1,), (2,)))
    reader = StagedSchedule.from_prefix(model, [5] * prefix).reader([point])
    assert reader.repeated_prefix_tokens == left
    assert reader.question_tokens == 2 * 2
    [read] = reader.read([[1], [2, 3], [4]])
    assert read.at_suffixes.shape == (2, 3, 48)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "nemotron_h", "granitemoehybrid"])
@pytest.mark.parametrize("max_copies, forwards", [(1, 10), (4, 8), (100, 6)])
def test_documents_of_one_length_are_read_together_with_the_states_of_each_alone(
    family: str, max_copies: int, forwards: int, tiny_model: TinyModel
) -> None:
    model = tiny_model(family)
    points = [ReadPoint(model.layers, ((1,), (2, 3)), mean=True)]
    documents = [[9, 8, 7], [6, 5], [4, 3, 2], [7, 7, 7], [1, 2, 3, 4]]
    reader = StagedSchedule.from_prefix(model, [5, 6, 7]).reader(points)
    alone = [reader.read([document])[0] for document in documents]
    reader.max_copies = max_copies
    counted: list[int] = []
    handle = model.decoder.register_forward_pre_hook(lambda *_: counted.append(1))
    [together] = reader.read(documents)
    handle.remove()
    assert len(counted) == forwards
    assert together.mean is not None
    for row, expected in enumerate(alone):
        assert expected.mean is not None
        of_row = together.at_suffixes[:, row]
        torch.testing.assert_close(of_row, expected.at_suffixes[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(together.mean[row], expected.mean[0], rtol=0, atol=1e-5)
