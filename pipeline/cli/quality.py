"""The verbs of the command `assay` that measure and improve the answers, one function each."""

from __future__ import annotations

import asyncio
import os
import shlex
from contextlib import ExitStack
from functools import partial

from cyclopts import Group

from pipeline.cache import cache_dir
from pipeline.cli.app import Exit, print_result, say, shown_by, spec_in
from pipeline.cli.parameters import AsJson, SpecFile
from pipeline.cli.verbs import imports_of_torch, verb
from pipeline.options import EvalOptions, FitOptions, ReviewOptions

IMPROVE = Group("Measure and improve the answers", sort_key=2)


@verb(IMPROVE, 1, "eval")
def evaluate(
    spec_file: SpecFile, /, *, options: EvalOptions = EvalOptions(), as_json: AsJson = False
) -> int:
    """Compare the answers with gold labels, or the filter with an audit, with confidence intervals.

    `assay report` shows the same figures on a page. The exit code is 1 if a gate of the spec's
    `publish` fails, or if nothing is judged.
    """
    from pipeline.report.evaluation import show_evaluation
    from pipeline.verbs.evaluate import evaluate

    with spec_in(spec_file) as spec:
        evaluation = evaluate(spec, options, cache_dir=cache_dir())
    code = Exit.COMPLETE if evaluation.passed and evaluation.is_judged else Exit.FAILED
    return print_result(evaluation, show_evaluation, as_json=as_json, code=code)


@verb(IMPROVE, 2)
def fit(
    spec_file: SpecFile, /, *, options: FitOptions = FitOptions(), as_json: AsJson = False
) -> int:
    """Train readouts, small classifiers of the model's states, from gold labels.

    The model reads each document once, and gives the states after document and question. The
    better of the two is chosen, by the loss of rows that were held out by cross-validation; the
    figures come from these rows. Of the layers that are as good as the best one, up to one standard
    error, the cheapest is chosen.
    """
    from pipeline.report.progress import fit_progress

    with spec_in(spec_file) as spec, shown_by(fit_progress) as announce:
        with imports_of_torch():
            from pipeline.report.fit import show_fit
            from pipeline.verbs.fit import fit_readouts
        folder = os.path.dirname(spec_file)
        fitted = fit_readouts(
            spec, options, cache_dir=cache_dir(), folder=folder, announce=announce
        )
    return print_result(fitted, partial(show_fit, spec_file=spec_file), as_json=as_json)


@verb(IMPROVE, 0)
def review(spec_file: SpecFile, /, *, options: ReviewOptions, as_json: AsJson = False) -> int:
    """Show a page on which people label documents; no model is needed.

    Every answer is on the disk before the next document is shown. The same command goes on where
    the last one ended. Ctrl-C ends it.
    """
    from pipeline.report.review import show_reviewed
    from pipeline.review.server import listen, serve
    from pipeline.verbs.review import open_review, reviewed

    following = "eval" if options.order == "audit" else "fit"
    command = shlex.join(["assay", following, spec_file, "--gold", options.to])
    with ExitStack() as stack:
        spec = stack.enter_context(spec_in(spec_file))
        own = stack.enter_context(listen(options.host, options.port))
        session = stack.enter_context(open_review(spec, options, cache_dir=cache_dir()))
        page = serve(session, own, host=options.host, command=command, announce=_announce)
        asyncio.run(page)
        result = reviewed(session)
    return print_result(result, partial(show_reviewed, command=command), as_json=as_json)


def _announce(address: str) -> None:
    say(f"assay: open {address} (Ctrl-C ends the review)")
