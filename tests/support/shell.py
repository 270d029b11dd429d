"""A shell with ordinary AWS variables in which the command runs on an S3 server, behind a proxy.

It has the spec, the environment and the readers of the output, and no assertion of a test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from command import ASSAY, TOY_ASSAY, Process, start
from fault_proxy import Faults, proxied
from servers import KEY, SECRET, Server

from pipeline.ledger.snapshots import read_snapshot, snapshot_numbers, table_of
from pipeline.stores.s3 import S3Store, open_s3

DOCUMENTS = 240
TASKS = ("toxic", "topic")
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
    command: Sequence[str]

    def start(self, *options: str, **environment: str) -> Process:
        words = ["run", str(self.spec), "--json", *options]
        return start(self.command, *words, environment={**self.environment, **environment})

    def run(self, *options: str, **environment: str) -> tuple[int, str, str]:
        """The exit code, standard output and standard error of `assay run`."""
        process = self.start(*options, **environment)
        out, err = process.communicate(timeout=500)
        assert process.returncode is not None
        return process.returncode, out, err

    def complete(self, **environment: str) -> dict[str, Any]:
        """The result of a run, which ends complete."""
        code, out, err = self.run(**environment)
        assert code == 0, err
        result: dict[str, Any] = json.loads(out)
        return result

    def other(self, **changes: Any) -> Shell:
        """The same shell with another spec beside the first."""
        content = yaml.safe_load(self.spec.read_text())
        spec = self.spec.with_name(f"other-{self.spec.name}")
        spec.write_text(yaml.safe_dump({**content, **changes}))
        return replace(self, spec=spec)

    def write_corpus(self, mark: str, texts: int = DOCUMENTS) -> None:
        """Writes the documents; with fewer texts, each of them recurs after all others."""
        lines = (
            json.dumps({"id": f"d{i}", "text": f"{mark} {i % texts} says hello. " * 20})
            for i in range(DOCUMENTS)
        )
        self.output.file_system.pipe_file(self.corpus, "\n".join(lines).encode())

    def rows(self, task: str) -> list[dict[str, Any]]:
        """The rows of the spec's last snapshot, in its order."""
        name = yaml.safe_load(self.spec.read_text())["name"]
        snapshots = (read_snapshot(self.output, n) for n in snapshot_numbers(self.output))
        snapshot = next(each for each in snapshots if each["spec"] == name)
        keys = [f["key"] for f in table_of(self.output, snapshot).to_pylist() if f["task"] == task]
        tables = [pq.read_table(pa.BufferReader(self.output.read(key))) for key in keys]
        rows: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
        return rows

    def label_files(self) -> int:
        return len(list(self.output.list("labels/")))

    def assert_every_row_in_snapshot(self, *tasks: str) -> None:
        """None lost, none doubled, all answered."""
        for task in tasks or TASKS:
            rows = self.rows(task)
            assert [row["doc_id"] for row in rows] == [f"d{i}" for i in range(DOCUMENTS)]
            assert {row["status"] for row in rows} == {"ok"}

    def assert_every_row_once(self, *tasks: str) -> None:
        """None lost, none doubled, all answered, in the snapshot and in all files together."""
        self.assert_every_row_in_snapshot(*tasks)
        for task in tasks or TASKS:
            files = [stored.key for stored in self.output.list(f"labels/{task}/")]
            tables = [pq.read_table(pa.BufferReader(self.output.read(key))) for key in files]
            assert sum(table.num_rows for table in tables) == DOCUMENTS


@contextmanager
def shell_on(
    server: Server,
    spec: Callable[..., Path],
    cache: Path,
    command: Sequence[str] = ASSAY,
    **faulty: Any,
) -> Iterator[Shell]:
    """The shell, for a server; `spec` writes a spec file."""
    faults, url = Faults(**faulty), server.new_url()
    corpus = f"{url.removesuffix('/out')}/in/corpus.jsonl"
    with proxied(server.endpoint, faults) as endpoint:
        shell = Shell(
            spec=spec(
                input={"path": f"{corpus[:-12]}*.jsonl", "id": "id", "shard_bytes": 20_000},
                output=url,
            ),
            environment={
                **os.environ,
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_DEFAULT_REGION": "us-east-1",
                "ASSAY_CACHE": str(cache),
                # — botocore's waits of seconds add nothing to the toy, which tries again itself
                **({"AWS_MAX_ATTEMPTS": "1"} if command == TOY_ASSAY else {}),
            },
            faults=faults,
            corpus=corpus,
            output=open_s3(url, server.options),
            command=command,
        )
        shell.write_corpus("number")
        yield shell
