"""The staged schedule, for decoders whose layers carry a recurrent state: level by level.

    prefix  ──  document  ──┬── suffix 0    one padded batch,
    (once a process)        └── suffix 1    each with its own clone of the states

Packed spans would mix their recurrent states. So every level starts from a clone of the states
that the level above ended in. The keys and values of a level are stored once and viewed by all
levels below it. On a GPU, documents of one length are read together: padding would change their
states. Entry point: `StagedSchedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from pipeline.inference.attention.kernels import (
    Attended,
    LayerKV,
    attend,
    empty_like,
)
from pipeline.inference.attention.tiles import to_device
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import TokenCounter, pad
from pipeline.inference.schedules.forward import (
    LayerStates,
    ReadPoint,
    Suffix,
    run_to_layers,
)

# With a span of one token, model code takes its path for generation. That path writes states in
# place, and it gives other numbers: Nemotron-H and Granite do not limit the time step there.
_MIN_TOKENS = 2
# A copy of the states of 24 layers of 32 heads of 128 x 128 numbers of 4 bytes takes 50 MB.
_GPU_COPIES = 64


@dataclass(frozen=True, slots=True)
class Level:
    """Spans of one length that have been read: their keys and values, and their final states.

    As many copies of what is below them belong to each, one span after the other.
    """

    cache: DynamicCache  # of all spans; never passed to a forward, which would write its states
    stop: int  # the position after their last tokens
    spans: int = 1

    def kv(self, layer: int) -> LayerKV:  # [spans, keys, kv_heads, dim]
        """The layer's keys and values as views; the newest ones, where it keeps only a window."""
        kept: Any = self.cache.layers[layer]
        return LayerKV(k=kept.keys.transpose(1, 2), v=kept.values.transpose(1, 2))


