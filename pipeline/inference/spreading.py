"""A model larger than one device: its layers lie on several, in order, and states travel between.

Whatever is not a decoder layer lies on the first device, so that what goes in and what comes out
are there. Knows decoders as transformers builds them, and accelerate's hooks. Knows nothing of
trees: each layer's keys and values are kept where they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import dispatch_model
from transformers import PreTrainedModel

from pipeline.errors import ModelError


def spread(network: PreTrainedModel, devices: Sequence[str]) -> None:
    """Moves the network, in place: as many of its layers to each device, give or take one."""
    try:
        dispatch_model(
            network, device_map(network, devices), main_device=devices[0], force_hooks=True
        )
    except (RuntimeError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot be spread over {len(devices)} devices: {error}") from error


def device_map(network: PreTrainedModel, devices: Sequence[str]) -> dict[str, str]:
    """Where each part of the network goes, by its name in the network."""
    decoder: Any = network.base_model
    name, layers = network.base_model_prefix, len(decoder.layers)
    if layers < len(devices):
        raise ModelError(f"has {layers} layers; write gpus: {layers} or fewer")
    heads = [child for child, _ in network.named_children() if child != name]
    around = [f"{name}.{child}" for child, _ in decoder.named_children() if child != "layers"]
    return {
        **dict.fromkeys([*heads, *around], devices[0]),
        **{f"{name}.layers.{i}": devices[i * len(devices) // layers] for i in range(layers)},
    }
