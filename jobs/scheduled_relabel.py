"""A nightly job: label what is new, and publish it if it is good and has not drifted.

    python -m jobs.scheduled_relabel SPEC --gold gold.csv --gate 'toxic.f1 >= 0.8'

Exit codes: 0 published, or nothing was new; 1 rejected or failed; 3 incomplete. Rejected answers
stay in the ledger, and the previous snapshot stays the current one.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from pipeline.cli.app import EXIT_COMPLETE, EXIT_FAILED, EXIT_INCOMPLETE, Verb, call, new_app
from pipeline.cli.verbs import FLATTEN, AsJson, SpecFile
from pipeline.options import GoldOptions, Limits

if TYPE_CHECKING:
    from pipeline.verbs.relabel import ScheduledRun

app = new_app("jobs.scheduled_relabel", "Label what is new, and publish it if it is good.")


def _exit_code(run: ScheduledRun) -> int:
    if not run.outcome.complete:
        return EXIT_INCOMPLETE
    return EXIT_COMPLETE if run.published else EXIT_FAILED


RELABEL = Verb(
    "verbs.relabel:scheduled_run",
    "report.drift:scheduled_run",
    _exit_code,
    progress="report.progress:run_progress",
)


@app.default
def relabel(
    spec: SpecFile,
    /,
    *,
    gold: Annotated[str | None, Parameter(metavar="FILE")] = None,
    gates: Annotated[tuple[str, ...], Parameter("--gate", metavar="GATE")] = (),
    gold_options: Annotated[GoldOptions, FLATTEN] = GoldOptions(),
    limits: Annotated[Limits, FLATTEN] = Limits(),
    address: Annotated[str | None, Parameter(metavar="ADDRESS")] = None,
    as_json: AsJson = False,
) -> int:
    """Label what is new, and publish it if every gate and every limit holds.

    Parameters
    ----------
    gold
        Gold labels, as `assay eval` reads them.
    gates
        Requirement such as 'toxic.f1 >= 0.8'. Repeatable.
    address
        A running Ray cluster (default: start Ray on this machine).
    """
    options = gold, gold_options, gates, limits
    return RELABEL.carry_out(spec, *options, as_json=as_json, address=address)


main = partial(call, app)

if __name__ == "__main__":
    sys.exit(main())
