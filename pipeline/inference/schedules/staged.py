"""The staged schedule, for decoders whose layers carry a recurrent state: level by level.

    prefix  ──  document  ──┬── suffix 0    padded batches of a few suffixes,
    (once a process)        └── suffix 1    each with its own copy of the cache

Packed spans would mix their recurrent states. So what is below a text begins with copies of the
cache of transformers, with its keys, values and states, that the text ended in. Documents of one
length are read together: padding would change their states. Entry points: `StagedSchedule`, and
`cache_copies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from pipeline.inference.attention.tiles import Integers, to_device
from pipeline.inference.memory import CACHE_COPIES, USABLE
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import pad
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


def cache_copies(model: LoadedModel, *, tokens: int, free_bytes: int) -> int:
    """How many caches of texts of this many tokens may be in memory at once, 1 to `CACHE_COPIES`.

    They take up to half of the free bytes; `plan_memory` has the other half.
    """
    ids = torch.zeros(1, _MIN_TOKENS, dtype=torch.int64, device=model.device)
    _, text = read_below(model, None, [0], ids, [model.layers])
    kv_bytes = states_bytes = 0
    for held in map(vars, text.cache.layers):
        of_tokens = held.get("keys"), held.get("values")
        kv_bytes += sum(each.nbytes for each in of_tokens if each is not None)
        for states in (held.get("conv_states", {}), held.get("recurrent_states", {})):
            states_bytes += sum(each.nbytes for each in states.values() if each is not None)
    one = states_bytes + kv_bytes * tokens // _MIN_TOKENS
    # — the documents' own, the copy of these, and it again with a row for each suffix
    return min(CACHE_COPIES, max(1, int(free_bytes / 2 * USABLE) // (3 * one)))


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


def states_at_ends(
    model: LoadedModel, text: Text | None, suffixes: Sequence[Suffix], layers: Sequence[int]
) -> dict[int, Tensor]:  # by layer: [sequences, suffixes, hidden]
    """The states at the suffixes' last tokens below each sequence of a text."""
    sequences = text.sequences if text else 1
    by_layer: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for token_ids, last in _padded(suffixes, model.cache_copies):
        count = len(last)
        [flat, at] = to_device([token_ids.ravel(), last], model.device)
        rows = np.repeat(np.arange(sequences), count).tolist()
        below = flat.view(token_ids.shape).repeat(sequences, 1)
        numbers = torch.arange(count, device=at.device)
        read, _ = read_below(model, text, rows, below, layers)
        for layer, states in read.items():
            by_layer[layer].append(states.view(sequences, count, *states.shape[1:])[:, numbers, at])
    return {layer: torch.cat(states, dim=1) for layer, states in by_layer.items()}


def _padded(suffixes: Sequence[Suffix], most: int) -> Iterator[tuple[Integers, Integers]]:
    """Batches of `most` suffixes, [suffixes, tokens], and the column of the last token of each.

    Padding comes last, so neither attention nor a recurrent state carries it to a suffix.
    """
    for start in range(0, len(suffixes), most):
        batch = suffixes[start : start + most]
        padded, _ = pad(batch, min_width=_MIN_TOKENS)
        yield padded, np.array([len(suffix) - 1 for suffix in batch])


def _padded_tokens(suffixes: Sequence[Suffix], model: LoadedModel) -> int:
    return sum(token_ids.size for token_ids, _ in _padded(suffixes, model.cache_copies))


@dataclass(frozen=True, slots=True)
class StagedSchedule:
    """A model that has read a text: the prefix, or a document below the prefix.

    The last token of the prefix is unread, so that no document is a span of one token.
    """

    model: LoadedModel
    text: Text | None
    pending_tokens: tuple[int, ...]  # the text's last tokens, which are read with what follows

    @classmethod
    def from_prefix(cls, model: LoadedModel, prefix: Sequence[int]) -> StagedSchedule:
        text = None
        if len(prefix) > 1:
            token_ids = torch.tensor([prefix[:-1]], device=model.device)
            _, text = read_below(model, None, [0], token_ids, [model.layers])
        return cls(model, text, tuple(prefix[-1:]))

    def reader(self, points: Sequence[ReadPoint]) -> StagedReader:
        """A reader of these points."""
        return StagedReader(self, points)

    def with_tokens(self, token_ids: Sequence[int]) -> StagedSchedule:
        """The text followed by these tokens.

        A span too short for a forward is read with what follows.
        """
        together = (*self.pending_tokens, *token_ids)
        if self.text and len(together) < _MIN_TOKENS:
            return StagedSchedule(self.model, self.text, together)
        ids = torch.tensor([together], device=self.model.device)
        _, text = read_below(self.model, self.text, [0], ids, [self.model.layers])
        return StagedSchedule(self.model, text, ())

    def states(
        self, suffixes: Sequence[Suffix], *, below: Sequence[int] = ()
    ) -> Tensor:  # [suffixes, hidden]
        """The last layer's normalised states at the suffixes' last tokens.

        `below` are tokens that follow the text, and that come before each of the suffixes.
        """
        text = self.with_tokens(below) if below else self
        whole = [(*text.pending_tokens, *suffix) for suffix in suffixes]
        layer = self.model.layers
        return states_at_ends(self.model, text.text, whole, [layer])[layer][0]


class StagedReader:
    """Read points whose suffixes are read as deep as the deepest of the points."""

    def __init__(self, schedule: StagedSchedule, points: Sequence[ReadPoint]) -> None:
        self._schedule, self._points = schedule, points
        self._suffixes = list(dict.fromkeys(s for point in points for s in point.suffixes))
        row_of = {suffix: row for row, suffix in enumerate(self._suffixes)}
        self._rows = {point.layer: [row_of[s] for s in point.suffixes] for point in points}
        # Tokens below every document that go through the model, padding included.
        self.question_tokens = _padded_tokens(self._suffixes, schedule.model)

    @torch.inference_mode()
    def read(self, documents: Sequence[Sequence[int]]) -> list[LayerStates]:
        """The states of every read point."""
        at_once = max(1, self._schedule.model.cache_copies // max(1, len(self._suffixes)))
        order = sorted(range(len(documents)), key=lambda row: len(documents[row]))
        groups: list[list[Sequence[int]]] = []  # of documents of one length
        for row in order:
            document = documents[row]
            if not groups or len(groups[-1]) == at_once or len(groups[-1][0]) != len(document):
                groups.append([])
            groups[-1].append(document)
        read = [self._read(group) for group in groups]
        [rows] = to_device([np.argsort(order)], self._schedule.model.device)
        return [
            LayerStates(
                torch.cat([at_ends[point.layer] for at_ends, _ in read])[rows].transpose(0, 1),
                torch.cat([means[point.layer] for _, means in read])[rows] if point.mean else None,
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
        layers, above = list(self._rows), self._schedule.text
        states, text = read_below(
            model, above, [0] * len(documents), token_ids.view(ids.shape), layers
        )
        means = {n: own[:, len(pending) :].float().mean(dim=1) for n, own in states.items()}
        if not self._suffixes:
            return {layer: own[:, :0] for layer, own in states.items()}, means
        at_ends = states_at_ends(model, text, self._suffixes, layers)
        return {layer: at_ends[layer][:, rows] for layer, rows in self._rows.items()}, means
