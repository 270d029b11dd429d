"""A plan made into few kernel calls for a whole batch, laid out on the device before its layers.

The runs of rows that a level joins go through one varlen call where their keys lie behind one
another. Keys are always a view: what lies between two runs of them is a run that no query asks.
Queries are a view where they lie end to end, as they do in all levels but those of prefixes that
some questions share; elsewhere they are gathered.

The layers then run without the host reading anything back. They are not captured as a CUDA graph
nor compiled: a graph replays fixed shapes and addresses, and no two batches have the same number
of tokens, runs or launches.

Knows plans, rows and a kernel. Knows nothing of tokens, models or transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.inference.attention.hook import LayerKV, attend_call, of_rows
from pipeline.inference.attention.kernels import Attended, merge_into
from pipeline.inference.attention.plan import AttentionPlan, Call, Level
from pipeline.inference.attention.varlen import Kernel, Runs

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call, and the rows of the batch that it reads."""

    rows: slice | Tensor  # of the queries; [queries] int64 where they do not lie end to end
    keys: slice
    from_prefix: bool  # keys of the kept prefix, not of this batch
    runs: Runs


@dataclass(frozen=True, slots=True)
class Launches:
    """One layer's attention: every row over its own span, and what is merged into it.

    A call that hides keys from some of its queries, at a window's edge, stays a call: the varlen
    kernel's windows are documented for causal runs alone.
    """

    first: Launch
    merged: tuple[Launch | Call, ...]
    kernel: Kernel

    def attend(
        self,
        q: Tensor,  # [tokens, heads, dim]
        own: LayerKV,
        prefix: LayerKV | None,
        *,
        scale: float,
    ) -> Attended:  # of one copy
        """`attend_tree` of the plan that these launches were made from."""
        tokens, _, _ = q.shape
        assert self.first.rows == slice(0, tokens), f"{self.first.rows} of {tokens} rows"
        whole = self._launch(self.first, q, own, prefix, scale)
        for step in self.merged:
            if isinstance(step, Call):
                part = attend_call(q, own, prefix, step, scale=scale)
                merge_into(of_rows(whole, step.queries), part)
            else:
                _merge_rows(whole, step.rows, self._launch(step, q, own, prefix, scale))
        return whole

    def _launch(
        self,
        launch: Launch,
        q: Tensor,  # [tokens, heads, dim]
        own: LayerKV,
        prefix: LayerKV | None,
        scale: float,
    ) -> Attended:
        source = prefix if launch.from_prefix else own
        assert source is not None, f"{launch} reads a prefix and the batch has none"
        rows, keys = launch.rows, launch.keys
        queries = q[rows] if isinstance(rows, slice) else q.index_select(0, rows)
        return self.kernel(queries, source.k[keys], source.v[keys], launch.runs, scale=scale)


def _merge_rows(whole: Attended, rows: slice | Tensor, part: Attended) -> None:
    """`merge_into` some rows; gathered ones are put back."""
    if isinstance(rows, slice):
        merge_into(Attended(whole.out[:, rows], whole.lse[:, rows]), part)
        return
    asked = Attended(whole.out.index_select(1, rows), whole.lse.index_select(1, rows))
    merge_into(asked, part)
    whole.out.index_copy_(1, rows, asked.out)
    whole.lse.index_copy_(1, rows, asked.lse)


def compile_plans(
    plans: Mapping[int | None, AttentionPlan], device: torch.device, kernel: Kernel
) -> dict[int | None, Launches]:
    """The launches of each window's layers; all their integers go to the device in one copy."""
    drafts = {
        window: [step for level in plan.levels for step in _drafts(level)]
        for window, plan in plans.items()
    }
    arrays = [
        array
        for steps in drafts.values()
        for step in steps
        if isinstance(step, _Draft)
        for array in step.arrays
    ]
    in_turn = iter(moved(arrays, device))
    compiled: dict[int | None, Launches] = {}
    for window, steps in drafts.items():
        first, *merged = [s if isinstance(s, Call) else s.launch(in_turn) for s in steps]
        assert isinstance(first, Launch), f"{first} hides keys of a row's own span"
        compiled[window] = Launches(first, tuple(merged), kernel)
    return compiled


@dataclass(frozen=True, slots=True)
class _Draft:
    """A launch whose integers are still on the host."""

    rows: slice | Integers
    keys: slice
    q_tokens: Integers  # of each run
    k_tokens: Integers
    kind: Call  # any of the calls it is made of: all are from the prefix and causal, or none

    @property
    def arrays(self) -> list[NDArray[np.int32]]:
        gathered = [] if isinstance(self.rows, slice) else [self.rows.astype(np.int32)]
        return [_starts(self.q_tokens), _starts(self.k_tokens), *gathered]

    def launch(self, in_turn: Iterator[Tensor]) -> Launch:
        """Takes from the device's tensors what `arrays` gave."""
        runs = Runs(
            q_starts=next(in_turn),
            k_starts=next(in_turn),
            longest_q=int(self.q_tokens.max()),
            longest_k=int(self.k_tokens.max()),
            causal=self.kind.causal,
            window=self.kind.window,
        )
        rows = self.rows if isinstance(self.rows, slice) else next(in_turn).long()
        return Launch(rows, self.keys, self.kind.from_prefix, runs)


