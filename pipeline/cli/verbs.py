"""The verbs of the command `assay` that label a corpus, one function each.

Entry point: `app`; `quality` and `outputs` add the other verbs. The parameters of a function are
the options of its verb, and its docstring is the verb's help. A function imports what it calls when
it runs, so that `assay --help` loads neither torch nor Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from cyclopts import Group

from pipeline.cache import cache_dir
from pipeline.cli.app import Exit, new_app, print_result, say, shown_by, spec_in
from pipeline.cli.parameters import AsJson, SpecFile, Verb, with_flags, words_of
from pipeline.errors import option_error
from pipeline.options import InitOptions, RunOptions
from pipeline.runtime.imports import quick_imports

if TYPE_CHECKING:
    from pipeline.spec.schema import JobSpec

app = new_app("assay", "Label a corpus: the model reads each document once, for all questions.")
app.register_install_completion_command(help="Install completion for the shell in use.")
LABEL = Group("Label a corpus", sort_key=1)
# transformers imports torchao where it is installed, and that prints warnings.
imports_of_torch = partial(quick_imports, "torchao")


def verb(group: Group, sort_key: int, name: str | None = None) -> Callable[[Verb], Verb]:
    """Make a function a verb of `assay`."""
    return lambda function: app.command(
        with_flags(function), group=group, sort_key=sort_key, name=name
    )


@verb(LABEL, 0)
def init(data: str, /, *, options: InitOptions = InitOptions(), as_json: AsJson = False) -> int:
    """Look at your files, and write a first spec: the file that says what to label.

    The columns with the text and the id are proposed from the first rows. The task in the spec is
    an example to edit, or that of a published classifier with --preset.
    """
    from pipeline.report.init import show_proposal
    from pipeline.verbs.init import init

    return print_result(init(data, options), show_proposal, as_json=as_json)


@verb(LABEL, 1)
def run(
    spec_file: SpecFile,
    /,
    *,
    address: str | None = None,
    dry_run: bool = False,
    price: float | None = None,
    options: RunOptions = RunOptions(),
    as_json: AsJson = False,
) -> int:
    """Label every document that has no answer yet, then publish a snapshot.

    After a crash, or when the corpus has grown, run the same command again. Exit code 3 means that
    some documents are not labelled yet. The snapshot is published only if it passes all rules of
    `publish` in the spec; otherwise the last one stays current, and the exit code is 1.

    Parameters
    ----------
    address
        A running Ray cluster, or http://HEAD:8265 to submit the run to it as a job (default: start
        Ray on this machine).
    dry_run
        Print the documents, the tokens and the hours of the run, and compute nothing.
    price
        With --dry-run: price of an hour of the workers of the last run, in any currency.
    """
    if dry_run:
        if address is not None:
            raise option_error("address", "a dry run needs no cluster; leave it out", address)
        return _dry_run(spec_file, options, price, as_json=as_json)
    if price is not None:
        raise option_error("price", "is for a dry run; add --dry-run, or leave it out", price)
    if address is not None and address.startswith(("http://", "https://")):
        flags = [*words_of(options), *(["--json"] if as_json else [])]
        insecure = options.insecure_cluster
        return _submit(spec_file, address, flags, insecure=insecure)
    from pipeline.report.progress import run_progress

    with spec_in(spec_file) as spec, shown_by(run_progress) as announce:
        with quick_imports():
            from pipeline.report.run import show_run
            from pipeline.verbs.run import judged_run
        result = judged_run(
            spec, cache_dir=cache_dir(), address=address, options=options, announce=announce
        )
    code = Exit.COMPLETE if result.complete else Exit.INCOMPLETE
    code = Exit.FAILED if result.reasons else code
    return print_result(result, partial(show_run, spec_file=spec_file), as_json=as_json, code=code)


def _dry_run(spec_file: str, options: RunOptions, price: float | None, *, as_json: bool) -> int:
    from pipeline.report.run import show_forecast
    from pipeline.spec.parse import with_cascades
    from pipeline.verbs.forecast import forecast

    with spec_in(spec_file) as spec:
        spec = with_cascades(spec) if options.save else spec
        result = forecast(spec, options, price=price, cache_dir=cache_dir())
    bounds = [word for word in words_of(options) if word.startswith(("--max-hours", "--max-cost"))]
    show = partial(show_forecast, spec_file=spec_file, bounds=bounds)
    return print_result(result, show, as_json=as_json)


def _submit(spec_file: str, address: str, flags: Sequence[str], *, insecure: bool) -> int:
    """The same command as a job on a cluster, followed from here."""
    from pipeline.cluster.access import requires_token
    from pipeline.spec.parse import load_spec

    spec = load_spec(spec_file)
    # Ray's client would prefer these to the address of the command.
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        os.environ.pop(name, None)
    closed = requires_token(address, insecure=insecure)
    from pipeline.runtime.ray_token import token_mode

    with token_mode() if closed else nullcontext():
        return _submit_and_follow(spec, address, flags)


def _submit_and_follow(spec: JobSpec, address: str, flags: Sequence[str]) -> int:
    from pipeline.cluster.submission import connect, end_line, exit_code, follow, submit
    from pipeline.report.console import escape_controls, job_log, wants_stop

    client = connect(address)
    id, is_new = submit(client, spec, address, flags)
    state = "submitted" if is_new else "is already running; following it"
    say(f"assay: {id} {state}")
    log = job_log(sys.stdout, sys.stderr, results="--json" in flags)
    try:
        job = follow(client, id, log.write)
    except KeyboardInterrupt:
        next_step = "continues; the same command follows it again, "
        next_step += f"`ray job stop {id} --address {address}` ends it"
        if wants_stop(id, sys.stderr, sys.stdin):
            client.stop_job(id)  # committed files stay
            next_step = "is being stopped; run the same command to continue"
        say(f"assay: {id} {next_step}")
        return Exit.INCOMPLETE
    finally:
        log.close()
    if code := exit_code(job):
        say(escape_controls(f"assay: {end_line(job)}"))
    return code


@verb(LABEL, 2)
def check(
    spec_file: SpecFile,
    /,
    *,
    prompts: bool = False,
    documents: int | None = None,
    as_json: AsJson = False,
) -> int:
    """Fetch the model, test it, the storage and the labels, and prove that the answers are exact.

    The proof compares all questions in one reading with a prompt for each question, on a few
    documents of the corpus. The exit code is 1 if they differ by more than rounding explains.

    Parameters
    ----------
    prompts
        Print the prompt of each task for the first document.
    documents
        Number of documents for the proof (default: 4; 0: no proof).
    """
    from pipeline.report.progress import phase_lines
    from pipeline.runtime.plan import check_places

    if sys.stderr.isatty():  # — to fetch gigabytes may take minutes: the Hub's client draws bars
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "0"
    with spec_in(spec_file) as spec:
        check_places(spec, cache_dir())
        with shown_by(phase_lines) as announce:
            with imports_of_torch():
                from pipeline.report.check import show_findings
                from pipeline.verbs.check import check
            findings = check(spec, cache_dir=cache_dir(), documents=documents, announce=announce)
    show = partial(show_findings, prompts=prompts)
    code = Exit.COMPLETE if findings.exactness.exact else Exit.FAILED
    return print_result(findings, show, as_json=as_json, code=code)


@verb(LABEL, 3)
def status(spec_file: SpecFile, /, *, snapshots: bool = False, as_json: AsJson = False) -> int:
    """Show how many documents are done, missing and failed, the rate, and the time left.

    It reads the output's storage, from any machine and while a run goes on. It starts no Ray, loads
    no model and writes nothing.

    Parameters
    ----------
    snapshots
        List the snapshots instead, each with what changed: wordings, model, input.
    """
    from pipeline.report.maintenance import show_snapshots, show_status
    from pipeline.verbs.status import published_snapshots, status

    with spec_in(spec_file) as spec:
        if snapshots:
            return print_result(published_snapshots(spec), show_snapshots, as_json=as_json)
        result = status(spec, cache_dir=cache_dir())
    return print_result(result, show_status, as_json=as_json)
