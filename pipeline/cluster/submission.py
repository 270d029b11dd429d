"""Submits a run to a cluster through Ray's Job API. Entry points: `submit` and `follow`.

A job's working directory has the spec, the files that it names, and this program (`write_bundle`);
the nodes have what assay needs. `access` checks before that the cluster is safe.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from pipeline.errors import Option, Problem, RefusedError, UnavailableError
from pipeline.hashes import sha256_hex
from pipeline.runtime.ray_token import refused_token
from pipeline.spec.portable import is_loopback, portable_content, stages_of
from pipeline.spec.schema import JobSpec

SPEC_FILE = "spec.yaml"
_PACKAGE = Path(__file__).parents[1]
# The head's dashboard restarts now and then. A minute without an answer is a failure.
_TRIES, _PAUSE_S = 12, 5.0
_POLL_S = 1.0  # each poll returns the whole log; a run writes a line every ten seconds
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
            job = client.get_job_info(id)  # — before the log: the log of an ended job is complete
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


def content_id(bundled: Mapping[str, Any], flags: Sequence[str] = ()) -> str:
    """16 hex digits that identify a run: the hash of its flags and the uploaded spec without its
    filter.

    The name of a fitted file has the hash of its content: after a new fit the same spec is another
    run.
    """
    hashed = {**{key: value for key, value in bundled.items() if key != "filter"}, "flags": flags}
    return sha256_hex(json.dumps(hashed, sort_keys=True).encode(), 16)


def write_bundle(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the job's working directory: the spec, the files that it names, and the program.

    Returns the spec's content as it is uploaded.
    """
    bundled = {**content, "tasks": [_with_files(task, folder) for task in content["tasks"]]}
    gold = content.get("gold", {})
    if (path := gold.get("path")) and (file := Path(os.path.expanduser(path))).exists():
        # — an output, or a snapshot of one, is not copied
        is_one = file.is_file() and file.parent.name != "snapshots"
        name = _copied(file, folder) if is_one else os.path.abspath(file)
        bundled["gold"] = {**gold, "path": name}
    written = yaml.dump(bundled, Dumper=_PlainDumper, sort_keys=False, allow_unicode=False)
    (folder / SPEC_FILE).write_text(written, encoding="utf-8")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(_PACKAGE, folder / _PACKAGE.name, ignore=ignored)
    return bundled


def _with_files(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The task with the local files that it names copied into the folder."""
    changed: dict[str, Any] = copy.deepcopy(dict(task))
    for own in (changed, *stages_of(changed)):
        for holder, key in ((own, "readout"), (own.get("classifier"), "path")):
            if holder and (name := holder.get(key)):
                holder[key] = _copied(Path(os.path.expanduser(name)), folder) or name
    return changed


def _copied(path: Path, folder: Path) -> str | None:
    """The name of the copy of a file, or of a folder of files; None where there is neither."""
    if not path.exists():
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    hashes = [file.name + sha256_hex(file.read_bytes()) for file in files if file.is_file()]
    name = f"{sha256_hex(''.join(hashes).encode(), 16)}-{path.name}"
    if path.is_dir():
        shutil.copytree(path, folder / name, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, folder / name)
    return name


class _PlainDumper(yaml.SafeDumper):
    """YAML without anchors, which a spec must not have."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
