"""The states between a decoder's layers, from one forward that goes no deeper than they lie.

For decoders that are run whole. Knows decoders as transformers builds them. Knows nothing of
trees, tokens or what the states are for.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn


class LeftError(Exception):
    """Leaves a forward whose deeper layers nobody asked for."""


def states_at(
    decoder: nn.Module, layers: Collection[int], **called: Any
) -> dict[int, Tensor]:  # by layer: [copies, tokens, hidden]
    """After so many layers each, as `hidden_states` of transformers has them.

    They come to where the positions are, from whichever device their layer is on.
    """
    blocks: Any = decoder.layers
    home = called["position_ids"].device
    deepest = max(layers)
    assert 0 < min(layers) <= deepest <= len(blocks), f"layers {layers} of {len(blocks)}"
    found: dict[int, Tensor] = {}
    with ExitStack() as hooks, suppress(LeftError):
        for layer in sorted(set(layers) - {len(blocks)}):
            tap = partial(_tap, found, layer, layer == deepest)
            handle = blocks[layer].register_forward_pre_hook(tap, with_kwargs=True)
            hooks.callback(handle.remove)
        output = decoder(**called)
        found[len(blocks)] = output.last_hidden_state
    return {layer: states.to(home) for layer, states in found.items()}


def _tap(
    found: dict[int, Tensor],
    layer: int,
    leave: bool,
    _block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    found[layer] = args[0] if args else kwargs["hidden_states"]
    if leave:
        raise LeftError
