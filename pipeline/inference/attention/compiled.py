"""Compile the plans of a batch into few kernel calls, with their indices on the device.

Entry point: `compile_plan`. `attend_tree` takes a compiled plan, and gives the same numbers.

One varlen kernel call takes all segments of a level whose keys do not overlap. Keys and values are
always views: the rows between two runs of keys become a run that has no queries. Queries are views
where they are consecutive; below a prefix that only some questions share they are gathered.

The layers then run without a device-to-host read. They are not captured as a CUDA graph and not
compiled by torch: both need fixed shapes, and every batch has other numbers of tokens and runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.inference.attention.kernels import Kernel, KernelCall, VarlenBatch
from pipeline.inference.attention.merge import Step
from pipeline.inference.attention.plan import AttentionPlan, Level, Segment

Integers = NDArray[np.int64]
CompiledPlan = tuple[tuple[Step, ...], ...]  # level by level, as an `AttentionPlan`


def compile_plan(plan: AttentionPlan, device: torch.device, kernel: Kernel) -> CompiledPlan:
    """The plan with all indices on the device.

    A segment that masks keys for some of its queries, at a window's edge, stays a segment: torch
    documents the kernel's windows for causal runs only.
    """
    return tuple(tuple(_steps(level, device, kernel)) for level in plan)


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """One-dimensional arrays of one dtype on the device, as parts of one buffer."""
    buffer = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":  # a copy from pageable memory would make the host wait
        buffer = buffer.pin_memory()
    on_device = buffer.to(device, non_blocking=True)
    return list(torch.split(on_device, [len(array) for array in arrays]))


def _steps(level: Level, device: torch.device, kernel: Kernel) -> Iterator[Step]:
    alike: dict[tuple[bool, bool], list[Segment]] = {}
    for segment in level:
        if segment.window is not None and not segment.causal:
            yield segment
        else:
            alike.setdefault((segment.causal, segment.from_prefix), []).append(segment)
    for segments in alike.values():
        # A span that fits into the window has none; the window of a longer one masks none of it.
        kind = next((s for s in segments if s.window is not None), segments[0])
        runs = _runs(segments)
        numbers = _call_numbers(runs)
        for number in range(int(numbers.max()) + 1):
            yield _call(runs[numbers == number], kind, device, kernel)


_Runs = Integers  # [runs, 4]: one row for each run of queries, sorted by the keys
_Q_START, _Q_TOKENS, _K_START, _K_TOKENS = range(4)  # its columns


def _runs(segments: Sequence[Segment]) -> _Runs:
    """Every copy of every segment."""
    sides = [(segment.queries, segment.keys) for segment in segments]
    firsts = np.array([(q.start, q.tokens, k.start, k.tokens) for q, k in sides])
    strides = np.array([(q.stride, 0, k.stride, 0) for q, k in sides])
    copies = np.array([q.copies for q, _ in sides])
    copy_numbers = np.arange(copies.sum()) - np.repeat(copies.cumsum() - copies, copies)
    moved_by = copy_numbers[:, None] * np.repeat(strides, copies, axis=0)
    runs = np.repeat(firsts, copies, axis=0) + moved_by
    order = np.lexsort((runs[:, _Q_START], runs[:, _K_TOKENS], runs[:, _K_START]))
    sorted_runs: _Runs = runs[order]
    return sorted_runs


def _is_first_of_keys(runs: _Runs) -> NDArray[np.bool_]:  # [runs]
    """Whether a run reads other keys than the run before it."""
    keys = runs[:, _K_START:]
    return np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)])


def _call_numbers(runs: _Runs) -> Integers:  # [runs]
    """The kernel call of each run: overlapping keys go to different calls, greedily."""
    first = _is_first_of_keys(runs)
    keys = runs[first]
    calls = np.zeros(len(keys), dtype=np.int64)
    stops = keys[:, _K_START] + keys[:, _K_TOKENS]
    if (keys[1:, _K_START] < stops[:-1]).any():
        ends: list[int] = []  # where the keys of each call end so far
        edges = zip(keys[:, _K_START].tolist(), stops.tolist(), strict=True)
        for i, (start, stop) in enumerate(edges):
            number = next((n for n, end in enumerate(ends) if end <= start), len(ends))
            ends[number : number + 1] = [stop]
            calls[i] = number
    of_runs: Integers = calls[first.cumsum() - 1]
    return of_runs


def _call(runs: _Runs, kind: Segment, device: torch.device, kernel: Kernel) -> KernelCall:
    """One call of runs whose keys do not overlap, with a run without queries for each gap.

    `kind` is any of their segments: all agree on `from_prefix` and `causal`.
    """
    # keys      |  run  | gap |  run  |run|
    # q_tokens      5      0      3     4
    (first,) = np.nonzero(_is_first_of_keys(runs))
    k_start, tokens = runs[first, _K_START], runs[first, _K_TOKENS]
    k_stop = k_start + tokens
    q_tokens, k_tokens = np.zeros((2, 2 * len(first) - 1), dtype=np.int64)
    q_tokens[::2] = np.add.reduceat(runs[:, _Q_TOKENS], first)
    k_tokens[::2], k_tokens[1::2] = tokens, k_start[1:] - k_stop[:-1]
    nonempty = k_tokens > 0
    rows = _query_rows(runs)
    indices = [np.concatenate([[0], n[nonempty].cumsum()]) for n in (q_tokens, k_tokens)]
    if not isinstance(rows, slice):
        indices.append(rows)
    cu_seqlens_q, cu_seqlens_k, *gathered = to_device(
        [each.astype(np.int32) for each in indices], device
    )
    return KernelCall(
        rows=rows if isinstance(rows, slice) else gathered[0].long(),
        keys=slice(int(k_start[0]), int(k_stop[-1])),
        from_prefix=kind.from_prefix,
        runs=VarlenBatch(
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=int(q_tokens.max()),
            max_seqlen_k=int(k_tokens.max()),
            causal=kind.causal,
            window=kind.window,
        ),
        kernel=kernel,
    )


def _query_rows(runs: _Runs) -> slice | Integers:  # [queries]
    """The rows of all queries, run by run."""
    start, tokens = runs[:, _Q_START], runs[:, _Q_TOKENS]
    stop = start + tokens
    if (start[1:] == stop[:-1]).all():
        return slice(int(start[0]), int(stop[-1]))
    before = tokens.cumsum() - tokens
    rows: Integers = np.repeat(start - before, tokens) + np.arange(tokens.sum())
    return rows