def _starts(tokens: Integers) -> NDArray[np.int32]:
    return np.concatenate([[0], tokens.cumsum()]).astype(np.int32)


def _drafts(level: Level) -> Iterator[_Draft | Call]:
    alike: dict[tuple[bool, bool], list[Call]] = {}
    for call in level:
        if call.window is not None and not call.causal:
            yield call
        else:
            alike.setdefault((call.causal, call.from_prefix), []).append(call)
    for calls in alike.values():
        # Spans that fit into the window carry none, and it hides nothing from them.
        kind = next((call for call in calls if call.window is not None), calls[0])
        runs = _runs(calls)
        chains = _chains(runs)
        for chain in range(int(chains.max()) + 1):
            yield _draft(runs[chains == chain], kind)


# The columns of a table of runs, one row a run of queries, in the order of their keys.
_Q_START, _Q_TOKENS, _K_START, _K_TOKENS = range(4)


def _runs(calls: Sequence[Call]) -> Integers:  # [runs, 4]
    """Every copy of every call."""
    sides = [(c.queries, c.keys) for c in calls]
    firsts = np.array([(q.start, q.tokens, k.start, k.tokens) for q, k in sides])
    strides = np.array([(q.stride, 0, k.stride, 0) for q, k in sides])
    copies = np.array([q.copies for q, _ in sides])
    number = np.arange(copies.sum()) - np.repeat(copies.cumsum() - copies, copies)  # of a copy
    runs = np.repeat(firsts, copies, axis=0) + number[:, None] * np.repeat(strides, copies, axis=0)
    order = np.lexsort((runs[:, _Q_START], runs[:, _K_TOKENS], runs[:, _K_START]))
    sorted_runs: Integers = runs[order]
    return sorted_runs


def _first_of_keys(runs: Integers) -> NDArray[np.bool_]:  # [runs]
    """Whether a run reads other keys than the one above it: those of the same go together."""
    keys = runs[:, _K_START:]
    return np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)])


def _chains(runs: Integers) -> Integers:  # [runs]
    """The launch of each run: keys that overlap have to be in different ones."""
    first = _first_of_keys(runs)
    keys = runs[first]
    chains = np.zeros(len(keys), dtype=np.int64)
    stops = keys[:, _K_START] + keys[:, _K_TOKENS]
    if (keys[1:, _K_START] < stops[:-1]).any():
        ends: list[int] = []  # of the keys in each chain so far
        edges = zip(keys[:, _K_START].tolist(), stops.tolist(), strict=True)
        for i, (start, stop) in enumerate(edges):
            chain = next((c for c, end in enumerate(ends) if end <= start), len(ends))
            ends[chain : chain + 1] = [stop]
            chains[i] = chain
    of_runs: Integers = chains[first.cumsum() - 1]
    return of_runs


def _draft(runs: Integers, kind: Call) -> _Draft:
    """One launch of runs whose keys do not overlap, with a run without queries for each gap."""
    # keys      |  run  | gap |  run  |run|
    # q_tokens      5      0      3     4
    (first,) = np.nonzero(_first_of_keys(runs))
    start, tokens = runs[first, _K_START], runs[first, _K_TOKENS]
    stop = start + tokens
    q_tokens, k_tokens = np.zeros((2, 2 * len(first) - 1), dtype=np.int64)
    q_tokens[::2] = np.add.reduceat(runs[:, _Q_TOKENS], first)
    k_tokens[::2], k_tokens[1::2] = tokens, start[1:] - stop[:-1]
    there = k_tokens > 0
    keys = slice(int(start[0]), int(stop[-1]))
    return _Draft(_rows(runs), keys, q_tokens[there], k_tokens[there], kind)


def _rows(runs: Integers) -> slice | Integers:
    """The rows of all queries, run by run."""
    start, tokens = runs[:, _Q_START], runs[:, _Q_TOKENS]
    stop = start + tokens
    if (start[1:] == stop[:-1]).all():
        return slice(int(start[0]), int(stop[-1]))
    before = tokens.cumsum() - tokens
    rows: Integers = np.repeat(start - before, tokens) + np.arange(tokens.sum())
    return rows


def moved(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Flat arrays of one type on the device, as parts of one buffer."""
    buffer = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":  # from pageable memory the copy would be waited for
        buffer = buffer.pin_memory()
    there = buffer.to(device, non_blocking=True)
    return list(torch.split(there, [len(array) for array in arrays]))
