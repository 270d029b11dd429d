"""The command `assay`: parse, call one function, print the result, return an exit code."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.cli import outputs, quality
from pipeline.cli.app import call
from pipeline.cli.verbs import app

__all__ = ["app", "main", "outputs", "quality"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 complete, 1 failed, 2 wrong input, 3 run again, 4 refused."""
    return call(app, arguments)
