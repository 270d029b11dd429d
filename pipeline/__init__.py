"""The library behind `assay`: see README for the file map."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.data.labels import open_labels

__all__ = ["open_labels"]


def __getattr__(name: str) -> object:
    """What `__all__` names, imported when it is asked for: `assay --help` needs no Arrow."""
    if name in __all__:
        from pipeline.data.labels import open_labels

        return open_labels
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
