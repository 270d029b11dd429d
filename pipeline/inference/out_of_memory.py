"""Allocators that fail. Entry points: `is_out_of_memory`, and `naming_lack_of_memory`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError

from pipeline.errors import ModelError, one_line

# Of the CPU's allocator; of the system; of the CUDA driver; of cuBLAS, cuDNN and cuSOLVER, whose
# workspaces are their own.
_MESSAGES = (
    "can't allocate memory",
    "Cannot allocate memory",
    "error: out of memory",
    "_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator failed: torch has an exception for its own, others only a message."""
    of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return of_memory or any(message in str(error) for message in _MESSAGES)


@contextmanager
def naming_lack_of_memory(place: str, work: str) -> Iterator[None]:
    """ModelError with the fix if memory runs out during this work, for example "load it"."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError, SafetensorError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"{place}: memory is too short to {work}: {one_line(error)}; end other programs, "
            "write dtype: bfloat16 or int8, or use a smaller model or a larger machine"
        ) from error
