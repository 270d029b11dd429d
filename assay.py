"""The command `assay`, which says so where another module named `pipeline` hides the library.

Entry point: `main`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """Run the command; exit code 2 where `pipeline` is the module of somebody else."""
    spec = find_spec("pipeline")
    places = [*(spec.submodule_search_locations or ())] if spec else []
    own = Path(__file__).resolve().with_name("pipeline")
    if own not in (Path(place).resolve() for place in places):
        other = (spec and spec.origin) or ", ".join(places)
        fix = "hides assay's own; rename it, or take its folder off PYTHONPATH"
        print(f"assay: {other}: is another module named `pipeline`, and {fix}", file=sys.stderr)
        return 2
    from pipeline.cli import main as run_command

    return run_command()
