"""What a calibration file came to be, for people and as JSON.

Knows calibration files. Knows nothing of how they are made or applied.
"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from pipeline.calibrating import Calibrated
from pipeline.evaluation.calibration import Calibration, Prior, Temperature
from pipeline.report.verdict import two_columns


def calibrated_json(calibrated: Calibrated) -> dict[str, Any]:
    """The file's content, and where it is."""
    content: dict[str, Any] = json.loads(calibrated.file.json())
    return {"path": calibrated.path, **content}


def show_calibrated(calibrated: Calibrated, console: Console) -> None:
    """A table of what it is and of what it was made."""
    file = calibrated.file
    of_gold = f", gold {file.source['gold']}" if "gold" in file.source else ""
    rows = {
        "file": calibrated.path,
        "task": file.task,
        "made of": f"{file.rows:,} documents of snapshot {file.source['snapshot']}{of_gold}",
        file.calibration.method: _parameters(file.calibration),
    }
    console.print(two_columns(rows), markup=False)


def _parameters(calibration: Calibration) -> str:
    change = calibration.change
    if isinstance(change, Prior):
        shares = zip(calibration.labels, change.prior, strict=True)
        return ", ".join(f"{label} {share:.3f}" for label, share in shares)
    if isinstance(change, Temperature):
        return f"{change.temperature:.3f}"
    return ", ".join(f"{len(curve.x)} knots" for curve in change.curves)
