"""The fault table of a cluster: a node is cut off, fails, comes late, or has a full disk.

`pytest -s tests/runtime/test_machines.py` prints the table. The nodes and the S3 server are
machines on a network of this one (`machines`), which needs root. Ray's own time limits hold.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import ASSAY
from fault_proxy import Faults
from local_cluster import BIN, wait_until
from machines import Machine, network
from servers import KEY, SECRET, start_seaweedfs
from shell import DOCUMENTS, Shell

from pipeline.hashes import sha256_hex
from pipeline.stores.s3 import open_s3

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
CUT_OFF_S = 60.0
SLOWLY = "200kbit"  # a second, of the store: the run takes longer than a node is cut off


@dataclass(frozen=True)
class Run:
    """A run of the command."""

    process: subprocess.Popen[bytes]
    log: Path

    def line(self, *words: str) -> str | None:
        """A line of its log that has all these words."""
        lines = self.log.read_text().splitlines()
        return next((line for line in lines if all(word in line for word in words)), None)


@dataclass(frozen=True)
class Site:
    """Machines with Ray, and a shell on the first of them."""

    add: Callable[..., Machine]
    folder: Path  # of logs
    shell: Shell
    store: Machine
    head: Machine
    started: list[subprocess.Popen[bytes]]

    def start_ray(self, machine: Machine, *flags: str) -> Machine:
        """The machine, once it is a node."""
        log = self.folder / machine.name
        started = self._start(
            *(machine, log, str(BIN / "ray"), "start", "--block", "--disable-usage-stats", *flags),
            *(f"--node-ip-address={machine.address}", f"--temp-dir={machine.disk}/r"),
            "--object-store-memory=100000000",
        )
        wait_until(lambda: "Ray runtime started" in log.read_text() or started.poll() is not None)
        assert started.poll() is None, log.read_text()
        return machine

    def node(self, name: str, disk_size: str = "1g") -> Machine:
        """A new machine, once it is a node with one processor."""
        head = f"--address={self.head.address}:6379"
        return self.start_ray(self.add(name, disk_size), head, "--num-cpus=1")

    def run(self) -> Run:
        """Starts a run on the head."""
        log, address = self.folder / "run", f"{self.head.address}:6379"
        words = (*ASSAY, "run", str(self.shell.spec), "--address", address)
        return Run(self._start(self.head, log, *words), log)

    def _start(self, machine: Machine, log: Path, *words: str) -> subprocess.Popen[bytes]:
        self.started.append(machine.start(*words, environment=self.shell.environment, log=log))
        return self.started[-1]

    @contextmanager
    def at_work(self, *machines: Machine) -> Iterator[None]:
        """Waits until each machine has a worker. After the first label file the store is slow."""
        wait_until(lambda: self.shell.label_files() > 0)
        with self.store.slow(SLOWLY):
            wait_until(lambda: all("ShardWorker" in machine.processes() for machine in machines))
            yield

    def assert_complete(self, run: Run) -> None:
        """The run ends complete, with each row once."""
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=90)
        assert run.process.poll() == 0, run.log.read_text()
        self.shell.assert_every_row_once()


@pytest.fixture(scope="module")
def table() -> Iterator[Callable[[str, Run, Machine], None]]:
    """Takes the table's rows, each with the line that names the machine; prints them at the end."""
    lines: list[str] = []

    def add(fault: str, run: Run, machine: Machine) -> None:
        named = run.line(machine.address)
        assert named is not None, run.log.read_text()
        lines.append(f"{fault} | seaweedfs | documents {DOCUMENTS}, lost 0, doubled 0 | {named}")

    yield add
    print("\n" + "\n".join(lines))


@pytest.fixture
def site(tmp_path: Path, write_spec: Callable[..., Path], model_folder: Path) -> Iterator[Site]:
    """A head, and on a machine of its own an S3 server with the model and the input."""
    with ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(lambda: [each.wait(timeout=30) for each in started])
        add = stack.enter_context(network())
        store, head = add("s"), add("h")
        (folder := tmp_path / "s3").mkdir()
        start_server = contextmanager(start_seaweedfs)
        server = stack.enter_context(start_server(folder, store.address, store.command))
        base = server.new_url().removesuffix("/out")
        corpus, model = f"{base}/in/corpus.jsonl", f"{base}/model"
        (tmp_path / "token").write_text(secrets.token_hex(16))
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "ASSAY_CACHE": f"{head.disk}/c",
        }
        spec = write_spec(
            model={"path": model, "dtype": "float32"},
            input={"path": corpus, "id": "id", "shard_bytes": 5_000},
            output=f"{base}/out",
        )
        output = open_s3(f"{base}/out", server.options)
        files = {file.name: file.read_bytes() for file in model_folder.iterdir()}
        sums = "".join(f"{sha256_hex(data)}  {name}\n" for name, data in files.items())
        for name, data in {**files, "SHA256SUMS": sums.encode()}.items():
            output.file_system.pipe_file(f"{model}/{name}", data)
        shell = Shell(spec, environment, Faults(), corpus, output, ASSAY)
        shell.write_corpus("number")
        made = Site(add, tmp_path, shell, store, head, started)
        made.start_ray(head, "--head", "--port=6379", "--num-cpus=0", "--include-dashboard=0")
        yield made


def test_a_node_cut_off_for_a_minute(site: Site, table: Callable[..., None]) -> None:
    one, two = site.node("1"), site.node("2")
    run = site.run()
    with site.at_work(one, two):
        two.unplug()
        time.sleep(CUT_OFF_S)
        assert run.process.poll() is None, "the run ended before the node came back"
        two.plug()
    site.assert_complete(run)
    table("node cut off for a minute", run, two)


def test_a_node_killed(site: Site, table: Callable[..., None]) -> None:
    one, two = site.node("1"), site.node("2")
    run = site.run()
    with site.at_work(one, two):
        two.fail()
    site.assert_complete(run)
    table("node killed", run, two)


def test_a_node_added_late_does_the_work_of_one_that_is_killed(
    site: Site, table: Callable[..., None]
) -> None:
    one = site.node("1")
    run = site.run()
    with site.at_work(one):
        two = site.node("2")
        wait_until(lambda: run.line("node", two.address) is not None)
        one.fail()
        assert run.process.poll() is None, "the run ended before its only node was killed"
    site.assert_complete(run)
    assert run.line("node", one.address) is not None, run.log.read_text()
    table("node added late, the other one killed", run, two)


def test_a_node_with_a_full_disk(site: Site, table: Callable[..., None]) -> None:
    site.node("1")
    two = site.node("2", disk_size="64m")
    two.fill_disk()
    run = site.run()
    site.assert_complete(run)
    table("node with a full disk", run, two)
