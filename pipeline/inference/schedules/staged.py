"""The staged schedule, for decoders whose layers carry a recurrent state: level by level.

    prefix  ──  document  ──┬── question 0    one padded batch,
    (once a process)         └── question 1    each with its own clone of the states

Packed spans would run into each other's states, so every level is read from a clone of those that
the level above ended in. Its keys and values are viewed where that level left them, in one copy.
Knows token ids and the caches of transformers. Knows nothing of labels, text or batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from pipeline.inference.attention.compiled import to_device
from pipeline.inference.attention.kernels import (
    Attended,
    LayerKV,
    attend,
    attend_causally,
    merge_into,
    out_of_window,
)
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import TokensRead
from pipeline.inference.schedules.hooks import states_at
from pipeline.inference.schedules.interface import Depth, Place, Take, sequences_of

# A span of one token would take the families' path for generation, which computes something else
# (Nemotron-H and Granite leave the limits of the time step out of it) and writes states in place.
_LEAST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Level:
    """A span that has been read: its keys and values, and the states that its layers ended in."""

    cache: DynamicCache  # of one copy; read only, since its states are written in place
    stop: int  # the position behind its last token

    def kv(self, layer: int) -> LayerKV:
        """The layer's keys and values, up to the last; a view."""
        kept: Any = self.cache.layers[layer]
        return LayerKV(k=kept.keys[0].transpose(0, 1), v=kept.values[0].transpose(0, 1))


@dataclass(frozen=True, slots=True)
class StagedAttention:
    """Attention of a span, or copies of it, over itself and the levels above."""

    above: tuple[Level, ...]

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
        """The copies' rows go over a level in one run, so that its keys are never repeated."""
        copies, tokens, heads, dim = q.shape
        itself = attend_causally(q, own.k, own.v, scale=scale, window=window, softcap=softcap)
        rows = q.reshape(1, copies * tokens, heads, dim)
        seen = Attended(itself.out.reshape(rows.shape), itself.lse.reshape(1, -1, heads))
        for level in self.above:
            kv = level.kv(layer)
            hidden = None
            if window is not None:
                offset = self.above[-1].stop - (level.stop - kv.k.shape[0])
                hidden = out_of_window(
                    tokens, kv.k.shape[0], offset=offset, window=window, device=q.device
                ).repeat(copies, 1)
            part = attend(rows, kv.k[None], kv.v[None], scale=scale, hidden=hidden, softcap=softcap)
            merge_into(seen, part)
        return Attended(seen.out.view(q.shape), seen.lse.view(copies, tokens, heads))


def read(
    model: LoadedModel,
    above: tuple[Level, ...],
    token_ids: Tensor,  # [copies, tokens] int64
) -> tuple[Tensor, Level]:  # [copies, tokens, hidden]
    """The normalised states of a span below `above`, and what its own children continue."""
    found, level = read_at(model, above, token_ids, [model.layers])
    return found[model.layers], level


def read_at(
    model: LoadedModel,
    above: tuple[Level, ...],
    token_ids: Tensor,  # [copies, tokens] int64
    layers: Sequence[int],
) -> tuple[dict[int, Tensor], Level]:  # by layer: [copies, tokens, hidden]
    """The same after each of these layers; nothing deeper is read."""
    copies, tokens = token_ids.shape
    assert tokens >= _LEAST_TOKENS or not above, f"a span of {tokens} tokens"
    start = above[-1].stop if above else 0
    cache = DynamicCache(config=model.network.config)
    if above:
        clone_states(above[-1].cache, cache, copies)
    positions = torch.arange(start, start + tokens, device=token_ids.device)
    with torch.inference_mode():
        found = states_at(
            model.decoder,
            layers,
            input_ids=token_ids,
            position_ids=positions.expand(copies, tokens),
            past_key_values=cache,
            use_cache=True,
            tree=StagedAttention(above),
        )
    return found, Level(cache, stop=start + tokens)


def clone_states(kept: DynamicCache, cache: DynamicCache, copies: int) -> None:
    """Give every copy its own clone of the kept states; keys and values stay where they are."""
    for layer, of_layer in enumerate(kept.layers):
        if not isinstance(of_layer, LinearAttentionCacheLayerMixin):
            continue
        for i, state in of_layer.conv_states.items():
            if state is not None:
                cache.update_conv_state(state.expand(copies, *state.shape[1:]), layer, i)
        for i, state in of_layer.recurrent_states.items():
            if state is not None:
                cache.update_recurrent_state(state.expand(copies, *state.shape[1:]), layer, i)


class StagedSchedule:
    """A model with its prefix read; the last token of that is left to be read by the documents.

    So no document is a span of one token.
    """

    def __init__(
        self, model: LoadedModel, prefix: Sequence[int], *, layers: int | None = None
    ) -> None:
        self._model = model
        self._left = tuple(prefix[-1:])
        self._above: tuple[Level, ...] = ()
        if len(prefix) > 1:
            deepest = model.layers if layers is None else layers
            token_ids = torch.tensor([prefix[:-1]], device=model.device)
            _, level = read_at(model, (), token_ids, [deepest])
            self._above = (level,)

    def ask(self, questions: Sequence[Sequence[int]]) -> StagedQuestions:
        """The questions, padded to one batch below any document."""
        return StagedQuestions(self._model, self._above, self._left, questions)

    def look(self, depths: Sequence[Depth]) -> StagedDepths:
        """The places of states at several layers, below any document."""
        return StagedDepths(self._model, self._above, self._left, depths)

    def keep(self, document: Sequence[int], laid_out: TokensRead) -> StagedText:
        """A document that is read once, for whatever will be asked below it."""
        return StagedText(self._model, self._above, self._left, laid_out).extended(document)


