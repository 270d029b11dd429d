"""The library behind `assay`: see README for the file map, and `__all__` for what is public.

>>> from pipeline import Labeller
>>> Labeller("my.yaml").label(["What a day!", "Get lost."]).num_rows
2
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.errors import AssayError, RefusedError, SpecError
    from pipeline.labeller import Labeller
    from pipeline.ledger.dataset import open_labels
    from pipeline.runtime.dry_run import dry_run
    from pipeline.runtime.run import run
    from pipeline.spec.parse import load_spec, parse_spec
    from pipeline.spec.schema import JobSpec

__all__ = [
    "AssayError",
    "JobSpec",
    "Labeller",
    "RefusedError",
    "SpecError",
    "dry_run",
    "load_spec",
    "open_labels",
    "parse_spec",
    "run",
]

_HOMES = {
    "pipeline.ledger.dataset": ("open_labels",),
    "pipeline.runtime.dry_run": ("dry_run",),
    "pipeline.runtime.run": ("run",),
    "pipeline.errors": ("AssayError", "RefusedError", "SpecError"),
    "pipeline.labeller": ("Labeller",),
    "pipeline.spec.parse": ("load_spec", "parse_spec"),
    "pipeline.spec.schema": ("JobSpec",),
}


def __getattr__(name: str) -> object:
    """What `__all__` names, imported when it is asked for: `assay --help` needs no Arrow."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
