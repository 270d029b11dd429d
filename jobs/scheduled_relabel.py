"""One tick of a nightly job: label what is new; publish it if it is good and has not drifted.

    python -m jobs.scheduled_relabel SPEC --gold gold.csv --gate 'toxic.f1 >= 0.8'

Exit codes are the command's: 0 published (or nothing new), 1 held back or failed, 3 incomplete, or
another tick is under way. What is held back stays in the ledger, and the old snapshot current.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.arguments import mapping_of, pairs_of
from pipeline.cache import cache_dir
from pipeline.cli import EXIT_COMPLETE, EXIT_FAILED, EXIT_INCOMPLETE, carry_out

if TYPE_CHECKING:
    from pipeline.runtime.job import Plan
    from pipeline.runtime.run import Progress
    from pipeline.spec.schema import JobSpec
    from pipeline.verbs.relabel import Gate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tick."""
    parser = argparse.ArgumentParser(prog="jobs.scheduled_relabel", description="One tick.")
    parser.add_argument("spec", metavar="SPEC", help="the YAML file that says what to label")
    parser.add_argument("--gold", metavar="FILE", help="gold labels, as assay eval reads them")
    parser.add_argument("--gate", action="append", metavar="GATE", help="'toxic.f1 >= 0.8'")
    parser.add_argument("--id", metavar="COLUMN", help="of gold; else the spec's id")
    parser.add_argument("--text", metavar="COLUMN", help="of gold: joined by the text")
    parser.add_argument("--column", action="append", metavar="TASK=COLUMN", help="gold of a task")
    parser.add_argument("--value", action="append", metavar="GOLD=LABEL", help="a label's name")
    parser.add_argument("--max-psi", type=float, metavar="X", help="of any task's label shares")
    parser.add_argument("--max-flip-rate", type=float, metavar="X", help="of the shared texts")
    parser.add_argument("--max-failing", type=float, metavar="X", help="of the rows: newly failing")
    parser.add_argument("--address", metavar="A", help="a running Ray cluster; else one is started")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.set_defaults(verb=_relabel)
    return carry_out(parser.parse_args(arguments))


def _relabel(options: argparse.Namespace) -> int:
    if options.address is None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported
    from contextlib import ExitStack, redirect_stdout

    from rich.console import Console

    from pipeline.options import Limits
    from pipeline.report.console import shown_progress
    from pipeline.report.drift import print_scheduled_run
    from pipeline.report.run import announced
    from pipeline.spec.parse import load_spec
    from pipeline.verbs.relabel import scheduled_run

    spec = load_spec(options.spec)
    told = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    limits = ("max_psi", "max_flip_rate", "max_failing")
    given = {name: getattr(options, name) for name in limits}
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))

        def announce(planned: Plan) -> Progress:
            told.print(announced(planned), markup=False)
            return stack.enter_context(shown_progress(told, planned.work_rows))

        ended = scheduled_run(
            spec,
            cache_dir=cache_dir(),
            address=options.address,
            gate=_gate(spec, options),
            limits=Limits(**{name: x for name, x in given.items() if x is not None}),
            announce=announce,
        )
    print_scheduled_run(ended, as_json=options.json)
    if not ended.outcome.complete:
        return EXIT_INCOMPLETE
    return EXIT_COMPLETE if ended.published else EXIT_FAILED


def _gate(spec: JobSpec, options: argparse.Namespace) -> Gate | None:
    """What judges the candidate; gold and gates are read, and refused, before any work."""
    if not options.gate and options.gold is None:
        return None
    from pipeline.errors import Problem, SpecError
    from pipeline.evaluation.gates import parse_gate
    from pipeline.gold.labels import read_gold
    from pipeline.options import EvalOptions, GoldOptions
    from pipeline.verbs.evaluate import check_gates, evaluate

    if not options.gate:
        raise SpecError([Problem("--gate", "missing; --gold judges nothing without one")])
    gold: str | None = options.gold
    if gold is None:
        raise SpecError([Problem("--gold", "missing; a gate needs gold labels: --gold FILE")])
    labels = {task.name: tuple(task.labels) for task in spec.tasks}
    columns = mapping_of("--column", options.column)
    how = GoldOptions(options.id, options.text, columns, tuple(pairs_of("--value", options.value)))
    check_gates([parse_gate(gate, labels) for gate in options.gate], read_gold(gold, spec, how))
    eval_options = EvalOptions(gates=options.gate)
    return lambda candidate: (
        evaluate(
            spec, gold, how, eval_options, cache_dir=cache_dir(), candidate=candidate
        ).decisions
    )


if __name__ == "__main__":
    sys.exit(main())
