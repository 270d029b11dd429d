"""Forwards of a decoder: over a packed tree, and up to some layer.

Entry points: `ReadPoint`, which says what is read; `prefill` and `run_to_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.inference.attention.hook import PrefixKV, TreeAttention
from pipeline.inference.attention.reference import LayerKV
from pipeline.inference.attention.rounded_kv import RoundedKV
from pipeline.inference.attention.tiles import to_device
from pipeline.inference.attention.tree import Tree
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.model.vision import EmbeddedDocument
from pipeline.inference.schedules.inputs import batch_inputs

Suffix = tuple[int, ...]  # token ids that follow a document: a question, and perhaps label tokens


@dataclass(frozen=True, slots=True)
class ReadPoint:
    """A layer after which hidden states are read: those at suffixes, the documents' mean, or both.

    Layer N gives the `hidden_states[N]` of transformers. After the last layer the states are
    normalised.
    """

    layer: int
    suffixes: tuple[Suffix, ...] = ()  # each is read at its last token
    mean: bool = False  # the mean of the states at a document's own tokens


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The hidden states of one read point."""

    at_suffixes: Tensor  # [suffixes, docs, hidden], in the order of the read point
    mean: Tensor | None  # [docs, hidden] fp32


@torch.inference_mode()
def prefill(
    model: LoadedModel,
    token_ids: Sequence[int],  # may be `EmbeddedDocument`
    *,
    prefix: PrefixKV | None = None,
) -> PrefixKV | None:
    """The keys and values of a span that later forwards read; None for an empty span.

    Below a kept prefix, the keys and values of both together: those of the prefix are copied
    once. They are rounded if the model has a format for what it keeps (`kv`).
    """
    if not len(token_ids):
        return prefix
    before = prefix or PrefixKV({}, tokens=0)
    layers: dict[int, LayerKV | RoundedKV] = {}

    def keep(layer: int, own: LayerKV) -> None:  # — one layer at a time is in memory twice
        kept = own if model.kv == "none" else RoundedKV.of(own)
        above: Any = before.layers.get(layer)
        layers[layer] = above.followed_by(kept) if above else kept

    tree = Tree((len(token_ids),), (), before.tokens)
    attention = TreeAttention(tree, model.kernel, prefix, keep)
    inputs = batch_inputs(model, tree, [token_ids], (), prefix)
    run_to_layers(model, [model.layers], lambda *_: None, tree=attention, **inputs)
    offset = before.position_offset
    if isinstance(token_ids, EmbeddedDocument):
        offset += token_ids.rows.offset
    return PrefixKV(layers, before.tokens + len(token_ids), offset)


@dataclass(frozen=True, slots=True)
class PackedStates:
    """The hidden states of a packed batch after some layer."""

    tree: Tree
    states: Tensor  # [rows, hidden]

    def at_ends(self, ends: Sequence[int]) -> Tensor:  # [docs, ends, hidden]
        """The states at these rows of every copy of the branches."""
        _rows, hidden = self.states.shape
        [rows] = to_device([self.tree.rows_at(ends)], self.states.device)
        return self.states[rows].view(len(self.tree.documents), len(ends), hidden)

    def means(self) -> Tensor:  # [docs, hidden] fp32
        """The mean of the states at each document's own tokens."""
        own = self.states[: self.tree.document_rows].float()
        [lengths] = to_device([self.tree.documents], self.states.device)
        # — `unsafe` leaves out a check of the lengths that would wait for the device
        return torch.segment_reduce(own, "mean", lengths=lengths, unsafe=True)


class _Deepest(Exception):
    """Leaves a forward before the layer after the deepest one that is read."""


def run_to_layers(
    model: LoadedModel,
    layers: Collection[int],
    on_states: Callable[[int, Tensor], None],  # a layer, and its states [batch, tokens, hidden]
    **inputs: Any,
) -> None:
    """Runs a decoder to the deepest of these layers, and gives each one's states as it comes.

    Layer N gives the `hidden_states[N]` of transformers. Each token is counted, also a repeated or
    padding one.
    """
    rows: Tensor = inputs["input_ids" if "input_ids" in inputs else "inputs_embeds"]
    model.counter.tokens += rows.shape[:2].numel()
    if model.llama is not None:
        return model.llama.run(layers, on_states, **inputs)
    deepest = max(layers)
    assert 0 <= min(layers) <= deepest <= model.layers, f"layers {layers} of {model.layers}"
    blocks: Any = getattr(model.decoder, "layers", ())

    def before_block(layer: int, _block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        on_states(layer, args[0] if args else kwargs["hidden_states"])
        if layer == deepest:
            raise _Deepest

    with ExitStack() as hooks, suppress(_Deepest):
        for layer in sorted(set(layers) - {len(blocks)}):
            hook = partial(before_block, layer)
            handle = blocks[layer].register_forward_pre_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        output = model.decoder(**inputs)
        on_states(len(blocks), output.last_hidden_state)
