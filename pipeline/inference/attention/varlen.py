"""Many runs of queries, each over its own run of keys, in one kernel call.

Entry point: `flash_kernel`, which is torch's varlen FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from pipeline.inference.attention.kernels import Attended


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
