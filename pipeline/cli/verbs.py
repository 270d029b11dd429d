"""The verbs of the command `assay` that label and improve answers, one function each.

Entry point: `app`; `outputs` adds the verbs that use an output.

The parameters of a function are the options of its verb, and its docstring is the verb's help.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from pipeline.cli.app import EXIT_INCOMPLETE, VERBS, new_app
from pipeline.options import (
    WHOLE,
    BenchOptions,
    CalibrateOptions,
    CascadeOptions,
    EvalOptions,
    FitOptions,
    GoldColumns,
    GoldOptions,
    InitOptions,
    PlanOptions,
    RunOptions,
)

if TYPE_CHECKING:
    from pipeline.spec.schema import JobSpec

FLATTEN = Parameter("*")  # each field of the dataclass is an option of its own
SpecFile = Annotated[str, Parameter("SPEC", help="YAML file that says what to label.")]
AsJson = Annotated[bool, Parameter("--json", help="Print one JSON value instead of tables.")]
GoldFile = Annotated[
    str,
    Parameter(
        "--gold",
        metavar="FILE",
        help="Gold labels: a CSV, JSON lines or Parquet file, or another run's output.",
    ),
]
Count = Annotated[int | None, WHOLE]


app = new_app("assay", "Label a corpus: the model reads each document once, for all questions.")
app.register_install_completion_command(help="Install completion for the shell in use.")
LABEL = Group("Label a corpus", sort_key=1)
IMPROVE = Group("Measure and improve the answers", sort_key=2)


@app.command(group=LABEL, sort_key=0)
def init(
    data: Annotated[
        str, Parameter("DATA", help="File, folder or glob of documents, local or at a URL.")
    ],
    /,
    *,
    options: Annotated[InitOptions, FLATTEN] = InitOptions(),
    as_json: AsJson = False,
) -> int:
    """Look at files of documents, and write a commented spec to start from.

    The columns with the text and the id are proposed from the first rows. The task in the spec is
    an example to edit.
    """
    from pipeline.verbs.init import init as propose

    return VERBS["init"].print(propose(data, options), as_json=as_json)


@app.command(group=LABEL, sort_key=0)
def pull(spec: SpecFile, /, *, as_json: AsJson = False) -> int:
    """Fetch the model ahead of a run, and check that its files are whole.

    A GGUF file is converted as for a run. A model that is on this machine already is only checked.
    """
    if sys.stderr.isatty():  # gigabytes may take minutes
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "0"
    return VERBS["pull"].carry_out(spec, as_json=as_json)


@app.command(group=LABEL, sort_key=1)
def run(
    spec: SpecFile,
    /,
    *,
    address: Annotated[str | None, Parameter(metavar="ADDRESS")] = None,
    insecure_cluster: bool = False,
    installed: bool = False,
    dry_run: bool = False,
    options: Annotated[RunOptions, FLATTEN] = RunOptions(),
    as_json: AsJson = False,
) -> int:
    """Label every document that has no answer yet, then publish a snapshot.

    After a crash, or when the corpus has grown, run the same command again. Exit
    code 3 means that some shards are still missing.

    Parameters
    ----------
    address
        A running Ray cluster, or http://HEAD:8265 to submit the run to it as a job (default: start
        Ray on this machine).
    insecure_cluster
        Submit the job even if anyone who reaches the cluster can run programs on it.
    installed
        Submit the job without pinned package versions: the cluster has assay's dependencies.
    dry_run
        Print what would be computed, and compute nothing.
    """
    if dry_run:
        bounds = [each for each in options.flags if each.startswith(("--max-hours", "--max-cost"))]
        planned = VERBS["dry run"].result(spec, options)
        return VERBS["dry run"].print(planned, as_json=as_json, bounds=bounds)
    if address is not None and address.startswith(("http://", "https://")):
        flags = [*options.flags, *(["--json"] if as_json else [])]
        return _submit(spec, address, flags, insecure=insecure_cluster, installed=installed)
    return VERBS["run"].carry_out(spec, as_json=as_json, address=address, options=options)


def _submit(
    spec_file: str, address: str, flags: Sequence[str], *, insecure: bool, installed: bool
) -> int:
    """The same command as a job on a cluster, followed from here."""
    from pipeline.cluster.access import requires_token
    from pipeline.spec.parse import load_spec

    spec = load_spec(spec_file)
    # Ray's client would prefer these to the address of the command.
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        os.environ.pop(name, None)
    closed = requires_token(address, insecure=insecure)
    from pipeline.runtime.connection import token_mode

    with token_mode() if closed else nullcontext():
        return _submit_and_follow(spec, address, flags, installed=installed)


def _submit_and_follow(
    spec: JobSpec, address: str, flags: Sequence[str], *, installed: bool
) -> int:
    from pipeline.cluster.submission import connect, follow, submit
    from pipeline.report.console import JobLog, escape_controls, wants_stop

    client = connect(address)
    job = submit(client, spec, address, flags, installed=installed)
    state = "submitted" if job.new else "is already running; following it"
    print(f"assay: {job.id} {state}", file=sys.stderr)
    log = JobLog(sys.stdout, sys.stderr, results="--json" in flags)
    try:
        ended = follow(client, job.id, log.show)
    except KeyboardInterrupt:
        next_step = "continues; the same command follows it again, "
        next_step += f"`ray job stop {job.id} --address {address}` ends it"
        if wants_stop(job.id, sys.stderr, sys.stdin):
            client.stop_job(job.id)  # committed files stay
            next_step = "is being stopped; run the same command to continue"
        print(f"assay: {job.id} {next_step}", file=sys.stderr)
        return EXIT_INCOMPLETE
    finally:
        log.close()
    if ended.exit_code:
        line = f"assay: {job.id} {ended.status}: {ended.message}"
        print(escape_controls(line), file=sys.stderr)
    return ended.exit_code


@app.command(group=LABEL, sort_key=2)
def check(
    spec: SpecFile, /, *, prompts: bool = False, documents: Count = None, as_json: AsJson = False
) -> int:
    """Test the storage, the model and the labels, and prove that the answers are exact.

    The proof compares all questions in one reading with a prompt for each question, on a few
    documents of the corpus. The exit code is 1 if they differ by more than rounding explains.

    Parameters
    ----------
    prompts
        Print the prompt of each task for the first document.
    documents
        Number of documents for the proof (default: 4; 0: no proof).
    """
    findings = VERBS["check"].result(spec, documents=documents)
    return VERBS["check"].print(findings, as_json=as_json, prompts=prompts)


@app.command(group=LABEL, sort_key=3)
def plan(
    spec: SpecFile,
    /,
    *,
    options: Annotated[PlanOptions, FLATTEN] = PlanOptions(),
    as_json: AsJson = False,
) -> int:
    """Estimate what a run would compute, how long it takes and what it costs.

    Nothing is written. The model is loaded only if documents are missing and no rate is given.
    """
    return VERBS["plan"].carry_out(spec, options, as_json=as_json)


@app.command(group=LABEL, sort_key=4)
def status(spec: SpecFile, /, *, as_json: AsJson = False) -> int:
    """Show how many documents are done, missing and failed, the rate, and the time left.

    It reads the output's storage, from any machine and while a run goes on. It starts no Ray, loads
    no model and writes nothing.
    """
    return VERBS["status"].carry_out(spec, as_json=as_json)


@app.command(group=LABEL, sort_key=5)
def bench(
    spec: SpecFile,
    /,
    *,
    options: Annotated[BenchOptions, FLATTEN] = BenchOptions(),
    as_json: AsJson = False,
) -> int:
    """Measure the speed on this machine against other ways to ask the same questions.

    The methods take turns, so that a noisy machine disturbs all of them alike.
    """
    return VERBS["bench"].carry_out(spec, options, as_json=as_json)


@app.command(name="eval", group=IMPROVE, sort_key=1)
def evaluate(
    spec: SpecFile,
    /,
    *,
    gold: GoldFile,
    gold_options: Annotated[GoldOptions, FLATTEN] = GoldOptions(),
    options: Annotated[EvalOptions, FLATTEN] = EvalOptions(),
    as_json: AsJson = False,
) -> int:
    """Compare the answers with gold labels, with confidence intervals.

    `assay report --gold` shows the same figures on a page. The exit code is 1 if a gate fails.
    """
    return VERBS["eval"].carry_out(spec, gold, gold_options, options, as_json=as_json)


@app.command(group=IMPROVE, sort_key=2)
def fit(
    spec: SpecFile,
    /,
    *,
    gold: GoldFile,
    gold_options: Annotated[GoldOptions, FLATTEN] = GoldOptions(),
    options: Annotated[FitOptions, FLATTEN] = FitOptions(),
    as_json: AsJson = False,
) -> int:
    """Fit trained readouts to gold labels, and write their files.

    The figures come from rows that were held out by cross-validation. Of the layers that are as
    good as the best one, up to one standard error, the cheapest is chosen.
    """
    fitted = VERBS["fit"].result(spec, gold, gold_options, options)
    return VERBS["fit"].print(fitted, as_json=as_json, spec_file=spec)


@app.command(group=IMPROVE, sort_key=3)
def calibrate(
    spec: SpecFile,
    /,
    *,
    to: Annotated[str, Parameter(metavar="PATH", help="The file to write: any fsspec path.")],
    options: Annotated[CalibrateOptions, FLATTEN],
    gold_options: Annotated[GoldColumns, FLATTEN] = GoldColumns(),
    as_json: AsJson = False,
) -> int:
    """Write the calibration file of a task, from its answers in the output.

    Gold rows that the task's readout was fitted to are left out.
    """
    gold = {"gold_options": gold_options}
    return VERBS["calibrate"].carry_out(spec, options, to, as_json=as_json, **gold)


@app.command(group=IMPROVE, sort_key=4)
def cascade(
    spec: SpecFile,
    /,
    *,
    to: Annotated[str, Parameter(metavar="PATH", help="The file to write: any fsspec path.")],
    options: Annotated[CascadeOptions, FLATTEN],
    gold_options: Annotated[GoldColumns, FLATTEN] = GoldColumns(),
    as_json: AsJson = False,
) -> int:
    """Choose the thresholds between the stages of a cascade, from a sample.

    Every stage answers the sample. With the stated confidence, the cascade then has the recall and
    the precision, compared with the last stage alone, or with gold labels.
    """
    gold = {"gold_options": gold_options}
    return VERBS["cascade"].carry_out(spec, options, to, as_json=as_json, **gold)
