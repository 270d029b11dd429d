"""Whole runs of the command with input and output on S3, in a shell with ordinary AWS variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fault_proxy import Faults, proxied
from servers import KEY, SECRET, Server

from pipeline.cli import main
from pipeline.data.s3_store import S3Store, open_s3
from pipeline.data.snapshots import read_snapshot

DOCUMENTS = 240
BAD_CONNECTION = {
    "error_500": 0.06,
    "slow_down": 0.10,
    "reset": 0.05,
    "lost_reply": 0.10,
    "cut_off": 0.05,
}


@dataclass(frozen=True)
class Shell:
    """A spec with its input and output on a server behind a proxy, and a shell to run it in."""

    spec: Path
    environment: Mapping[str, str]
    faults: Faults
    corpus: str
    output: S3Store  # not through the proxy

    def start(self) -> subprocess.Popen[str]:
        command = [str(Path(sys.executable).with_name("assay")), "run", str(self.spec), "--json"]
        return subprocess.Popen(
            command,
            env=dict(self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self) -> tuple[int, str, str]:
        """The exit code, standard output and standard error of `assay run`."""
        process = self.start()
        out, err = process.communicate(timeout=500)
        return process.returncode, out, err

    def write_corpus(self, mark: str) -> None:
        lines = (
            json.dumps({"id": f"d{i}", "text": f"{mark} {i} says hello. " * 20})
            for i in range(DOCUMENTS)
        )
        self.output.file_system.pipe_file(self.corpus, "\n".join(lines).encode())

    def rows(self, task: str) -> list[dict[str, Any]]:
        """The rows of the current snapshot, in its order."""
        numbers = [stored.key for stored in self.output.list("snapshots/")]
        snapshot = read_snapshot(self.output, len(numbers))
        keys = [entry["key"] for entry in snapshot["files"] if entry["task"] == task]
        tables = [pq.read_table(pa.BufferReader(self.output.read(key))) for key in keys]
        rows: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
        return rows

    def label_files(self) -> int:
        return len(list(self.output.list("labels/")))


def assert_every_row_once(shell: Shell) -> None:
    for task in ("toxic", "topic"):
        rows = shell.rows(task)
        assert [row["doc_id"] for row in rows] == [f"d{i}" for i in range(DOCUMENTS)]
        assert {row["status"] for row in rows} == {"ok"}


def wait_for(shell: Shell, process: subprocess.Popen[str], label_files: int) -> None:
    deadline = time.monotonic() + 300
    while shell.label_files() < label_files:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no label file after five minutes"
        time.sleep(0.05)


@pytest.fixture
def shell_on(
    write_spec: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Shell]]:
    """Makes the shell, once, for a server by its fixture's name."""
    proxies = []

    def make(name: str, **faulty: Any) -> Shell:
        server: Server = request.getfixturevalue(name)
        faults, url = Faults(**faulty), server.new_url()
        proxies.append(proxied(server.endpoint, faults))
        corpus = f"{url.removesuffix('/out')}/in/corpus.jsonl"
        shell = Shell(
            spec=write_spec(
                input={"path": f"{corpus[:-12]}*.jsonl", "id": "id", "shard_bytes": 20_000},
                output=url,
            ),
            environment={
                **os.environ,
                "AWS_ENDPOINT_URL": proxies[-1].__enter__(),
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_DEFAULT_REGION": "us-east-1",
                "ASSAY_CACHE": str(tmp_path / "cache"),
            },
            faults=faults,
            corpus=corpus,
            output=open_s3(url, server.options),
        )
        shell.write_corpus("number")
        return shell

    yield make
    for proxy in proxies:
        proxy.__exit__(None, None, None)


@pytest.mark.parametrize("server", ["moto", "seaweedfs"])
def test_a_run_over_a_bad_connection_is_complete_and_the_next_has_nothing_to_do(
    server: str, shell_on: Callable[..., Shell]
) -> None:
    shell = shell_on(server, shares=BAD_CONNECTION, seed=7)
    code, out, err = shell.run()
    assert code == 0, err
    assert json.loads(out)["snapshot"] == 1
    assert_every_row_once(shell)
    assert min(shell.faults.counted[kind] for kind in BAD_CONNECTION) > 0, shell.faults.counted
    before = list(shell.output.list(""))
    shell.faults.shares, shell.faults.requests[:] = {}, []
    code, out, err = shell.run()
    assert code == 0, err
    assert json.loads(out)["snapshot"] == 1 and json.loads(out)["documents_labelled"] == 0
    assert list(shell.output.list("")) == before
    assert not [line for line in shell.faults.requests if line.startswith("GET") and "/in/" in line]
    written = [line for line in shell.faults.requests if line.startswith("PUT")]
    assert written and all("create-only-probe" in line for line in written)


def test_credentials_that_expire_in_the_middle_end_the_run_and_the_next_goes_on(
    shell_on: Callable[..., Shell],
) -> None:
    shell = shell_on("moto")
    process = shell.start()
    wait_for(shell, process, label_files=4)
    shell.faults.shares = {"expired": 1.0}
    _, err = process.communicate(timeout=300)
    assert process.returncode == 3, err
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("assay: s3://") and "renew the credentials" in last
    done = {stored.key: stored.etag for stored in shell.output.list("labels/")}
    shell.faults.shares = {}
    code, _, err = shell.run()
    assert code == 0, err
    assert_every_row_once(shell)
    assert done.items() <= {s.key: s.etag for s in shell.output.list("labels/")}.items()


def test_an_input_overwritten_in_the_middle_is_noticed_and_the_next_run_labels_the_new_one(
    shell_on: Callable[..., Shell],
) -> None:
    def overwrite(requests: list[str]) -> None:
        planned = [at for at, line in enumerate(requests) if "PUT" in line and "/inputs/" in line]
        since = requests[planned[0] :] if planned else []
        if sum("GET" in line and "/in/corpus" in line for line in since) == 3:
            shell.faults.watch = None
            shell.write_corpus("NUMBER")  # as many bytes

    shell = shell_on("moto", watch=overwrite)
    code, _, err = shell.run()
    assert code == 1, err
    assert "Traceback" not in err
    assert "changed while the job ran" in err.strip().splitlines()[-1]
    code, _, err = shell.run()
    assert code == 0, err
    assert_every_row_once(shell)
    (shard_path,) = {entry["path"] for entry in read_snapshot(shell.output, 1)["shards"]}
    assert shard_path == shell.corpus


def test_a_store_that_ignores_the_condition_is_refused_before_any_work(
    shell_on: Callable[..., Shell],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = shell_on("moto", dropped_headers=frozenset({"if-none-match"}))
    for name, value in shell.environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", str(shell.spec)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"assay: {shell.output.url}: a second create of")
    assert list(shell.output.list("")) == []
