"""The library behind `assay`: see README for the file map, and `__all__` for what is public.

>>> from pipeline import Labeller
>>> Labeller("my.yaml").label(["What a day!", "Get lost."]).num_rows
2
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.api import evaluate, filter, fit, run
    from pipeline.errors import (
        AssayError,
        FailedRowsError,
        ModelError,
        Problem,
        RefusedError,
        SpecError,
        StalledError,
        StorageError,
        UnavailableError,
    )
    from pipeline.labeller import Labeller
    from pipeline.ledger.dataset import LabelDataset, open_labels
    from pipeline.options import EvalOptions, FilterOptions, FitOptions, RunOptions, WorkOptions
    from pipeline.runtime.dry_run import dry_run
    from pipeline.runtime.outcome import Outcome
    from pipeline.runtime.placement import Placement
    from pipeline.runtime.plan import Plan
    from pipeline.runtime.progress import Progress
    from pipeline.spec.parse import load_spec, parse_spec
    from pipeline.spec.schema import JobSpec

__all__ = [
    "AssayError",
    "EvalOptions",
    "FailedRowsError",
    "FilterOptions",
    "FitOptions",
    "JobSpec",
    "LabelDataset",
    "Labeller",
    "ModelError",
    "Outcome",
    "Placement",
    "Plan",
    "Problem",
    "Progress",
    "RefusedError",
    "RunOptions",
    "SpecError",
    "StalledError",
    "StorageError",
    "UnavailableError",
    "WorkOptions",
    "dry_run",
    "evaluate",
    "filter",
    "fit",
    "load_spec",
    "open_labels",
    "parse_spec",
    "run",
]

_HOMES = {
    "Labeller": "pipeline.labeller",
    "LabelDataset": "pipeline.ledger.dataset",
    "open_labels": "pipeline.ledger.dataset",
    **dict.fromkeys(
        ("EvalOptions", "FilterOptions", "FitOptions", "RunOptions", "WorkOptions"),
        "pipeline.options",
    ),
    **dict.fromkeys(("evaluate", "filter", "fit", "run"), "pipeline.api"),
    "dry_run": "pipeline.runtime.dry_run",
    "Plan": "pipeline.runtime.plan",
    "Outcome": "pipeline.runtime.outcome",
    "Placement": "pipeline.runtime.placement",
    "Progress": "pipeline.runtime.progress",
    "load_spec": "pipeline.spec.parse",
    "parse_spec": "pipeline.spec.parse",
    "JobSpec": "pipeline.spec.schema",
}


def __dir__() -> list[str]:
    """The public names, which Tab shows."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """What `__all__` names, imported when it is asked for: `assay --help` needs no Arrow."""
    if name == "__version__":
        return importlib.metadata.version("corpus-assay")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "pipeline.errors")), name)
