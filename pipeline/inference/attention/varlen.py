"""Many runs of queries, each over its own run of keys, in one kernel call.

Entry points: `flash_kernel`, which is torch's varlen FlashAttention (Dao et al., 2022), and its
slow twin `attend_run_by_run`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from pipeline.inference.attention.kernels import Attended, attend, attend_causally


@dataclass(frozen=True, slots=True)
class Runs:
    """Packed runs of queries, each over the run of packed keys with the same number.

    A run may have no queries: its keys are not read. Every run has keys.
    """

    q_starts: Tensor  # [runs + 1] int32: the start of each run's queries, and the end of the last
    k_starts: Tensor  # [runs + 1] int32
    longest_q: int
    longest_k: int
    causal: bool = False  # each run over itself: a query sees the keys up to its own
    window: int | None = None  # of causal runs: only the last `window` of those keys


class Kernel(Protocol):
    """Attention of all runs, as one copy."""

    def __call__(
        self,
        q: Tensor,  # [tokens, heads, dim]
        k: Tensor,  # [keys, kv_heads, dim]
        v: Tensor,  # [keys, kv_heads, dim]
        runs: Runs,
        *,
        scale: float,
    ) -> Attended: ...


def flash_kernel(varlen: Callable[..., Any] = varlen_attn) -> Kernel:
    """torch's FlashAttention, called as this version of torch requires."""
    # torch 2.11 accepts grouped heads; later versions require `enable_gqa`.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen).parameters else {}

    def flash(
        q: Tensor,  # [tokens, heads, dim]
        k: Tensor,  # [keys, kv_heads, dim]
        v: Tensor,  # [keys, kv_heads, dim]
        runs: Runs,
        *,
        scale: float,
    ) -> Attended:
        tokens, heads, _ = q.shape
        # How many keys before and after its own a query sees; -1 is all of them.
        before = -1 if runs.window is None else runs.window - 1
        window_size = (before, 0) if runs.causal else (-1, -1)
        out, lse = varlen(
            q,
            k,
            v,
            runs.q_starts,
            runs.k_starts,
            # At 1 the kernel takes its decoding path, which requires a query in every run.
            max(2, runs.longest_q),
            runs.longest_k,
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=window_size,
            **grouped,
        )
        # Documented as [tokens, heads]; the kernels of torch 2.11 to 2.13 return [heads, tokens].
        by_heads = lse.shape == (heads, tokens)
        return Attended(out.unsqueeze(0), (lse.T if by_heads else lse).unsqueeze(0))

    return flash


def attend_run_by_run(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,  # [keys, kv_heads, dim]
    v: Tensor,  # [keys, kv_heads, dim]
    runs: Runs,
    *,
    scale: float,
) -> Attended:
    """The kernel's slow twin, for any device and dtype: one call of `attend` for each run."""
    tokens, heads, _ = q.shape
    out = torch.zeros_like(q).unsqueeze(0)
    lse = q.new_full((1, tokens, heads), -torch.inf, dtype=torch.float32)
    edges = zip(pairwise(runs.q_starts.tolist()), pairwise(runs.k_starts.tolist()), strict=True)
    for (q_start, q_stop), (k_start, k_stop) in edges:
        if q_start == q_stop:
            continue
        queries = q[q_start:q_stop].unsqueeze(0)
        keys, values = (x[k_start:k_stop].unsqueeze(0) for x in (k, v))
        if runs.causal:
            part = attend_causally(queries, keys, values, scale=scale, window=runs.window)
        else:
            part = attend(queries, keys, values, scale=scale)
        out[:, q_start:q_stop], lse[:, q_start:q_stop] = part.out, part.lse
    return Attended(out, lse)
