"""A tree's attention as causal runs, for a kernel that takes sequences of many lengths.

Entry points: `causal_runs`, and `CausalRuns.attend` for a layer. A run is a document, or a span of
the branches below one. Its keys are those on the path from the root to its last row: the prefix,
the document, the spans above it, itself. They are gathered by one index, so that a layer is one
call of the kernel, or several where that takes much memory. The kernel's own causal mask and window
hide the rest. The indices are made once a batch, and the layers run without a device-to-host read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.inference.attention.kernels import Attended, Kernel, LayerKV, VarlenBatch
from pipeline.inference.attention.tree import Span, Tree
from pipeline.inference.memory import GATHERED

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RunsCall:
    """One call of the kernel."""

    queries: slice  # rows of the queries
    keys: Tensor  # [keys] int32: rows of the prefix, and after them those of the batch
    batch: VarlenBatch


@dataclass(frozen=True, slots=True)
class CausalRuns:
    """Attention of every row over its path from the root."""

    calls: tuple[RunsCall, ...]
    kernel: Kernel

    def attend(
        self,
        q: Tensor,  # [tokens, heads, dim]
        own: LayerKV,  # of the batch's own tokens
        prefix: LayerKV | None,
        scale: float,
    ) -> Attended:  # a batch of one
        """The rows' attention in one layer."""
        kv = own if prefix is None else prefix.followed_by(own)
        parts = [
            self.kernel(
                q[call.queries],
                kv.k.index_select(0, call.keys),
                kv.v.index_select(0, call.keys),
                call.batch,
                scale,
            )
            for call in self.calls
        ]
        if len(parts) == 1:
            return parts[0]
        return Attended(
            torch.cat([part.out for part in parts], 1), torch.cat([part.lse for part in parts], 1)
        )


def causal_runs(
    tree: Tree, device: torch.device, kernel: Kernel, *, window: int | None, branches_only: bool
) -> CausalRuns:
    """The runs of a batch, with all indices on the device.

    One call gathers at most `GATHERED` keys for each row of the batch and of its prefix, or the
    keys of one run.

    Args:
        window: Positions that a query sees, up to its own; None: all.
        branches_only: Whether the queries are the rows of the branches alone.
    """
    starts, tokens, q_tokens = _paths(tree, branches_only=branches_only)
    if window is not None:
        before = tokens.cumsum(axis=1) - tokens
        unseen = tokens.sum(axis=1) - (q_tokens + window - 1)  # keys that no query of the run sees
        hidden = np.clip(unseen[:, None] - before, 0, tokens)
        starts, tokens = starts + hidden, tokens - hidden
    calls = []
    q_stops = q_tokens.cumsum()
    for runs in _groups(tokens.sum(axis=1), most=GATHERED * (tree.prefix_tokens + tree.tokens)):
        queries, keys = q_tokens[runs], tokens[runs].sum(axis=1)
        edges = [np.concatenate([[0], each.cumsum()]) for each in (queries, keys)]
        rows = _rows(starts[runs].ravel(), tokens[runs].ravel())
        indices = [each.astype(np.int32) for each in (*edges, rows)]
        cu_seqlens_q, cu_seqlens_k, gathered = to_device(indices, device)
        stop = int(q_stops[runs][-1])
        batch = VarlenBatch(
            cu_seqlens_q, cu_seqlens_k, int(queries.max()), int(keys.max()), window=window
        )
        calls.append(RunsCall(slice(stop - int(queries.sum()), stop), gathered, batch))
    return CausalRuns(tuple(calls), kernel)


def _paths(tree: Tree, *, branches_only: bool) -> tuple[Integers, Integers, Integers]:
    """The first rows and the tokens of the pieces of each run's path, and its queries.

    Both are [runs, pieces], the queries [runs]. Rows are counted from the prefix's first one. A
    path of fewer pieces is filled up with empty ones.
    """
    documents = len(tree.documents)
    above = _span_paths(tree.spans)
    pieces = 2 + max(map(len, above), default=0)
    of_spans = np.zeros((2, len(tree.spans), pieces - 2), np.int64)
    for number, path in enumerate(above):
        of_spans[:, number, : len(path)] = [[s.start for s in path], [s.tokens for s in path]]
    shape = (documents, 1 + len(tree.spans), pieces)  # of a document: itself, and the spans
    starts, tokens = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    starts[:, :, 1] = np.array(tree.document_starts)[:, None] + tree.prefix_tokens
    starts[:, 1:, 2:] = of_spans[0] + tree.branch_starts[:, None, None] + tree.prefix_tokens
    tokens[:, :, 0] = tree.prefix_tokens
    tokens[:, :, 1] = np.array(tree.documents)[:, None]
    tokens[:, 1:, 2:] = of_spans[1]
    q_tokens = np.concatenate(
        [tokens[:, :1, 1], np.tile([span.tokens for span in tree.spans], (documents, 1))], axis=1
    )
    parts = [slice(1, None)] if branches_only else [slice(0, 1), slice(1, None)]
    flat = [
        np.concatenate([each[:, part].reshape(-1, *each.shape[2:]) for part in parts])
        for each in (starts, tokens, q_tokens)
    ]
    return flat[0], flat[1], flat[2].astype(np.int64)


def _span_paths(spans: Sequence[Span]) -> list[list[Span]]:
    """Of each span, the spans from the top to it."""
    paths: list[list[Span]] = []
    for span in spans:
        above = paths[-1] if paths else []
        paths.append([*(each for each in above if span.start < each.subtree_stop), span])
    return paths


def _groups(keys: Integers, *, most: int) -> Iterator[slice]:
    """Neighbouring runs with at most this many keys together, or one run."""
    stops, first = keys.cumsum(), 0
    while first < len(keys):
        seen = stops[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(stops, seen + most, side="right")))
        yield slice(first, last)
        first = last


def _rows(starts: Integers, tokens: Integers) -> Integers:
    """All rows of the pieces, one after the other."""
    before = tokens.cumsum() - tokens
    rows: Integers = np.repeat(starts - before, tokens) + np.arange(tokens.sum())
    return rows


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """One-dimensional arrays of one dtype on the device, as parts of one buffer."""
    buffer = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":  # a copy from pageable memory would make the host wait
        buffer = buffer.pin_memory()
    on_device = buffer.to(device, non_blocking=True)
    return list(torch.split(on_device, [len(array) for array in arrays]))
