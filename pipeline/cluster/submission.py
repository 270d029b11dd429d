"""Submits a run to a cluster through Ray's Job API. Entry points: `submit` and `follow`.

`access` checks before that the cluster is safe.
"""

from __future__ import annotations

import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from pipeline.cluster.bundle import SPEC_FILE, content_id, write_bundle
from pipeline.errors import Option, Problem, RefusedError, UnavailableError
from pipeline.runtime.ray_token import refused_token
from pipeline.spec.portable import is_loopback, portable_content
from pipeline.spec.schema import JobSpec

# The head's dashboard restarts now and then. A minute without an answer is a failure.
_TRIES, _PAUSE_S = 12, 5.0
_POLL_S = 1.0  # each time the whole log comes: a run writes a line every ten seconds
_COMPLETE, _FAILED, _INCOMPLETE = 0, 1, 3
# Ray's client logs each upload, and the token's file, to standard error.
for _name in ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk", "_private"):
    logging.getLogger(f"ray.{_name}").setLevel(logging.WARNING)
# Errors from outside the job: another run resumes it.
_INTERRUPTED = {"JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}


def connect(address: str) -> JobSubmissionClient:
    """A client of the Job API at the address; RefusedError if it refuses the token."""
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise refused_token(address) from error
    except (ConnectionError, RuntimeError, OSError) as error:
        reason = f"no Ray cluster answers at {address}: {error}"
        raise RefusedError(Problem(Option("address"), reason)) from error


def submit(
    client: JobSubmissionClient, spec: JobSpec, address: str, flags: Sequence[str] = ()
) -> tuple[str, bool]:
    """The id of the job that runs `assay run` with these flags there, and whether it is new.

    Equal specs with equal flags are one job while it runs, whoever submits them.
    """
    content = portable_content(spec, same_machine=is_loopback(address))
    words = ["python", "-m", "pipeline", "run", SPEC_FILE, "--address", "auto", *sorted(flags)]
    asked = sorted({*flags} - {"--json"})
    with tempfile.TemporaryDirectory() as folder:
        base = f"assay-{spec.name}-{content_id(write_bundle(Path(folder), content), asked)}"
        try:
            id, is_new = choose_job(client.list_jobs(), base)
            if is_new:
                # — no variables: Ray shows them in clear text
                environment = {"working_dir": folder}
                client.submit_job(
                    entrypoint=shlex.join(words), submission_id=id, runtime_env=environment
                )
        except (OSError, RuntimeError) as error:  # the former includes those of `requests`
            if "already exists" in str(error):  # another submission was faster
                return id, False
            if isinstance(error, OSError) or "try again later" in str(error):
                fix = f"the cluster accepts no job yet: {_line(error)}; run the same command again"
                raise UnavailableError(fix) from error
            raise RefusedError(f"the cluster refused the job: {_line(error)}") from error
    return id, is_new


def choose_job(jobs: Sequence[JobDetails], base: str) -> tuple[str, bool]:
    """The id of the running job of this run, or the next one: `base-1`, `base-2`, ..."""
    numbers = [0]
    for job in jobs:
        before, _, number = (job.submission_id or "").rpartition("-")
        if before == base and number.isdecimal():
            if not job.status.is_terminal():
                return str(job.submission_id), False
            numbers.append(int(number))
    return f"{base}-{max(numbers) + 1}", True


def follow(client: JobSubmissionClient, id: str, show: Callable[[str], object]) -> JobDetails:
    """Shows the job's log until it ends; UnavailableError if the cluster no longer answers."""
    shown = failures = 0
    while True:
        try:
            job = client.get_job_info(id)  # — first: the log of a job that has ended is whole
            log = client.get_job_logs(id)
        except (RuntimeError, OSError) as error:  # the latter includes those of `requests`
            failures += 1
            if failures == _TRIES:
                raise UnavailableError(
                    f"the cluster no longer answers: {_line(error)}; {id} may still be running, "
                    f"and the same command follows it again"
                ) from error
            time.sleep(_PAUSE_S)
            continue
        failures = 0
        if len(log) > shown:
            show(log[shown:])
            shown = len(log)
        if job.status.is_terminal():
            return job
        time.sleep(_POLL_S)


def exit_code(job: JobDetails) -> int:
    """The exit code of an ended job's own command, or 3 if something outside it ended it."""
    code = job.driver_exit_code
    killed = code is not None and not 0 < code < 128  # a signal, by Python's or a shell's count
    if job.status == JobStatus.SUCCEEDED:
        return _COMPLETE
    if job.status == JobStatus.STOPPED or killed or str(job.error_type) in _INTERRUPTED:
        return _INCOMPLETE
    return _FAILED if code is None else code


def end_line(job: JobDetails) -> str:
    """How a job ended, in one line. Its message may have a traceback or a part of the log."""
    return f"{job.submission_id} {job.status}: {_line(job.message or '')}"


def _line(error: object) -> str:
    return str(error).strip().partition("\n")[0].strip()
