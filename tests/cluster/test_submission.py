"""Jobs on a cluster: one id a spec, followed to its end, and a killed driver loses nothing."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from local_cluster import REPOSITORY, LocalCluster, local_cluster, wait_until
from many_rows import assert_every_row_once, has_begun, write_many
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from pipeline.cli.parameters import words_of
from pipeline.cluster import submission
from pipeline.cluster.submission import choose_job, end_line, exit_code, follow, submit
from pipeline.errors import RefusedError, UnavailableError
from pipeline.options import RunOptions
from pipeline.spec.parse import load_spec

DOCUMENTS = 600


def job(id: str, status: str = "SUCCEEDED", **more: Any) -> JobDetails:
    return JobDetails(type="SUBMISSION", submission_id=id, status=status, entrypoint="x", **more)


@pytest.mark.parametrize(
    ("jobs", "chosen"),
    [
        ([], ("assay-a-1", True)),
        ([job("assay-a-1")], ("assay-a-2", True)),
        ([job("assay-a-1"), job("assay-a-9", "FAILED")], ("assay-a-10", True)),
        ([job("assay-a-1", "STOPPED"), job("assay-a-2", "RUNNING")], ("assay-a-2", False)),
        ([job("assay-a-1", "PENDING")], ("assay-a-1", False)),
        # — of other jobs, though their names begin alike
        ([job("assay-ab-1", "RUNNING"), job("assay-a-x", "RUNNING")], ("assay-a-1", True)),
        ([job("my-assay-a-1", "RUNNING"), job("assay-a-1-1", "RUNNING")], ("assay-a-1", True)),
    ],
)
def test_a_job_under_way_is_followed_and_an_ended_one_gets_a_successor(
    jobs: list[JobDetails], chosen: tuple[str, bool]
) -> None:
    assert choose_job(jobs, "assay-a") == chosen


@pytest.mark.parametrize(
    ("details", "code"),
    [
        ({"status": "SUCCEEDED", "driver_exit_code": 0}, 0),
        ({"status": "FAILED", "driver_exit_code": 1}, 1),
        ({"status": "FAILED", "driver_exit_code": 2}, 2),
        ({"status": "FAILED", "driver_exit_code": 3}, 3),
        ({"status": "FAILED", "driver_exit_code": 4}, 4),
        ({"status": "FAILED", "driver_exit_code": -9}, 3),
        ({"status": "FAILED", "driver_exit_code": 137}, 3),
        ({"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED"}, 3),
        ({"status": "FAILED", "error_type": "RUNTIME_ENV_SETUP_FAILURE"}, 1),
        ({"status": "STOPPED"}, 3),
    ],
)
def test_a_jobs_exit_code_is_passed_on_and_a_failure_that_may_pass_is_3(
    details: dict[str, Any], code: int
) -> None:
    assert exit_code(job("a", **details)) == code


def test_how_a_job_ended_is_one_line() -> None:
    ended = job("assay-a-1", "FAILED", message="Job failed with exit code 1,\nlast lines: x")
    assert end_line(ended) == "assay-a-1 FAILED: Job failed with exit code 1,"


LOG = "first\nsecond\nthird\n"
BREAKS = RuntimeError("Request failed with status code 500")


class Connections:
    """A cluster that has each of these logs at a question; an error ends the question.

    The job succeeds with the last one, which is repeated.
    """

    def __init__(self, *logs: str | Exception) -> None:
        self.logs = list(logs)

    def get_job_info(self, id: str) -> JobDetails:
        return job(id, "RUNNING" if len(self.logs) > 1 else "SUCCEEDED")

    def get_job_logs(self, id: str) -> str:
        log = self.logs.pop(0) if len(self.logs) > 1 else self.logs[0]
        if isinstance(log, Exception):
            raise log
        return log


def test_a_log_is_shown_once_to_its_end_whatever_the_connection_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "_PAUSE_S", 0)
    monkeypatch.setattr(submission, "_POLL_S", 0)
    shown: list[str] = []
    breaks = [BREAKS] * (submission._TRIES - 1)
    cluster = Connections("", LOG[:4], *breaks, LOG[:9], LOG[:9], *breaks, LOG)
    assert exit_code(follow(cluster, "a", shown.append)) == 0  # type: ignore[arg-type]
    assert shown == [LOG[:4], LOG[4:9], LOG[9:]]


def test_a_cluster_that_answers_no_more_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_PAUSE_S", 0)
    monkeypatch.setattr(submission, "_POLL_S", 0)
    with pytest.raises(UnavailableError, match="may still be running") as raised:
        follow(Connections(BREAKS), "a", lambda piece: None)  # type: ignore[arg-type]
    assert raised.value.exit_code == 3


class Jobs:
    """A cluster's list of jobs; the first tries to add one fail as they are set to."""

    def __init__(self, *failures: str | Exception) -> None:
        self.failures = list(failures)
        self.jobs: list[JobDetails] = []
        self.asked: list[dict[str, Any]] = []

    def list_jobs(self) -> list[JobDetails]:
        return list(self.jobs)

    def submit_job(self, **asked: Any) -> None:
        self.asked.append(asked)
        if self.failures:
            failure = self.failures.pop(0)
            raise failure if isinstance(failure, Exception) else RuntimeError(failure)
        self.jobs.append(job(asked["submission_id"], "RUNNING"))


@pytest.fixture
def submitted(
    write_spec: Callable[..., Path],
) -> Callable[..., tuple[str, bool]]:
    spec = load_spec(write_spec())

    def submitted(jobs: Jobs, *flags: str) -> tuple[str, bool]:
        return submit(jobs, spec, "http://127.0.0.1:1", flags)  # type: ignore[arg-type]

    return submitted


