"""What one row may hold, and how its bytes are gathered without holding more.

Knows sizes. Knows nothing of formats or of what the bytes mean.
"""

from __future__ import annotations

from dataclasses import dataclass

# A text that is longer is no document that a model reads; held, it is there several times over.
MAX_ROW_BYTES = 256 * 1024 * 1024
# Ids are kept for all rows of a shard at once; URLs, the longest in use, are rarely over 2,048.
MAX_ID_CHARS = 4_096


def too_long() -> str:
    """Why a row above the limit has no text."""
    return f"longer than {MAX_ROW_BYTES:,} bytes"


def id_too_long() -> str:
    """Why a row whose id is above the limit is set aside."""
    return f"its id is longer than {MAX_ID_CHARS:,} characters"


@dataclass(frozen=True, slots=True)
class TooLong:
    """Stands for a value that was above the limit and is not held."""


class Gathered:
    """One row's bytes as they come; of a row above the limit none are held."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self.blank = True

    def add(self, part: bytes) -> None:
        """One more part of the row."""
        self._size_bytes += len(part)
        self.blank = self.blank and part.isspace()
        if self._size_bytes > MAX_ROW_BYTES:
            self._parts.clear()
        else:
            self._parts.append(part)

    def take(self) -> bytes | TooLong:
        """The row, which is let go of."""
        whole = TooLong() if self._size_bytes > MAX_ROW_BYTES else b"".join(self._parts)
        self._parts.clear()
        return whole
