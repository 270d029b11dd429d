"""Triton's kernels in its interpreter, against their oracles: run with TRITON_INTERPRET=1.

It prints the name of each part that holds. The interpreter has no products in bfloat16: they are
checked on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from conftest import random_network
from dense_oracle import SCALE, assert_same, dense, joined, prefix_of, seen_rows, some, some_kv
from hypothesis import given, settings
from random_trees import DefinedTree, defined_trees

from pipeline.inference import loading, proof
from pipeline.inference.attention.tiles import tile_plan
from pipeline.inference.attention.triton_tiles import attend_tiles
from pipeline.inference.model import triton_operations
from pipeline.inference.model.operations import PLAIN, Operations
from pipeline.inference.proof import tree_error


@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(defined_trees())
def attention_is_that_of_the_tree(defined: DefinedTree) -> None:
    tree, prefix = defined.tree, prefix_of(defined.tree)
    for first in {0, tree.document_rows} - {tree.tokens}:
        options: Any = {"window": defined.window, "branches_only": first > 0}
        plan = tile_plan(tree, torch.device("cpu"), **options)
        q, own = some(0, tree.tokens, 6)[first:], some_kv(1, tree.tokens, 2)
        kept = prefix if tree.prefix_tokens else None
        for softcap in (None, 5.0):
            seen = seen_rows(defined)[first:]
            expected = dense(q, joined(prefix, own), seen, softcap=softcap)
            assert_same(attend_tiles(q, own, kept, plan, SCALE, softcap), expected)


def operations_are_the_plain_ones() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, gates, ups = (torch.randn(48, 6, 64).to(dtype) for _ in range(3))
        cos, sin = torch.randn(2, 48, 64).to(dtype)
        weight = torch.randn(64).to(dtype)
        kernels, found = triton_operations, []
        fused = Operations(kernels.normalise, kernels.rotate, kernels.gate)
        for of, kind in ((fused, dtype), (PLAIN, torch.float32)):
            rotated = [x.to(kind) for _ in range(2)]
            if kind == dtype:
                rotated = [each.clone() for each in rotated]
            of.rotate(rotated[0], cos.to(kind), sin.to(kind), None, 0.0)
            of.rotate(rotated[1], cos.to(kind), sin.to(kind), weight.to(kind), 1e-5)
            normed = of.normalise(x.flatten(0, 1).to(kind), weight.to(kind), 1e-5)
            gated = of.gate(gates.flatten(1).to(kind).clone(), ups.flatten(1).to(kind))
            found.append([*rotated, normed, gated])
        for actual, expected in zip(*found, strict=True):
            within = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
            torch.testing.assert_close(actual.float(), expected, rtol=0, atol=within)


def models_use_it() -> None:
    """With layers of the Llama form, windows and capped scores, attention sinks."""
    for family in ("qwen3", "gemma2", "gpt_oss"):
        model = loading.prepare(random_network(family))
        assert model.kernel is attend_tiles, family
        assert tree_error(model) < 1e-5, family


if __name__ == "__main__":
    attention_is_that_of_the_tree()
    print("attention")
    operations_are_the_plain_ones()
    print("operations")
    loading.kernels_for = lambda _network: {"triton": attend_tiles}
    proof._LONG_TOKENS = 3 * 16 + 5  # the interpreter's blocks have 16 keys
    models_use_it()
    print("models")
