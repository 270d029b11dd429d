"""A real Ray cluster of one node on this machine, with token authentication, in its own processes.

Has the options that keep `ray start` on the loopback interface, and nothing about jobs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class LocalCluster:
    """Where its Job API is, and the environment in which a command may use it."""

    address: str
    environment: Mapping[str, str]
    token: str
    process: psutil.Process
    log: Path

    def drivers(self) -> list[psutil.Process]:
        """The processes that run `assay run` as a job."""
        return [
            child
            for child in self.process.children(recursive=True)
            if {"-m", "pipeline", "run"} <= set(command_line(child))
        ]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_until(
    holds: Callable[[], object],
    ended: Callable[[], int | None] = lambda: None,
    *,
    pause_s: float = 0.1,
) -> None:
    """Looks until it holds, for minutes; `ended` is the `poll` of a process that goes on."""
    deadline = time.monotonic() + 400
    while not holds():
        assert ended() is None, "the process ended before"
        assert time.monotonic() < deadline, "nothing came in minutes"
        time.sleep(pause_s)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


@contextmanager
def local_cluster(folder: Path, **environment: str) -> Iterator[LocalCluster]:
    """The cluster, until it is no longer needed; `environment` is added to its processes'."""
    token, port = secrets.token_hex(16), free_port()
    (folder / "token").write_text(token)
    # — its sockets lie below, and a socket's path is at most 107 characters
    temporary = tempfile.mkdtemp(prefix="ray")
    common = {
        **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "ASSAY_CACHE": str(folder / "cache"),
    }
    log = folder / "ray.log"
    with log.open("wb") as out:
        started = subprocess.Popen(
            [
                *(str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats"),
                *("--node-ip-address=127.0.0.1", "--port=0", f"--temp-dir={temporary}"),
                *("--dashboard-host=127.0.0.1", f"--dashboard-port={port}"),
                *(f"--ray-client-server-port={free_port()}", "--dashboard-agent-listen-port=0"),
                *("--num-cpus=3", "--object-store-memory=100000000"),
            ],
            env={**common, "RAY_AUTH_MODE": "token", **environment},
            stdout=out,
            stderr=out,
            cwd=folder,
        )
    family = psutil.Process(started.pid)
    cluster = LocalCluster(f"http://127.0.0.1:{port}", common, token, family, log)
    try:
        _wait(cluster, started)
        yield cluster
    finally:
        children = family.children(recursive=True) if family.is_running() else []
        started.terminate()
        try:
            started.wait(timeout=60)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        ended, alive = psutil.wait_procs(children, timeout=20)
        for process in alive:
            process.kill()
        psutil.wait_procs([*ended, *alive], timeout=10)
        shutil.rmtree(temporary, ignore_errors=True)


def _wait(cluster: LocalCluster, started: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while status(cluster.address + "/api/jobs/") != 401:
        assert started.poll() is None, cluster.log.read_text()
        assert time.monotonic() < deadline, cluster.log.read_text()
        time.sleep(0.5)


def status(url: str, token: str | None = None) -> int | None:
    """A request's status; None where nothing answers."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)
    except OSError:
        return None