class StagedQuestions:
    """Questions as one padded batch."""

    def __init__(
        self,
        model: LoadedModel,
        above: tuple[Level, ...],
        left: tuple[int, ...],  # of the prefix, for the documents to read
        questions: Sequence[Sequence[int]],
    ) -> None:
        self._model, self._above, self._left = model, above, left
        self._token_ids = padded_below(questions, model.device)
        self._last = torch.tensor([len(q) - 1 for q in questions], device=model.device)

    @property
    def prefix_tokens(self) -> int:
        return len(self._left)

    @property
    def question_tokens(self) -> int:
        return self._token_ids.numel()

    def states(self, documents: Sequence[Sequence[int]]) -> Tensor:  # [questions, docs, hidden]
        """The states at the questions' last tokens, document after document."""
        return torch.stack([self._states(document) for document in documents], dim=1)

    def _states(self, document: Sequence[int]) -> Tensor:  # [questions, hidden]
        [token_ids] = to_device([np.array([*self._left, *document])], self._model.device)
        _, level = read(self._model, self._above, token_ids[None])
        states, _ = read(self._model, (*self._above, level), self._token_ids)
        return states[torch.arange(len(self._last), device=states.device), self._last]


class StagedDepths:
    """Places as one padded batch, read as deep as the deepest of them."""

    def __init__(
        self,
        model: LoadedModel,
        above: tuple[Level, ...],
        left: tuple[int, ...],  # of the prefix, for the documents to read
        depths: Sequence[Depth],
    ) -> None:
        self._model, self._above, self._left, self._depths = model, above, left, depths
        self._layers = [depth.layer for depth in depths]
        self._sequences = sequences_of(depths)
        self._token_ids = padded_below(self._sequences, model.device)

    @property
    def prefix_tokens(self) -> int:
        return len(self._left)

    @property
    def question_tokens(self) -> int:
        return self._token_ids.numel()

    @torch.inference_mode()
    def descend(self, documents: Sequence[Sequence[int]], take: Take) -> None:
        """Hands the states of every depth to `take`; all documents are read to the deepest."""
        by_document = [self._places(document) for document in documents]
        for depth in self._depths:
            states = [
                torch.stack([found[depth.layer, place] for found in by_document])
                for place in depth.places
            ]
            going = take(depth, states)
            if going is not None:
                by_document = [by_document[document] for document in going]
            if not by_document:
                return

    def _places(self, document: Sequence[int]) -> dict[tuple[int, Place], Tensor]:  # [hidden]
        [token_ids] = to_device([np.array([*self._left, *document])], self._model.device)
        own, level = read_at(self._model, self._above, token_ids[None], self._layers)
        found: dict[tuple[int, Place], Tensor] = {
            (layer, None): states[0, len(self._left) :].float().mean(dim=0)
            for layer, states in own.items()
        }
        if self._sequences:
            above = (*self._above, level)
            below, _ = read_at(self._model, above, self._token_ids, self._layers)
            for layer, states in below.items():
                for i, sequence in enumerate(self._sequences):
                    found[layer, sequence] = states[i, len(sequence) - 1]
        return found


@dataclass(frozen=True, slots=True)
class StagedText:
    """A text as levels; a last token that is too short for one goes before whatever is asked."""

    model: LoadedModel
    above: tuple[Level, ...]
    left: tuple[int, ...]
    laid_out: TokensRead  # grows by what is read here

    def extended(self, token_ids: Sequence[int]) -> StagedText:
        """The text with these behind it."""
        together = (*self.left, *token_ids)
        if self.above and len(together) < _LEAST_TOKENS:
            return replace(self, left=together)
        self.laid_out.tokens += len(together)
        _, level = read(self.model, self.above, torch.tensor([together], device=self.model.device))
        return replace(self, above=(*self.above, level), left=())

    def states(self, sequences: Sequence[Sequence[int]]) -> Tensor:  # [sequences, hidden]
        """The states at the sequences' last tokens, in one padded batch."""
        below = [(*self.left, *sequence) for sequence in sequences]
        token_ids = padded_below(below, self.model.device)
        self.laid_out.tokens += token_ids.numel()
        states, _ = read(self.model, self.above, token_ids)
        last = torch.tensor([len(sequence) - 1 for sequence in below], device=states.device)
        return states[torch.arange(len(below), device=states.device), last]


def padded_below(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> Tensor:  # [sequences, tokens] int64
    """Padding comes last, where neither attention nor a state carries it back to a sequence."""
    width = max([_LEAST_TOKENS, *(len(sequence) for sequence in sequences)])
    padded = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(sequences), width)
