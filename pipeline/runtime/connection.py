"""The Ray that a run uses: this process's own, a cluster's, or a new one on this machine.

Entry points: `remote_ray` and `local_ray`.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from ray._private import services
from ray._private.node import Node

from pipeline.errors import Problem, RefusedError, SpecError, UnavailableError
from pipeline.runtime.imports import quick_imports
from pipeline.runtime.placement import Placement, node_resources

CONNECT_S = 10.0
LOOPBACK = "127.0.0.1"
_PROCESS_NAMES = ("ray::", "raylet", "gcs_server")
_SERVICES = ("start_monitor", "start_api_server", "start_log_monitor")


@contextmanager
def remote_ray(address: str | None) -> Iterator[list[dict[str, float]]]:
    """The resources of the nodes of the cluster at `address`; without an address, of the Ray that
    this process is connected to, or none.
    """
    if address is None:
        yield node_resources() if ray.is_initialized() else []
        return
    if address.startswith("ray://"):
        fix = (
            "Ray Data does not run through Ray's client; write http://HEAD:8265 to submit the run, "
            "or run it on a node of the cluster with auto"
        )
        raise SpecError([Problem("--address", fix, address)])
    try:
        _check_listening(address)
        with without_core_greeting(), _sigterm_handler_kept():
            connected = ray.init(
                address=address, log_to_driver=False, logging_level=logging.WARNING
            )
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"--address: no Ray cluster answers at {address}: {error}; correct the address, or "
            f"start a cluster with `ray start --head`"
        ) from error
    with connected:
        yield node_resources()


def _check_listening(address: str) -> None:
    """OSError if nothing listens at `host:port`: Ray would try to connect for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


@contextmanager
def local_ray(placement: Placement) -> Iterator[None]:
    """The Ray that this process is connected to, or a new one that ends with the run."""
    if ray.is_initialized():
        yield
        return
    # — Ray waits for its processes meanwhile, for seconds. The end does not wait for the import: an
    # import of this thread that Ctrl-C ended may keep a lock
    threading.Thread(target=_import_graph, name="import", daemon=True).start()
    try:
        with without_core_greeting(), _sigterm_handler_kept(), _without_services():
            started = ray.init(
                address="local",
                # — with this address Ray's processes listen on the loopback interface alone
                _node_ip_address=LOOPBACK,
                # — on GPUs, documents are read and committed beside the engines. Ray starts this
                # many workers at once, and the mailbox and Ray Data take two before an engine does
                num_cpus=1 + max(2, placement.actors * placement.threads),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
    except Exception as error:
        _kill(_processes_of_ray())  # those that have started
        if "AF_UNIX path length" in str(error):
            fix = "Ray's sockets need paths of at most 107 bytes; name a folder with a shorter path"
            raise SpecError([Problem("TMPDIR", fix, tempfile.gettempdir())]) from error
        if "timed out during startup" not in str(error):  # — Ray has no class for this
            raise
        message = "Ray did not start within its 30 s: the machine is busy; run again"
        raise UnavailableError(message) from error
    orphans: list[psutil.Process] = []
    try:
        with started:
            _close_to_others()
            try:
                yield
            finally:
                if stopped_services():  # Ray would wait for its answer without an end
                    _kill(_processes_of_ray())
                elif ended_services():  # the others would wait for it, for half a minute
                    orphans = _processes_of_ray()
    finally:
        _kill(orphans)


def _processes_of_ray() -> list[psutil.Process]:
    """The processes of the Ray that this process started, and of no other program."""
    processes = psutil.Process().children(recursive=True)
    return [each for each in processes if _name(each).startswith(_PROCESS_NAMES)]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _close_to_others() -> None:
    """Only this user may read the logs of the Ray that was started here."""
    node = ray._private.worker._global_node
    assert node is not None, "Ray has started"
    os.chmod(node.get_session_dir_path(), 0o700)


def ended_services() -> list[str]:
    """The processes of this process's own Ray that have ended, such as `gcs_server`."""
    node = ray._private.worker._global_node
    return [] if node is None else [str(name) for name, _ in node.dead_processes()]


def stopped_services() -> dict[int, str]:
    """The names of the processes of this process's own Ray that a signal has stopped, by their id.

    A stopped `raylet` or `gcs_server` answers nothing, and Ray waits for it without an end.
    """
    node = ray._private.worker._global_node
    live: list[tuple[int, str]]
    live = [] if node is None else [(each.pid, str(name)) for name, each in node.live_processes()]
    stopped = {}
    for pid, name in live:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                stopped[pid] = name
    return stopped


@contextmanager
def _without_services() -> Iterator[None]:
    """Ray starts no process in this block that a run on one machine has no use for.

    These are the autoscaler, the server of the dashboard, and the reader of the workers' logs. No
    option turns them off. On two cores they take two seconds of the start, and one of the end. A
    later version of Ray that names them otherwise starts them. Nor does Ray replace the loopback
    address, on which its processes then listen, by one that other machines reach.
    """
    replaced: dict[tuple[Any, str], Any] = {(Node, name): _nothing for name in _SERVICES}
    replaced[services, "resolve_ip_for_localhost"] = _unchanged
    own = {place: getattr(*place) for place in replaced if hasattr(*place)}
    for place in own:
        setattr(*place, replaced[place])
    try:
        yield
    finally:
        for place, function in own.items():
            setattr(*place, function)


def _nothing(*_arguments: object, **_named: object) -> None:
    """In the place of the start of a process."""


def _unchanged(host: str) -> str:
    return host


@contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Ray's start replaces the handler by one that exits with code 15 and prints a stack."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # — only the main thread may set a handler; in another, Ray sets none
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _import_graph() -> None:
    """Imports Ray Data, which a run without work does not need."""
    with quick_imports():
        importlib.import_module("pipeline.runtime.graph")


@contextmanager
def without_core_greeting() -> Iterator[None]:
    """Holds standard error back while Ray starts, and drops one line of it.

    Ray's core prints that it takes its log level from the environment; nothing turns that off.
    """
    sys.stderr.flush()
    error = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(error, 2)
            os.close(error)
            held.seek(0)
            lines = held.read().splitlines(keepends=True)
            os.write(2, b"".join(line for line in lines if b"RAY_BACKEND_LOG_LEVEL" not in line))
