"""Oracles of attention: a softmax in float64 under a mask, and the mask of a random tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from random_trees import DefinedTree
from torch import Tensor

from pipeline.inference.attention.reference import Attended, LayerKV
from pipeline.inference.attention.tree import Tree
from pipeline.inference.processor import native

DIM = 8
SCALE = DIM**-0.5
# A score sums 8 products, below 64 in all, in float32: its error enters a weight as a factor, and
# a weighted mean of values below 8 as that much more. Half of it is seen at worst.
TOLERANCE = 64 * SCALE * 8 * torch.finfo(torch.float32).eps / 2

BUILDS = native._runnable(torch.cpu.get_capabilities()) if native._library() else []
needs_native = pytest.mark.skipif(not BUILDS, reason="no kernels for this processor")


@contextmanager
def of_build(name: str) -> Iterator[None]:
    """The kernels are those of one build inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSAY_KERNELS", name)
        forget()
        yield
    forget()


def forget() -> None:
    native.build.cache_clear()
    native._kernel.cache_clear()


def some(seed: int, *shape: int) -> Tensor:  # [*shape, dim]
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(*shape, DIM, generator=generator)


def some_kv(seed: int, *shape: int) -> LayerKV:  # [*shape, dim]
    return LayerKV(k=some(seed, *shape), v=some(seed + 1, *shape))


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def views(seed: int, rows: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[rows, heads, dim] of a larger tensor, with other numbers between them."""
    return numbers(seed, rows, heads + 1, dim + 3).to(dtype)[:, 1:, :dim]


def dense(
    q: Tensor,  # [tokens, heads, dim]
    kv: LayerKV,  # [keys, kv_heads, dim]
    seen: Tensor,  # [tokens, keys] bool
    softcap: float | None = None,
    scale: float = SCALE,
) -> Attended:
    """Head by head."""
    heads, kv_heads = q.shape[1], kv.k.shape[1]
    group = heads // kv_heads
    outs, lses = [], []
    for head in range(heads):
        keys, values = (x[:, head // group].double() for x in (kv.k, kv.v))
        scores = q[:, head].double() @ keys.T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)  # [tokens, keys]
        outs.append(scores.softmax(dim=-1) @ values)
        lses.append(scores.logsumexp(dim=-1))
    return Attended(out=torch.stack(outs, dim=1), lse=torch.stack(lses, dim=1))


def prefix_of(tree: Tree) -> LayerKV:
    """The keys and values of the tree's prefix, with two kv_heads."""
    return some_kv(3, tree.prefix_tokens, 2)


def seen_rows(defined: DefinedTree) -> Tensor:  # [tokens, prefix + tokens] bool
    prefix, tokens = defined.tree.prefix_tokens, defined.tree.tokens
    seen = torch.zeros(tokens, prefix + tokens, dtype=torch.bool)
    for row in range(tokens):
        for source, number in defined.visible(row):
            seen[row, number + (prefix if source == "row" else 0)] = True
    return seen


def joined(prefix: LayerKV, own: LayerKV) -> LayerKV:
    return prefix.followed_by(own)


def assert_same(actual: Attended, expected: Attended, atol: float = TOLERANCE) -> None:
    assert actual.lse.dtype == torch.float32
    torch.testing.assert_close(actual.out.double(), expected.out.double(), rtol=0, atol=atol)
    torch.testing.assert_close(actual.lse.double(), expected.lse.double(), rtol=0, atol=TOLERANCE)


def on_paper(q: Tensor, *_others: object) -> Attended:
    """A kernel that gives what has the shape of an answer."""
    tokens, heads, _ = q.shape
    return Attended(torch.empty_like(q), q.new_empty(tokens, heads, dtype=torch.float32))