def test_the_same_spec_is_one_job_and_its_folder_holds_what_it_runs(
    submitted: Callable[..., tuple[str, bool]],
) -> None:
    jobs = Jobs()
    (id, is_new), second = submitted(jobs), submitted(jobs, "--json")
    assert is_new and second == (id, False) and len(jobs.asked) == 1
    assert jobs.asked[0]["entrypoint"] == "python -m pipeline run spec.yaml --address auto"
    assert set(jobs.asked[0]["runtime_env"]) == {"working_dir"}


def test_the_options_of_a_run_reach_the_job_as_they_were_written(
    submitted: Callable[..., tuple[str, bool]],
) -> None:
    options = RunOptions(sample="1%", where="lang = 'de'", retry_failed=True, max_hours=60)
    jobs = Jobs()
    assert submitted(jobs, *words_of(options))[1]
    words = shlex.split(jobs.asked[0]["entrypoint"])
    assert words[:7] == ["python", "-m", "pipeline", "run", "spec.yaml", "--address", "auto"]
    assert words[7:] == ["--max-hours=60", "--retry-failed", "--sample=1%", "--where=lang = 'de'"]
    assert not submitted(jobs, *words_of(options), "--json")[1]
    ids = {submitted(jobs, *flags)[0] for flags in (words_of(options), ["--sample=2%"], [])}
    assert len(ids) == 3  # other options are another job


def test_a_job_of_another_submission_that_was_faster_is_followed(
    submitted: Callable[..., tuple[str, bool]],
) -> None:
    jobs = Jobs("Job with submission_id x already exists.")
    assert not submitted(jobs)[1] and len(jobs.asked) == 1


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("No available agent to submit job, please try again later."),
        requests.exceptions.ConnectionError("Connection reset by peer"),
    ],
)
def test_a_head_that_takes_no_job_yet_is_incomplete(
    failure: Exception, submitted: Callable[..., tuple[str, bool]]
) -> None:
    with pytest.raises(UnavailableError, match=f"{failure}; run the same command again") as raised:
        submitted(Jobs(failure))
    assert raised.value.exit_code == 3


def test_another_failure_is_refused_in_one_line(submitted: Callable[..., tuple[str, bool]]) -> None:
    with pytest.raises(RefusedError, match=r"the cluster refused the job: status 500: no$"):
        submitted(Jobs("status 500: no\nTraceback ..."))


def test_a_refused_token_is_one_line_and_exit_4(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_address: str) -> None:
        raise AuthenticationError("Unauthenticated:\nthe token differs")

    monkeypatch.setattr(submission, "JobSubmissionClient", refuse)
    with pytest.raises(RefusedError) as raised:
        submission.connect("http://127.0.0.1:1")
    assert "refuses the token" in str(raised.value) and "RAY_AUTH_TOKEN" in str(raised.value)
    assert raised.value.exit_code == 4 and len(str(raised.value).splitlines()) == 1


# — from here on, a real cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """With secrets in its nodes' environment, as clusters have them."""
    with local_cluster(tmp_path_factory.mktemp("cluster"), CLUSTER_SECRET="canary-node") as made:
        yield made


def start(
    cluster: LocalCluster, spec: Path, *options: str, **environment: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeline", "run", str(spec), "--address", cluster.address]
    return subprocess.Popen(
        [*command, "--json", *options],
        env={**cluster.environment, **environment},
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def long_spec(write_spec: Callable[..., Path], tmp_path: Path) -> Path:
    return write_spec(input=write_many(tmp_path, DOCUMENTS, shard_bytes=40_000))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_killed_driver_and_the_same_command_again_label_every_row_once(
    cluster: LocalCluster, long_spec: Path, tmp_path: Path
) -> None:
    first = start(cluster, long_spec, AWS_SECRET_ACCESS_KEY="canary-submitter")
    wait_until(lambda: has_begun(tmp_path / "out"), first.poll)
    for driver in cluster.drivers():
        driver.send_signal(signal.SIGKILL)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 3, err
    assert "FAILED" in err.splitlines()[-1]
    assert not list((tmp_path / "out" / "snapshots").glob("*.json"))
    again = start(cluster, long_spec)
    wait_until(cluster.drivers, again.poll)
    both = start(cluster, long_spec)  # while it is under way: followed, not started
    out, err = again.communicate(timeout=400)
    assert again.returncode == 0, err
    result = json.loads(out)
    assert result["complete"] and result["documents"] == DOCUMENTS
    other_out, other_err = both.communicate(timeout=120)
    assert both.returncode == 0 and json.loads(other_out) == result
    assert "is already running; following it" in other_err
    assert_every_row_once(tmp_path / "out", DOCUMENTS)
    print(f"\ndriver killed on a cluster | documents {DOCUMENTS}, kills 1, lost 0, doubled 0")
    assert_jobs_hold_no_secret(cluster, err + other_err)


def assert_jobs_hold_no_secret(cluster: LocalCluster, shown: str) -> None:
    """Two jobs of one id, whose metadata and logs have no secret."""
    headers = {"Authorization": f"Bearer {cluster.token}"}
    client = JobSubmissionClient(cluster.address, headers=headers)
    jobs = [job for job in client.list_jobs() if job.submission_id]
    jobs.sort(key=lambda job: str(job.submission_id))
    assert [job.status for job in jobs] == [JobStatus.FAILED, JobStatus.SUCCEEDED]
    names = [str(job.submission_id).rpartition("-") for job in jobs]
    assert names[0][0] == names[1][0] and [name[2] for name in names] == ["1", "2"]
    for job in jobs:
        whole = job.model_dump_json() + client.get_job_logs(str(job.submission_id)) + shown
        assert "canary" not in whole and cluster.token not in whole
