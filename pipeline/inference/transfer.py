"""Integers from the host to a device, in one copy that the host does not wait for.

Knows arrays and devices. Knows nothing of what the integers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def moved(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Flat arrays of one type on the device, as parts of one buffer."""
    buffer = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":  # from pageable memory the copy would be waited for
        buffer = buffer.pin_memory()
    there = buffer.to(device, non_blocking=True)
    return list(torch.split(there, [len(array) for array in arrays]))
