"""Oracles of attention: a softmax in float64 under a mask, the kernel's slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st
from random_trees import DefinedTree
from torch import Tensor

from pipeline.inference.attention import kernels
from pipeline.inference.attention.kernels import (
    Attended,
    LayerKV,
    attend,
)
from pipeline.inference.attention.tiles import Tile, TilePlan
from pipeline.inference.attention.tree import Tree
from pipeline.inference.processor import native

DIM = 8
SCALE = DIM**-0.5
# A score sums 8 products, below 64 in all, in float32: its error enters a weight as a factor, and
# a weighted mean of values below 8 as that much more. Half of it is seen at worst.
TOLERANCE = 64 * SCALE * 8 * torch.finfo(torch.float32).eps / 2

HEADS = [(6, 2), (4, 4), (8, 1)]


needs_native = pytest.mark.skipif(
    torch.float32 not in native.formats(), reason="no C++ compiler, or no AVX-512"
)
NATIVE = pytest.param("native", marks=needs_native)
CPU_KERNELS = pytest.mark.parametrize("kernel", [NATIVE, "_flash_cpu", "_plain"])
COPIES = st.sampled_from([1, 3])
GROUPS = st.sampled_from(HEADS)


@contextmanager
def cpu_kernel(name: str) -> Iterator[None]:
    """Run this package's own kernel, torch's fused one, or the plain definition in its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "is_native", lambda _dtype, _dim: name == "native")
        if name != "native":
            patch.setattr(kernels, "_flash_cpu", getattr(kernels, name))
        patch.setattr(kernels, "_PLAIN_SCORES", 200)  # so that queries go in several blocks
        yield


def everything(tokens: int, keys: int) -> Tensor:
    return torch.ones(tokens, keys, dtype=torch.bool)


def some(seed: int, *shape: int) -> Tensor:  # [*shape, dim]
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(*shape, DIM, generator=generator)


def some_kv(seed: int, *shape: int) -> LayerKV:  # [*shape, dim]
    return LayerKV(k=some(seed, *shape), v=some(seed + 1, *shape))


def dense(
    q: Tensor,  # [copies, tokens, heads, dim]
    kv: LayerKV,  # [copies, keys, kv_heads, dim]
    seen: Tensor,  # [tokens, keys] bool
    softcap: float | None = None,
    scale: float = SCALE,
) -> Attended:
    """Head by head."""
    heads, kv_heads = q.shape[2], kv.k.shape[2]
    group = heads // kv_heads
    outs, lses = [], []
    for head in range(heads):
        keys, values = (x[:, :, head // group].double() for x in (kv.k, kv.v))
        scores = q[:, :, head].double() @ keys.transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)  # [copies, tokens, keys]
        outs.append(scores.softmax(dim=-1).nan_to_num(0.0) @ values)
        lses.append(scores.logsumexp(dim=-1))
    return Attended(out=torch.stack(outs, dim=2), lse=torch.stack(lses, dim=2))


def prefix_of(tree: Tree) -> LayerKV:
    """The keys and values of the tree's prefix, with two kv_heads."""
    return some_kv(3, tree.prefix_tokens, 2)


def seen_rows(defined: DefinedTree) -> Tensor:  # [tokens, prefix + tokens] bool
    prefix, tokens = defined.tree.prefix_tokens, defined.tree.tokens
    seen = torch.zeros(tokens, prefix + tokens, dtype=torch.bool)
    for row in range(tokens):
        for source, number in defined.seen(row):
            seen[row, number + (prefix if source == "row" else 0)] = True
    return seen


def joined(prefix: LayerKV, own: LayerKV) -> LayerKV:  # of one copy
    return LayerKV(k=torch.cat([prefix.k, own.k])[None], v=torch.cat([prefix.v, own.v])[None])


def assert_same(actual: Attended, expected: Attended, atol: float = TOLERANCE) -> None:
    assert actual.lse.dtype == torch.float32
    torch.testing.assert_close(actual.out.double(), expected.out.double(), rtol=0, atol=atol)
    torch.testing.assert_close(actual.lse.double(), expected.lse.double(), rtol=0, atol=TOLERANCE)


def pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def attend_row_by_row(
    q: Tensor,  # [queries, heads, dim]
    own: LayerKV,
    prefix: LayerKV | None,
    plan: TilePlan,
    scale: float,
    softcap: float | None,
    rows: int = 3,  # of a tile
) -> Attended:
    """The kernel's slow twin, for any device and dtype: it reads the same tables."""
    kept = prefix or LayerKV(own.k[:0], own.v[:0])
    keys, values = torch.cat([kept.k, own.k])[None], torch.cat([kept.v, own.v])[None]
    before = len(kept.k)
    stops, places = plan.subtree_stops.tolist(), plan.positions.tolist()
    parts = []
    for columns in plan.tiles(rows).tolist():
        tile = Tile(*columns)
        for row in range(tile.first, tile.stop):
            own_rows = range(tile.own_first, row + 1)
            seen = {
                **{number: number for number in range(tile.prefix_first, before)},
                **{before + i: places[i] for i in range(tile.whole_first, tile.whole_stop)},
                **{before + i: places[i] for i in own_rows if row < stops[i]},
            }
            window = plan.window or 1 << 30
            index = [key for key, place in seen.items() if places[row] - place < window]
            query = q[None, row - plan.first : row - plan.first + 1]
            part = attend(query, keys[:, index], values[:, index], scale=scale, softcap=softcap)
            parts.append(part)
    return Attended(torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1))


def on_paper(q: Tensor, *_others: object) -> Attended:
    """A kernel that gives what has the shape of an answer."""
    tokens, heads, _ = q.shape
    return Attended(torch.empty_like(q)[None], q.new_empty(1, tokens, heads, dtype=torch.float32))
