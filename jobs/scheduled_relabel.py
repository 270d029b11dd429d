"""A nightly job: label what is new, and publish it if it is good and has not drifted.

    python -m jobs.scheduled_relabel SPEC --gold gold.csv --gate 'toxic.f1 >= 0.8'

It is `assay run` with the limits below; its options, output and exit codes are those of this
command. Rejected answers stay in the ledger, and the previous snapshot stays the current one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipeline.cli import main as assay

LIMITS = ("--max-psi=0.1", "--max-flip-rate=0.05", "--max-failing=0.05")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `assay run` with the limits; an argument replaces the limit of its name."""
    return assay(["run", *LIMITS, *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
