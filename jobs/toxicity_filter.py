"""From a corpus to a filtered corpus: label it, then write what the spec's rule keeps.

    python -m jobs.toxicity_filter jobs/specs/toxicity_filter.yaml --to out/clean

Run it again after a crash, or when the corpus has grown: only what is missing is done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipeline.cli import main as assay


def main(arguments: Sequence[str] | None = None) -> int:
    """The steps in their order; the first that does not end well ends the job, with its code."""
    parser = argparse.ArgumentParser(prog="jobs.toxicity_filter", description="Label, then filter.")
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("--to", required=True, metavar="URL", help="where the kept documents go")
    options, further = parser.parse_known_args(arguments)
    steps = (
        ["run", options.spec],
        ["filter", options.spec, "--to", options.to, *further],
    )
    return next(filter(None, map(assay, steps)), 0)


if __name__ == "__main__":
    sys.exit(main())
