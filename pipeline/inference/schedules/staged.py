"""The staged schedule, for decoders whose layers carry a recurrent state: level by level.

    prefix  ──  document  ──┬── suffix 0    padded batches of a few suffixes,
    (once a process)        └── suffix 1    each with its own copy of the cache

Packed spans would mix their recurrent states. So what is below a text begins with copies of the
cache of transformers, with its keys, values and states, that the text ended in. On a GPU, documents
of one length are read together: padding would change their states. Entry point: `StagedSchedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from pipeline.inference.attention.tiles import to_device
from pipeline.inference.memory import CACHE_COPIES
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


@dataclass(frozen=True, slots=True)
class Text:
    """Token sequences of one length that have been read."""

    cache: DynamicCache  # of all sequences; a forward gets a copy, because it writes to it
    tokens: int
    sequences: int = 1

    def copies(self, rows: Sequence[int]) -> DynamicCache:
        """The cache of these sequences, in this order."""
        copied = deepcopy(self.cache)
        # Not `batch_repeat_interleave`: layers with a recurrent state do not have it.
        copied.reorder_cache(torch.tensor(rows))  # type: ignore[arg-type]
        return copied


def read_below(
    model: LoadedModel,
    text: Text | None,
    rows: Sequence[int],  # of the text's sequences
    token_ids: Tensor,  # [rows, tokens] int64
    layers: Sequence[int],
) -> tuple[dict[int, Tensor], Text]:  # by layer: [rows, tokens, hidden]
    """The states of token sequences below a text after each of these layers, and both together.

    Layers below the deepest of these are not run.
    """
    count, tokens = token_ids.shape
    assert tokens >= _MIN_TOKENS or text is None, f"a span of {tokens} tokens"
    start = text.tokens if text else 0
    cache = text.copies(rows) if text else DynamicCache(config=model.network.config)
    positions = torch.arange(start, start + tokens, device=token_ids.device)
    by_layer: dict[int, Tensor] = {}
    with torch.inference_mode():
        run_to_layers(
            model,
            layers,
            by_layer.__setitem__,
            input_ids=token_ids,
            position_ids=positions.expand(count, tokens),
            **model.cache_kwargs(cache),
        )
    return by_layer, Text(cache, start + tokens, count)


@dataclass(frozen=True, slots=True)
class StagedSchedule:
    """A model that has read a text: the prefix, or a document below the prefix.

    The last token of the prefix is unread, so that no document is a span of one token.
    """

    model: LoadedModel
    text: Text | None
    pending_tokens: tuple[int, ...]  # the text's last tokens, which are read with what follows

    @classmethod
    def from_prefix(
        cls, model: LoadedModel, prefix: Sequence[int], *, layers: int | None = None
    ) -> StagedSchedule:
        text = None
        if len(prefix) > 1:
            token_ids = torch.tensor([prefix[:-1]], device=model.device)
            _, text = read_below(model, None, [0], token_ids, [layers or model.layers])
        return cls(model, text, tuple(prefix[-1:]))

    def reader(self, points: Sequence[ReadPoint]) -> StagedReader:
        """A reader of these points."""
        return StagedReader(self, points)

    def with_tokens(self, token_ids: Sequence[int], counter: TokenCounter) -> StagedSchedule:
        """The text followed by these tokens; `counter` counts what is read.

        A span too short for a forward is read with what follows.
        """
        together = (*self.pending_tokens, *token_ids)
        if self.text and len(together) < _MIN_TOKENS:
            return StagedSchedule(self.model, self.text, together)
        counter.tokens += len(together)
        ids = torch.tensor([together], device=self.model.device)
        _, text = read_below(self.model, self.text, [0], ids, [self.model.layers])
        return StagedSchedule(self.model, text, ())

    def states(
        self, suffixes: Sequence[Suffix], counter: TokenCounter
    ) -> Tensor:  # [suffixes, hidden]
        """The last layer's normalised states at the suffixes' last tokens."""
        below = [(*self.pending_tokens, *suffix) for suffix in suffixes]
        layer, read = self.model.layers, []
        for start in range(0, len(below), CACHE_COPIES):
            batch = below[start : start + CACHE_COPIES]
            at_ends, tokens = states_at_ends(self.model, self.text, batch, [layer])
            counter.tokens += tokens
            read.append(at_ends[layer][0])
        return torch.cat(read)


def states_at_ends(
    model: LoadedModel, text: Text | None, suffixes: Sequence[Suffix], layers: Sequence[int]
) -> tuple[dict[int, Tensor], int]:  # by layer: [sequences, suffixes, hidden]
    """The states at the suffixes' last tokens below each sequence of a text, and the tokens read.

    They are one padded batch. Padding comes last, so neither attention nor a recurrent state
    carries it to a suffix.
    """
    sequences, count = text.sequences if text else 1, len(suffixes)
    padded, _ = pad(suffixes, min_width=_MIN_TOKENS)
    last = [len(suffix) - 1 for suffix in suffixes]
    [token_ids, at] = to_device([padded.ravel(), np.array(last)], model.device)
    rows = np.repeat(np.arange(sequences), count).tolist()
    by_layer, _ = read_below(
        model, text, rows, token_ids.view(padded.shape).repeat(sequences, 1), layers
    )
    numbers = torch.arange(count, device=at.device)
    at_ends = {
        layer: states.view(sequences, count, *states.shape[1:])[:, numbers, at]
        for layer, states in by_layer.items()
    }
    return at_ends, sequences * padded.size


class StagedReader:
    """Read points whose suffixes are read as deep as the deepest of the points."""

    def __init__(self, schedule: StagedSchedule, points: Sequence[ReadPoint]) -> None:
        self._schedule, self._points = schedule, points
        self._layers = [point.layer for point in points]
        self._suffixes = list(dict.fromkeys(s for point in points for s in point.suffixes))
        row_of = {suffix: row for row, suffix in enumerate(self._suffixes)}
        self._rows = {point.layer: [row_of[s] for s in point.suffixes] for point in points}
        # Copies of the cache in a batch. On a CPU, those of one document alone: more would take
        # memory, and no less time.
        self._on_gpu = schedule.model.device.type == "cuda"
        # Tokens of the prefix that are read again with every document.
        self.repeated_prefix_tokens = len(schedule.pending_tokens)
        # Tokens below every document that go through the model, padding included.
        self.question_tokens = sum(pad(own, min_width=_MIN_TOKENS)[0].size for own in self._batches)

    @property
    def _batches(self) -> list[list[Suffix]]:
        starts = range(0, len(self._suffixes), CACHE_COPIES)
        return [self._suffixes[start : start + CACHE_COPIES] for start in starts]

    @torch.inference_mode()
    def read(self, documents: Sequence[Sequence[int]]) -> list[LayerStates]:
        """The states of every read point."""
        rows: dict[int, list[int]] = {}  # of the documents with this many tokens
        for row, document in enumerate(documents):
            rows.setdefault(len(document), []).append(row)
        copies = min(CACHE_COPIES, max(1, len(self._suffixes)))
        most = CACHE_COPIES // copies if self._on_gpu else 1
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
        model, pending = self._schedule.model, self._schedule.pending_tokens
        ids = np.array([[*pending, *document] for document in documents])
        [token_ids] = to_device([ids.ravel()], model.device)
        above = self._schedule.text
        states, text = read_below(
            model, above, [0] * len(documents), token_ids.view(ids.shape), self._layers
        )
        means = {n: own[:, len(pending) :].float().mean(dim=1) for n, own in states.items()}
        read = [states_at_ends(model, text, batch, self._layers)[0] for batch in self._batches]
        if not read:
            return {layer: own[:, :0] for layer, own in states.items()}, means
        at_ends = {n: torch.cat([batch[n] for batch in read], dim=1) for n in self._layers}
        return {layer: at_ends[layer][:, rows] for layer, rows in self._rows.items()}, means
