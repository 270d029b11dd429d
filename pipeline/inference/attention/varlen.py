"""Many runs of queries, each over its own run of keys, in one call of torch's varlen kernel.

Knows packed queries, keys and values, the kernel's call in the torch versions that have it, and
its slow twin. Knows nothing of trees, plans or models.
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
    """Runs of queries, end to end, each over one of as many runs of keys, end to end too.

    A run without queries leaves its keys unread; one without keys there is not.
    """

    q_starts: Tensor  # [runs + 1] int32: where each run's queries begin, and the last one's end
    k_starts: Tensor  # [runs + 1] int32
    longest_q: int
    longest_k: int
    causal: bool = False  # each run over itself: a query sees the keys up to its own
    window: int | None = None  # of causal runs: or the last of these keys only


class Kernel(Protocol):
    """The shape of a call: attention of all runs, as of one copy."""

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
    """torch's flash attention, called as the signature of this torch wants it."""
    # torch 2.11 takes grouped heads as they come; later versions want them announced.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen).parameters else {}

    def flash(q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, scale: float) -> Attended:
        tokens, heads, _ = q.shape
        out, lse = varlen(
            q,
            k,
            v,
            runs.q_starts,
            runs.k_starts,
            # At 1 the kernel takes another way, which wants a query in every run.
            max(2, runs.longest_q),
            runs.longest_k,
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=_window_size(runs),
            **grouped,
        )
        # The documentation says [tokens, heads]; the kernels of 2.11 to 2.13 give it by heads.
        by_heads = lse.shape == (heads, tokens)
        return Attended(out.unsqueeze(0), (lse.T if by_heads else lse).unsqueeze(0))

    return flash


def _window_size(runs: Runs) -> tuple[int, int]:
    """How many keys before and after its own a query sees; -1 is all of them."""
    if not runs.causal:
        return -1, -1
    return (-1 if runs.window is None else runs.window - 1), 0


def attend_run_by_run(q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, scale: float) -> Attended:
    """The kernel's slow twin, for any device and type: a call of the plain kernels for each run."""
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
