"""Submits a run to a cluster through Ray's Job API. Entry points: `submit` and `follow`.

`access` checks before that the cluster is safe.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from pipeline.cluster.bundle import (
    SPEC_FILE,
    content_id,
    write_bundle,
)
from pipeline.errors import Option, Problem, RefusedError, UnavailableError
from pipeline.runtime.session import refused_token
from pipeline.spec.portable import is_loopback, portable_content
from pipeline.spec.schema import JobSpec

# The head's dashboard restarts now and then. A minute without an answer is a failure.
_TRIES, _PAUSE_S = 12, 5.0
_POLL_S = 0.5
# A lost connection may raise nothing: after this long without a line the job's state is read.
_SILENCE_S = 120.0
_INCOMPLETE, _FAILED = 3, 1
# Ray's client logs each upload, and the token's file, to standard error.
for _name in ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk", "_private"):
    logging.getLogger(f"ray.{_name}").setLevel(logging.WARNING)
# Errors from outside the job: another run resumes it.
_INTERRUPTED = {"JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}

Show = Callable[[str], None]  # called with pieces of the job's log, as they come


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job on a cluster."""

    id: str
    new: bool  # False: it was running already


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended."""

    status: str
    exit_code: int  # as `assay run` gives it
    message: str


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
) -> Submitted:
    """Starts `assay run` with these flags on the cluster, unless it is running there already.

    Equal specs with equal flags have equal ids, so two submissions run once. After a job has ended,
    the next id of the same run ends in a number.
    """
    content = portable_content(spec, same_machine=is_loopback(address))
    words = ["python", "-m", "pipeline", "run", SPEC_FILE, "--address", "auto", *sorted(flags)]
    asked = sorted({*flags} - {"--json"})
    with tempfile.TemporaryDirectory() as folder:
        id = f"assay-{spec.name}-{content_id(write_bundle(Path(folder), content), asked)}"
        try:
            job = choose_job(client.list_jobs(), id)
            if job.new:
                client.submit_job(
                    entrypoint=shlex.join(words),
                    submission_id=job.id,
                    # — no variables: Ray shows them in clear text
                    runtime_env={"working_dir": folder},
                )
        except (OSError, RuntimeError) as error:  # the former includes those of `requests`
            if "already exists" in str(error):  # another submission was faster
                return Submitted(job.id, new=False)
            if isinstance(error, OSError) or "try again later" in str(error):
                fix = f"the cluster accepts no job yet: {_line(error)}; run the same command again"
                raise UnavailableError(fix) from error
            raise RefusedError(f"the cluster refused the job: {_line(error)}") from error
    return job


def choose_job(jobs: Sequence[JobDetails], base: str) -> Submitted:
    """The running job of this id, or the id of a new job."""
    pattern = re.compile(re.escape(base) + r"(?:-(\d+))?")
    mine = [
        (int(match[1] or 1), job)
        for job in jobs
        if (match := pattern.fullmatch(job.submission_id or ""))
    ]
    for _, job in mine:
        if not job.status.is_terminal():
            return Submitted(str(job.submission_id), new=False)
    last = max((number for number, _ in mine), default=0)
    return Submitted(base if not last else f"{base}-{last + 1}", new=True)


def follow(client: JobSubmissionClient, id: str, show: Show) -> JobEnd:
    """Shows the job's log until it ends; UnavailableError if the cluster no longer answers."""
    shown = failures = 0

    def show_new(piece: str, end: int) -> None:  # each request has the log from the beginning
        nonlocal shown
        if end > shown:
            show(piece[-(end - shown) :])
            shown = end

    async def tail() -> None:
        end, pieces = 0, aiter(client.tail_job_logs(id))
        with suppress(TimeoutError):
            while piece := await asyncio.wait_for(anext(pieces, None), _SILENCE_S):
                end += len(piece)
                show_new(piece, end)

    while True:
        try:
            asyncio.run(tail())
            info = client.get_job_info(id)
            failures = 0
            if info.status.is_terminal():
                log = client.get_job_logs(id)
                show_new(log, len(log))
                return job_end(info)
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            failures += 1
            if failures == _TRIES:
                raise UnavailableError(
                    f"the cluster no longer answers: {_line(error)}; {id} may still be running, "
                    f"and the same command follows it again"
                ) from error
            time.sleep(_PAUSE_S)
        time.sleep(_POLL_S)


def job_end(info: JobDetails) -> JobEnd:
    """How the job ended: its own exit code, or 3 if something outside the job ended it."""
    code = info.driver_exit_code
    killed = code is not None and not 0 < code < 128  # a signal, by Python's or a shell's count
    if info.status == JobStatus.SUCCEEDED:
        code = 0
    elif info.status == JobStatus.STOPPED or killed or str(info.error_type) in _INTERRUPTED:
        code = _INCOMPLETE
    return JobEnd(str(info.status), _FAILED if code is None else code, _line(info.message or ""))


def _line(error: object) -> str:
    """The first line of an error of Ray, which may contain a traceback or a part of the log."""
    return str(error).strip().partition("\n")[0].strip()
