"""A nightly job: label what is new, and publish it if it is good and has not drifted.

    python -m jobs.scheduled_relabel SPEC --gold gold.csv --gate 'toxic.f1 >= 0.8'

Exit codes: 0 published, or nothing was new; 1 rejected or failed; 3 incomplete. Rejected answers
stay in the ledger, and the previous snapshot stays the current one.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from pipeline.cache import cache_dir
from pipeline.cli.app import EXIT_COMPLETE, EXIT_FAILED, EXIT_INCOMPLETE, Verb, call, new_app
from pipeline.cli.verbs import FLATTEN, AsJson, SpecFile
from pipeline.options import EvalOptions, GoldOptions, Limits

if TYPE_CHECKING:
    from pipeline.spec.schema import JobSpec
    from pipeline.verbs.relabel import Gate, ScheduledRun

app = new_app("jobs.scheduled_relabel", "Label what is new, and publish it if it is good.")


def _exit_code(run: ScheduledRun) -> int:
    if not run.outcome.complete:
        return EXIT_INCOMPLETE
    return EXIT_COMPLETE if run.published else EXIT_FAILED


RELABEL = Verb("verbs.relabel:scheduled_run", "report.drift:scheduled_run", _exit_code)


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
    if address is None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported
    from pipeline.report.run import run_progress
    from pipeline.spec.parse import load_spec
    from pipeline.verbs.relabel import scheduled_run

    job = load_spec(spec)
    gate = _gate(job, gold, gold_options, gates)
    with run_progress(sys.stderr) as announce:
        run = scheduled_run(
            job,
            cache_dir=cache_dir(),
            address=address,
            gate=gate,
            limits=limits,
            announce=announce,
        )
    return RELABEL.print(run, as_json=as_json)


def _gate(
    spec: JobSpec, gold: str | None, gold_options: GoldOptions, gates: tuple[str, ...]
) -> Gate | None:
    """The function that judges a candidate; SpecError for wrong gold or gates, before any work."""
    if not gates and gold is None:
        return None
    from pipeline.errors import Problem, SpecError
    from pipeline.evaluation.gates import parse_gate
    from pipeline.gold.labels import read_gold
    from pipeline.verbs.evaluate import check_gates, evaluate

    if not gates:
        raise SpecError([Problem("--gate", "missing; --gold judges nothing without a gate")])
    if gold is None:
        raise SpecError([Problem("--gold", "missing; a gate needs gold labels: --gold FILE")])
    labels = {task.name: tuple(task.labels) for task in spec.tasks}
    parsed = [parse_gate(gate, labels) for gate in gates]
    check_gates(parsed, read_gold(gold, spec, gold_options))
    judge = partial(
        evaluate, spec, gold, gold_options, EvalOptions(gates=gates), cache_dir=cache_dir()
    )
    return lambda candidate: judge(candidate=candidate).decisions


main = partial(call, app)

if __name__ == "__main__":
    sys.exit(main())