@dataclass(frozen=True, slots=True)
class StagedAttention:
    """Attention of copies of a span over themselves and over the levels above."""

    ancestors: tuple[Level, ...]

    def attend(
        self,
        layer: int,
        q: Tensor,  # [copies, tokens, heads, dim]
        own: LayerKV,  # [copies, tokens, kv_heads, dim]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Attended:
        """All copies attend to their spans of a level in one call."""
        copies, tokens, heads, dim = q.shape
        options: dict[str, Any] = {"scale": scale, "softcap": softcap}
        seen = empty_like(q)
        attend(q, own.k, own.v, causal=True, window=window, into=seen, **options)
        for level in self.ancestors:
            kv, below = level.kv(layer), copies // level.spans
            # — where no key is out of a window, the queries below a span are one sequence
            rows = (level.spans, below * tokens) if window is None else (copies, tokens)
            k, v = (_repeated(x, rows[0] // level.spans) for x in (kv.k, kv.v))
            whole = Attended(seen.out.view(*rows, heads, dim), seen.lse.view(*rows, heads))
            offset = self.ancestors[-1].stop - (level.stop - k.shape[1])
            options |= {"offset": offset, "window": window, "into": whole, "merge": True}
            attend(q.reshape(whole.out.shape), k, v, **options)
        return seen


def _repeated(
    x: Tensor,  # [spans, ...]
    times: int,
) -> Tensor:  # [spans * times, ...]
    """Each span's part that many times; a view where there is one span."""
    return x.unsqueeze(1).expand(x.shape[0], times, *x.shape[1:]).flatten(0, 1)


def read_level(
    model: LoadedModel,
    ancestors: tuple[Level, ...],
    token_ids: Tensor,  # [copies, tokens] int64
    layers: Sequence[int],
) -> tuple[dict[int, Tensor], Level]:  # by layer: [copies, tokens, hidden]
    """The states of a span below `ancestors` after each of these layers, and the span as a level.

    Layers below the deepest of these are not run.
    """
    copies, tokens = token_ids.shape
    assert tokens >= _MIN_TOKENS or not ancestors, f"a span of {tokens} tokens"
    start = ancestors[-1].stop if ancestors else 0
    cache = DynamicCache(config=model.network.config)
    if ancestors:
        clone_states(ancestors[-1].cache, cache, copies // ancestors[-1].spans)
    positions = torch.arange(start, start + tokens, device=token_ids.device)
    by_layer: dict[int, Tensor] = {}
    with torch.inference_mode():
        run_to_layers(
            model.decoder,
            layers,
            by_layer.__setitem__,
            input_ids=token_ids,
            position_ids=positions.expand(copies, tokens),
            **model.cache_kwargs(cache),
            tree=StagedAttention(ancestors),
        )
    return by_layer, Level(cache, stop=start + tokens, spans=copies)


def clone_states(kept: DynamicCache, cache: DynamicCache, copies: int) -> None:
    """Gives each of the copies below a span a clone of its states, not of keys and values."""
    for layer, of_layer in enumerate(kept.layers):
        if not isinstance(of_layer, LinearAttentionCacheLayerMixin):
            continue
        for i, state in of_layer.conv_states.items():
            if state is not None:
                cache.update_conv_state(_repeated(state, copies), layer, i)
        for i, state in of_layer.recurrent_states.items():
            if state is not None:
                cache.update_recurrent_state(_repeated(state, copies), layer, i)


@dataclass(frozen=True, slots=True)
class PaddedSuffixes:
    """Suffixes as one padded batch.

    Padding comes last, so neither attention nor a recurrent state carries it to a suffix.
    """

    token_ids: Tensor  # [suffixes, tokens] int64
    last: Tensor  # [suffixes] int64: the column of each suffix's last token

    @classmethod
    def of(cls, suffixes: Sequence[Suffix], device: torch.device) -> PaddedSuffixes:
        token_ids, _ = pad(suffixes, min_width=_MIN_TOKENS)
        last = torch.tensor([len(s) - 1 for s in suffixes], dtype=torch.int64, device=device)
        return cls(torch.from_numpy(token_ids).to(device), last)

    def states(
        self, model: LoadedModel, ancestors: tuple[Level, ...], layers: Sequence[int]
    ) -> dict[int, Tensor]:  # by layer: [spans, suffixes, hidden]
        """The states at the suffixes' last tokens, below each span of the last level."""
        spans, suffixes = ancestors[-1].spans if ancestors else 1, len(self.last)
        by_layer, _ = read_level(model, ancestors, self.token_ids.repeat(spans, 1), layers)
        rows = torch.arange(suffixes, device=self.last.device)
        return {
            layer: states.view(spans, suffixes, *states.shape[1:])[:, rows, self.last]
            for layer, states in by_layer.items()
        }


@dataclass(frozen=True, slots=True)
class StagedSchedule:
    """A model that has read a text as levels: the prefix, or a document below the prefix.

    The last token of the prefix is unread, so that no document is a span of one token.
    """

    model: LoadedModel
    ancestors: tuple[Level, ...]
    pending_tokens: tuple[int, ...]  # the text's last tokens, which are read with what follows

    @classmethod
    def from_prefix(
        cls, model: LoadedModel, prefix: Sequence[int], *, layers: int | None = None
    ) -> StagedSchedule:
        ancestors: tuple[Level, ...] = ()
        if len(prefix) > 1:
            token_ids = torch.tensor([prefix[:-1]], device=model.device)
            _, level = read_level(model, (), token_ids, [layers or model.layers])
            ancestors = (level,)
        return cls(model, ancestors, tuple(prefix[-1:]))

    def reader(self, points: Sequence[ReadPoint]) -> StagedReader:
        """A reader of these points, whose suffixes are padded to one batch."""
        return StagedReader(self, points)

    def with_tokens(self, token_ids: Sequence[int], counter: TokenCounter) -> StagedSchedule:
        """The text followed by these tokens; `counter` counts what is read.

        A text too short to be a level is read with what follows.
        """
        together = (*self.pending_tokens, *token_ids)
        if self.ancestors and len(together) < _MIN_TOKENS:
            return StagedSchedule(self.model, self.ancestors, together)
        counter.tokens += len(together)
        ids = torch.tensor([together], device=self.model.device)
        _, level = read_level(self.model, self.ancestors, ids, [self.model.layers])
        return StagedSchedule(self.model, (*self.ancestors, level), ())

    def states(
        self, suffixes: Sequence[Suffix], counter: TokenCounter
    ) -> Tensor:  # [suffixes, hidden]
        """The last layer's normalised states at the suffixes' last tokens, in one padded batch."""
        below = [(*self.pending_tokens, *suffix) for suffix in suffixes]
        padded = PaddedSuffixes.of(below, self.model.device)
        counter.tokens += padded.token_ids.numel()
        return padded.states(self.model, self.ancestors, [self.model.layers])[self.model.layers][0]


class StagedReader:
    """Read points whose suffixes are one padded batch, as deep as the deepest of the points."""

    def __init__(self, schedule: StagedSchedule, points: Sequence[ReadPoint]) -> None:
        self._schedule, self._points = schedule, points
        # Copies of the recurrent states in a batch. On a CPU more than those of one document would
        # take memory, and no less time.
        self.max_copies = _GPU_COPIES if schedule.model.device.type == "cuda" else 1
        self._layers = [point.layer for point in points]
        suffixes = list(dict.fromkeys(suffix for point in points for suffix in point.suffixes))
        row_of = {suffix: row for row, suffix in enumerate(suffixes)}
        device = schedule.model.device
        self._padded = PaddedSuffixes.of(suffixes, device)
        rows = {point.layer: [row_of[suffix] for suffix in point.suffixes] for point in points}
        self._rows = {  # [suffixes of the point] int64
            layer: torch.tensor(of_layer, dtype=torch.int64, device=device)
            for layer, of_layer in rows.items()
        }

        # Tokens of the prefix that are read again with every document.
        self.repeated_prefix_tokens = len(schedule.pending_tokens)
        # Tokens below every document that go through the model, padding included.
        self.question_tokens = self._padded.token_ids.numel()

    @torch.inference_mode()
    def read(self, documents: Sequence[Sequence[int]]) -> list[LayerStates]:
        """The states of every read point."""
        rows: dict[int, list[int]] = {}  # of the documents with this many tokens
        for row, document in enumerate(documents):
            rows.setdefault(len(document), []).append(row)
        most = max(1, self.max_copies // max(1, len(self._padded.last)))
        groups = [
            of_length[start : start + most]
            for of_length in rows.values()
            for start in range(0, len(of_length), most)
        ]
        read = [self._read([documents[row] for row in group]) for group in groups]
        rows_read = np.array([row for group in groups for row in group])
        [order] = to_device([rows_read.argsort()], self._schedule.model.device)
        return [
            LayerStates(
                torch.cat([at_rows[point.layer] for at_rows, _ in read])[order].transpose(0, 1),
                torch.cat([means[point.layer] for _, means in read])[order] if point.mean else None,
            )
            for point in self._points
        ]

    def _read(
        self,
        documents: Sequence[Sequence[int]],  # of one length
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """By layer: the states at the suffixes' last tokens, and the means of a document's own.

        They are [docs, suffixes, hidden] and [docs, hidden].
        """
        model, ancestors, pending_tokens = (
            self._schedule.model,
            self._schedule.ancestors,
            self._schedule.pending_tokens,
        )
        ids = np.array([[*pending_tokens, *document] for document in documents])
        [token_ids] = to_device([ids.ravel()], model.device)
        states, level = read_level(model, ancestors, token_ids.view(ids.shape), self._layers)
        means = {
            layer: of_layer[:, len(pending_tokens) :].float().mean(dim=1)
            for layer, of_layer in states.items()
        }
        if not len(self._padded.last):
            return {layer: of_layer[:, :0] for layer, of_layer in states.items()}, means
        at_ends = self._padded.states(model, (*ancestors, level), self._layers)
        return {layer: at_ends[layer][:, rows] for layer, rows in self._rows.items()}, means
