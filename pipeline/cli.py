"""The command `assay`: parse, call one function, show errors, give an exit code.

Knows verbs, streams and exit codes. Has no defaults of its own and imports what a verb needs only
when the verb runs, so that `assay --help` is quick.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.arguments import mapping_of, numbers_of, pairs_of, parser
from pipeline.errors import AssayError

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.options import GoldOptions
from pipeline.cache import cache_dir

EXIT_COMPLETE = 0
EXIT_FAILED = 1
EXIT_INCOMPLETE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is DESIGN's: 0 complete, 1 failed, 2 spec, 3 again, 4 refused."""
    return carry_out(_parser().parse_args(arguments))


def carry_out(options: argparse.Namespace) -> int:
    """Call `options.verb` with the options; errors are shown, and give the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    # transformers imports torchao where it is installed, which then lists the kernels of other
    # machines that it could not load; and torch objects to how it registers its enums.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # These tell where they found credentials, and what fonts there are.
    for name in ("botocore", "aiobotocore", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Set before Ray is imported: a labelling run tells nobody about itself, and Ray's core says
    # on standard error only what ends it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    verb: Callable[[argparse.Namespace], int] = options.verb
    try:
        return verb(options)
    except AssayError as error:
        print(f"assay: {error}" if error.exit_code != 2 else str(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("assay: stopped; run the same command again to go on", file=sys.stderr)
        return EXIT_INCOMPLETE


def _parser() -> argparse.ArgumentParser:
    return parser(
        {
            "run": _run,
            "check": _check,
            "plan": _plan,
            "eval": _eval,
            "fit": _fit,
            "calibrate": _calibrate,
            "filter": _filter,
            "diff": _diff,
            "verify": _verify,
            "gc": _gc,
            "bench": _bench,
        }
    )


def _run(options: argparse.Namespace) -> int:
    if options.address and options.address.startswith(("http://", "https://")):
        if not options.dry_run:
            return _submit(options)
    elif options.address is None:
        # What a Ray of our own does unasked, only without announcing it. Read when ray is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    from pipeline.report.console import shown_progress
    from pipeline.report.run import announced, show_summary, summary_json
    from pipeline.runtime.run import dry_run, run
    from pipeline.spec.parse import load_spec

    spec = load_spec(options.spec)
    if options.dry_run:
        from pipeline.report.run import plan_json, plan_table

        planned = dry_run(spec, cache_dir=cache_dir())
        _print(options, plan_json(planned), lambda console: console.print(plan_table(planned)))
        return EXIT_COMPLETE
    with ExitStack() as stack:
        # — Ray tells of workers that died on standard output, where the result goes
        stack.enter_context(redirect_stdout(sys.stderr))

        def announce(planned: Any) -> Callable[[int], None]:
            console = _console(sys.stderr)
            console.print(announced(planned), markup=False)
            return stack.enter_context(shown_progress(console, planned.work_rows))

        outcome = run(
            spec,
            cache_dir=cache_dir(),
            address=options.address,
            retry_failed=options.retry_failed,
            publish_partial=options.publish_partial,
            announce=announce,
        )
    _print(options, summary_json(outcome), lambda console: show_summary(outcome, console))
    return EXIT_COMPLETE if outcome.complete else EXIT_INCOMPLETE


def _submit(options: argparse.Namespace) -> int:
    """The same command on a cluster, followed from here."""
    from pipeline.cluster.access import requires_token
    from pipeline.report.console import JobLog
    from pipeline.spec.parse import load_spec

    spec = load_spec(options.spec)
    # Ray's client would go where these say, whatever the command says.
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        os.environ.pop(name, None)
    if requires_token(options.address, insecure=options.insecure_cluster):
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported
    from pipeline.cluster.submission import connect, follow, submit

    names = ("json", "retry_failed", "publish_partial")
    flags = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    client = connect(options.address)
    job = submit(client, spec, options.address, flags, installed=options.installed)
    told = "submitted" if job.new else "is under way there already; following it"
    print(f"assay: {job.id} {told}", file=sys.stderr)
    log = JobLog(sys.stdout, sys.stderr, results=options.json)
    try:
        ended = follow(client, job.id, log.show)
    except KeyboardInterrupt:
        return _stopped_following(client, job.id, options.address)
    finally:
        log.close()
    if ended.exit_code:
        print(f"assay: {job.id} {ended.status}: {ended.message}", file=sys.stderr)
    return ended.exit_code


def _stopped_following(client: Any, id: str, address: str) -> int:
    from pipeline.cluster.submission import stop
    from pipeline.report.console import wants_stop

    if wants_stop(id, sys.stderr, sys.stdin):
        stop(client, id)
        print(f"assay: {id} is being stopped; run the same command to go on", file=sys.stderr)
    else:
        told = f"the same command follows it again, `ray job stop {id} --address {address}` ends it"
        print(f"assay: {id} goes on; {told}", file=sys.stderr)
    return EXIT_INCOMPLETE


def _check(options: argparse.Namespace) -> int:
    from pipeline.report.check import findings_json, show_findings
    from pipeline.spec.parse import load_spec
    from pipeline.verbs.check import check

    found = check(load_spec(options.spec), cache_dir=cache_dir(), documents=options.documents)
    _print(
        options,
        findings_json(found),
        lambda console: show_findings(found, console, prompts=options.prompts),
    )
    return EXIT_COMPLETE if found.proof.exactness.exact else EXIT_FAILED


def _plan(options: argparse.Namespace) -> int:
    from pipeline.options import PlanOptions
    from pipeline.report.run import estimate_json, estimate_table
    from pipeline.spec.parse import load_spec
    from pipeline.verbs.plan import estimate

    wishes = PlanOptions(options.workers, options.price, options.rate, options.documents)
    found = estimate(load_spec(options.spec), wishes, cache_dir=cache_dir())
    _print(options, estimate_json(found), lambda console: console.print(estimate_table(found)))
    return EXIT_COMPLETE


def _eval(options: argparse.Namespace) -> int:
    from pipeline.options import EvalOptions
    from pipeline.report.evaluation_table import evaluation_json, show_evaluation
    from pipeline.spec.parse import load_spec
    from pipeline.verbs.evaluate import evaluate

    eval_options = EvalOptions(
        options.precision, options.recall, options.gate or (), options.resamples
    )
    spec = load_spec(options.spec)
    found = evaluate(spec, options.gold, _how_gold(options), eval_options, cache_dir=cache_dir())
    _print(options, evaluation_json(found), lambda console: show_evaluation(found, console))
    if options.html:
        from pipeline.report.evaluation_page import write_page

        write_page(found, Path(options.html))
    return EXIT_COMPLETE if found.passed else EXIT_FAILED


def _fit(options: argparse.Namespace) -> int:
    from pipeline.options import FitOptions
    from pipeline.report.console import shown_progress
    from pipeline.report.fit import fit_json, show_fit
    from pipeline.spec.parse import load_spec
    from pipeline.verbs.fit import fit_readouts

    fit_options = FitOptions(
        layers=options.layers,
        document=options.document,
        to=options.to,
        folds=options.folds,
        rows=numbers_of("--rows", options.rows),
    )
    spec, how = load_spec(options.spec), _how_gold(options)
    with ExitStack() as stack:

        def start(documents: int) -> Callable[[int], None]:
            shown = shown_progress(_console(sys.stderr), documents, doing="reading", done="read")
            return stack.enter_context(shown)

        found = fit_readouts(
            spec, options.gold, how, fit_options, cache_dir=cache_dir(), start=start
        )
    _print(options, fit_json(found), lambda console: show_fit(found, console))
    return EXIT_COMPLETE


def _how_gold(options: argparse.Namespace) -> GoldOptions:
    from pipeline.options import GoldOptions

    return GoldOptions(
        id=options.id,
        text=options.text,
        columns=mapping_of("--column", options.column),
        values=tuple(pairs_of("--value", options.value)),
        tasks=options.task or (),
    )


def _verify(options: argparse.Namespace) -> int:
    from pipeline.audit.verify import verify_output
    from pipeline.report.maintenance import show_verified, verified_json
    from pipeline.spec.parse import load_spec

    verified = verify_output(load_spec(options.spec), cache_dir=cache_dir())
    _print(options, verified_json(verified), lambda console: show_verified(verified, console))
    return EXIT_COMPLETE if verified.intact else EXIT_FAILED


def _gc(options: argparse.Namespace) -> int:
    from pipeline.audit.gc import collect_garbage
    from pipeline.report.maintenance import gc_json, show_gc
    from pipeline.spec.parse import load_spec

    spec = load_spec(options.spec)
    result = collect_garbage(spec, cache_dir=cache_dir(), keep=options.keep, delete=options.delete)
    _print(options, gc_json(result), lambda console: show_gc(result, console))
    return EXIT_COMPLETE


def _filter(options: argparse.Namespace) -> int:
    from pipeline.filters.run import filter_corpus
    from pipeline.options import FilterOptions
    from pipeline.report.maintenance import filtered_json, show_filtered
    from pipeline.spec.parse import load_spec

    filter_options = FilterOptions(options.to, options.dropped, options.on_error, tuple(options.by))
    filtered = filter_corpus(load_spec(options.spec), filter_options, cache_dir=cache_dir())
    _print(options, filtered_json(filtered), lambda console: show_filtered(filtered, console))
    return EXIT_COMPLETE if filtered.complete else EXIT_INCOMPLETE


def _diff(options: argparse.Namespace) -> int:
    from pipeline.audit.diff import compare, side
    from pipeline.report.drift import comparison_json, show_comparison
    from pipeline.spec.parse import load_spec
    from pipeline.stores.store import open_store

    spec = load_spec(options.spec)
    store = open_store(spec.output, spec.storage_options)
    compared = compare(store, side(store, options.a), side(store, options.b), options.by)
    _print(options, comparison_json(compared), lambda console: show_comparison(compared, console))
    return EXIT_COMPLETE


def _calibrate(options: argparse.Namespace) -> int:
    from pipeline.options import CalibrateOptions
    from pipeline.report.fit import calibrated_json, show_calibrated
    from pipeline.spec.parse import load_spec
    from pipeline.verbs.calibrate import calibrate

    calibrate_options = CalibrateOptions(
        options.task, options.method, options.gold, options.snapshot
    )
    made = calibrate(load_spec(options.spec), calibrate_options, options.to, cache_dir=cache_dir())
    _print(options, calibrated_json(made), lambda console: show_calibrated(made, console))
    return EXIT_COMPLETE


def _bench(options: argparse.Namespace) -> int:
    from pipeline.report.bench import bench_json, bench_tables
    from pipeline.spec.parse import load_spec
    from pipeline.verbs.bench import bench

    measured = bench(
        load_spec(options.spec),
        cache_dir=cache_dir(),
        rounds=options.rounds,
        tokens=options.tokens,
    )
    _print(options, bench_json(measured), lambda console: console.print(bench_tables(measured)))
    return EXIT_COMPLETE


def _console(stream: Any) -> Console:
    from rich.console import Console

    # — labels, names and paths are text: none of it is markup or the name of an emoji
    return Console(file=stream, highlight=False, soft_wrap=True, markup=False, emoji=False)


def _print(
    options: argparse.Namespace, value: dict[str, Any], show: Callable[[Console], None]
) -> None:
    """The result on standard output: one JSON value, or what people read."""
    if options.json:
        print(json.dumps(value))
    else:
        show(_console(sys.stdout))
