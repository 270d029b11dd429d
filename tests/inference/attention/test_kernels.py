"""Attention over a span equals its definition, and merges with another span's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from dense_oracle import HEADS, SCALE, assert_same, dense, some, some_kv
from torch import Tensor

from pipeline.inference.attention import kernels as attention
from pipeline.inference.attention.kernels import (
    Attended,
    LayerKV,
    attend,
    attend_causally,
    merge,
    merge_into,
    out_of_window,
)

COPIES = [1, 3]


@pytest.fixture(params=["_flash_cpu", "_plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of the numbers runs with the CPU's fused kernel and with the plain definition."""
    monkeypatch.setattr(attention, "_flash_cpu", getattr(attention, request.param))
    monkeypatch.setattr(attention, "_PLAIN_SCORES", 200)  # so that queries go in several runs
    return str(request.param)


def everything(tokens: int, keys: int) -> Tensor:
    return torch.ones(tokens, keys, dtype=torch.bool)


def some_mask(tokens: int, keys: int) -> Tensor:
    """Which keys are seen: about half, and the first and third query see none."""
    seen = torch.rand(tokens, keys, generator=torch.Generator().manual_seed(5)) < 0.5
    seen[0] = False
    seen[2:3] = False
    return seen


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("tokens, keys", [(1, 1), (1, 40), (7, 3), (33, 65)])
def test_attending_is_a_softmax_over_all_keys(
    copies: int, heads: int, kv_heads: int, tokens: int, keys: int, kernel: str
) -> None:
    q, kv = some(0, copies, tokens, heads), some_kv(1, copies, keys, kv_heads)
    attended = attend(q, kv.k, kv.v, scale=SCALE)
    assert_same(attended, dense(q, kv, everything(tokens, keys)))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("copies", COPIES)
def test_capped_scores_are_those_of_the_definition(softcap: float, copies: int) -> None:
    q, kv = some(0, copies, 9, 6), some_kv(1, copies, 31, 2)
    attended = attend(q, kv.k, kv.v, scale=SCALE, softcap=softcap)
    assert_same(attended, dense(q, kv, everything(9, 31), softcap))


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 2, 31, 70])
def test_causal_attention_sees_no_later_key(
    copies: int, heads: int, kv_heads: int, tokens: int, kernel: str
) -> None:
    q, kv = some(0, copies, tokens, heads), some_kv(1, copies, tokens, kv_heads)
    attended = attend_causally(q, kv.k, kv.v, scale=SCALE)
    assert_same(attended, dense(q, kv, everything(tokens, tokens).tril()))


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("window", [1, 2, 5, 69, 70, 200])
def test_a_window_hides_keys_that_far_back(copies: int, window: int, kernel: str) -> None:
    q, kv = some(0, copies, 70, 6), some_kv(1, copies, 70, 2)
    attended = attend_causally(q, kv.k, kv.v, scale=SCALE, window=window)
    seen = everything(70, 70).tril().triu(1 - window)
    assert_same(attended, dense(q, kv, seen))


def test_out_of_window_counts_from_the_first_querys_position() -> None:
    hidden = out_of_window(2, 6, offset=4, window=3, device=torch.device("cpu"))
    assert hidden.tolist() == [
        [True, True, False, False, False, True],
        [True, True, True, False, False, False],
    ]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("tokens, keys", [(1, 5), (4, 9), (33, 65)])
def test_hidden_keys_are_not_seen_and_a_blind_query_has_nothing(
    heads: int, kv_heads: int, tokens: int, keys: int, kernel: str
) -> None:
    q, kv = some(0, 1, tokens, heads), some_kv(1, 1, keys, kv_heads)
    seen = some_mask(tokens, keys)
    attended = attend(q, kv.k, kv.v, scale=SCALE, hidden=~seen)
    assert_same(attended, dense(q, kv, seen))
    assert attended.out[:, 0].eq(0).all()
    assert attended.lse[:, 0].eq(-torch.inf).all()


def parts(q: Tensor, kv: LayerKV, *stops: int) -> list[Attended]:
    """Attention over each piece of the keys."""
    edges = [0, *stops, kv.k.shape[1]]
    return [
        attend(q, kv.k[:, start:stop], kv.v[:, start:stop], scale=SCALE)
        for start, stop in pairwise(edges)
    ]


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("split", [1, 7, 30])
def test_merging_two_spans_equals_attending_to_both(
    copies: int, heads: int, kv_heads: int, split: int, kernel: str
) -> None:
    q, kv = some(0, copies, 9, heads), some_kv(1, copies, 31, kv_heads)
    assert_same(merge(*parts(q, kv, split)), dense(q, kv, everything(9, 31)))


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_merging_is_associative_and_takes_any_order(heads: int, kv_heads: int) -> None:
    q, kv = some(0, 1, 9, heads), some_kv(1, 1, 31, kv_heads)
    a, b, c = parts(q, kv, 4, 20)
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(c, merge(a, b)), dense(q, kv, everything(9, 31)))


def blind_and_seeing() -> tuple[Attended, Attended]:
    q, kv = some(0, 1, 4, 6), some_kv(1, 1, 10, 2)
    blind = attend(q, kv.k, kv.v, scale=SCALE, hidden=everything(4, 10))
    return blind, attend(q, kv.k, kv.v, scale=SCALE)


def test_merging_with_a_span_that_nobody_sees_changes_nothing() -> None:
    blind, seeing = blind_and_seeing()
    assert_same(merge(blind, seeing), seeing, atol=0)
    assert_same(merge(seeing, blind), seeing, atol=0)


def test_merging_is_associative_where_two_spans_are_not_seen() -> None:
    blind, seeing = blind_and_seeing()
    assert_same(merge(merge(blind, blind), seeing), seeing, atol=0)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_merging_in_place_equals_merging(copies: int, heads: int, kv_heads: int) -> None:
    q, kv = some(0, copies, 9, heads), some_kv(1, copies, 31, kv_heads)
    a, b = parts(q, kv, 12)
    expected = merge(a, b)
    merge_into(a, b)
    assert_same(a, expected)
