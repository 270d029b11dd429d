"""The weights of a mixture's experts, where a layer keeps all of them in one tensor.

Knows modules. Knows nothing of which expert a token goes to.
"""

from __future__ import annotations

from torch import Tensor, nn


def expert_weights(module: nn.Module) -> list[Tensor]:
    """Each such tensor, `[experts, rows, columns]`; convolutions too have weights of three dims."""
    return [
        parameter
        for part in module.modules()
        if not isinstance(part, nn.Conv1d)
        for parameter in part.parameters(recurse=False)
        if parameter.ndim == 3
    ]
