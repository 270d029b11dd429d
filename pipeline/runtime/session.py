"""The Ray that a run uses: this process's own, a cluster's, or a new one on this machine.

Entry points: `remote_ray` and `local_ray`. Of Ray's private names those are used that start
services which a run on one machine leaves out, and that choose the address on which Ray listens.
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
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError

from pipeline.errors import (
    Option,
    Problem,
    RefusedError,
    SpecError,
    StalledError,
    UnavailableError,
    option_error,
)
from pipeline.runtime.imports import PASSIVE, quick_imports
from pipeline.runtime.limits import ULIMITS_OF_RAY, check_ulimits
from pipeline.runtime.placement import Machine, Placement, cluster, processor_formats
from pipeline.runtime.ray_token import (
    answers_without_token,
    refused_token,
    refuses_token,
    token_mode,
    variables,
)
from pipeline.spec.portable import is_loopback
from pipeline.stores.local import own_folder

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
MACHINE_S = 600.0  # for a machine that an autoscaler starts
NODE_ID = "ray.io/node-id"  # the label of every node
LOOPBACK = "127.0.0.1"
# What the processes of a Ray read from their environment.
_FOR_PROCESSES = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    # Ray starts workers at nice level 15: beside one busy process on two cores, two engines keep
    # 48 % of their speed there, and 67 % at the level of this process.
    "RAY_worker_niceness": "0",
    # By default as many workers as cores start together; the engine would be the third of three.
    "RAY_worker_maximum_startup_concurrency": "4",
    # Ray Data would start an actor and a thread to count its own use.
    "RAY_DATA_USAGE_DISABLED": "1",
}
# They start the autoscaler, the server of the dashboard and the reader of the workers' logs, for
# which a run on one machine has no use. No option turns them off, and on two cores they double the
# five seconds of the start.
_STARTS = ("start_monitor", "start_api_server", "start_log_monitor")
_SERVICES = ("gcs_server", "raylet")  # without one of these, a Ray answers nothing
_OF_RAY = ("ray::", *_SERVICES)


@contextmanager
def remote_ray(address: str | None, *, insecure: bool = False) -> Iterator[bool]:
    """Whether this process is connected to a Ray in the block: to that at `address`, or before.

    RefusedError for a cluster that accepts anyone, unless `insecure` allows that.
    """
    if address is None:
        yield ray.is_initialized()
        return
    if address.startswith("ray://"):
        fix = (
            "Ray Data does not run through Ray's client; write http://HEAD:8265 to submit the run, "
            "or run it on a node of the cluster with auto"
        )
        raise option_error("address", fix, address)
    if ray.is_initialized():
        fix = (
            "this process is connected to a Ray already, which the run uses; leave the address out"
        )
        raise option_error("address", fix, address)
    with token_mode(), variables(_FOR_PROCESSES), _connect(address):
        _refuse_open(address, insecure=insecure)
        yield True


def cluster_machine(device: str) -> Machine:
    """The hardware of the connected cluster. Each node is asked what its processors can do.

    Where no node has what the device needs, one is requested, which an autoscaler starts. A node
    that cannot run even this is named, and left out. UnavailableError if no node answers.
    """
    resource = "GPU" if device == "cuda" else "CPU"
    ask = ray.remote(num_cpus=0)(processor_formats)
    try:
        if grows := not nodes_with(resource):
            needs = {"num_gpus": 1} if resource == "GPU" else {"num_cpus": 1}
            ray.get(ask.options(**needs).remote(), timeout=MACHINE_S)
        nodes = {node["NodeID"]: node for node in nodes_with("CPU", "GPU")}
        asked = {id: ask.options(label_selector={NODE_ID: id}).remote() for id in nodes}
        answers = _answers(asked, nodes)
    except (GetTimeoutError, RayError) as error:
        reason = f"no node of the cluster with a {resource} answers: {error}; run again, or write "
        raise UnavailableError(f"{reason}another device into the spec") from error
    common = frozenset.intersection(*answers.values())
    if others := frozenset.union(*answers.values()) - common:
        words = "the nodes' processors differ: not all have %s at speed, so CPUs compute in %s"
        fastest = "bfloat16" if "bfloat16" in common else "float32"
        logger.warning(words, " and ".join(sorted(others)), fastest)
    machine = cluster([nodes[id]["Resources"] for id in answers], cpu_formats=common)
    return replace(machine, grows=grows, unable=frozenset(asked.keys() - answers.keys()))


def _answers(asked: Mapping[str, Any], nodes: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """By the id of a node, its answer; the error of the last node if none answers."""
    answers: dict[str, frozenset[str]] = {}
    deadline = time.monotonic() + MACHINE_S
    for id, answer in asked.items():
        try:
            answers[id] = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
        except RayError as error:
            address, reason = nodes[id]["NodeManagerAddress"], str(error).partition("\n")[0]
            text = "node %s cannot run a worker (%s); it is left out: look at its disk and memory"
            logger.warning(text, address, reason)
            last = error
    if not answers:
        raise last
    return answers


def nodes_with(*resources: str) -> list[Any]:
    """The alive nodes of the cluster that have one or more of some of the resources."""
    nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
    alive = [node for node in nodes if node["Alive"]]
    return [node for node in alive if any(node["Resources"].get(r, 0) >= 1 for r in resources)]


def elsewhere(nodes: Set[str]) -> dict[str, Any]:
    """Ray's arguments of what runs on none of these nodes."""
    return {"label_selector": {NODE_ID: f"!in({','.join(sorted(nodes))})"}} if nodes else {}


def _refuse_open(address: str, *, insecure: bool) -> None:
    """RefusedError for a connected cluster that accepts a process without a token, and so anyone.

    Of `auto`, a warning: this process runs on one of the cluster's machines. A process with a token
    is refused in any case, because it refuses the cluster's own requests, which have none.
    """
    place = ray.get_runtime_context().gcs_address
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        if answers_without_token(place):
            text = f"the Ray cluster at {place} requires no token, and no worker starts there for "
            text += "a process that has one; set RAY_AUTH_MODE=disabled, or start it with "
            raise RefusedError(Problem(Option("address"), f"{text}RAY_AUTH_MODE=token"))
        return
    if insecure or is_loopback(f"//{place}"):
        return
    text = f"the Ray cluster at {place} requires no token, and anyone who reaches it can run "
    text += "programs there; start it with RAY_AUTH_MODE=token, or accept the risk with "
    text += "--insecure-cluster"
    if address != "auto":
        raise RefusedError(Problem(Option("address"), text))
    logger.warning("%s", text)


def _connect(address: str) -> Any:
    """A context manager that ends the connection; RefusedError if no cluster accepts it."""
    # — Ray uses this for `auto`, even after the cluster has ended
    place = os.environ.get("RAY_ADDRESS") if address == "auto" else address
    named = address if place in (None, address) else f"{address} ({place})"
    try:
        if place:
            _check_listening(place)
        return _init(address=address, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        if refuses_token(error):
            raise refused_token(named) from error
        fix = "correct the address, or start a cluster with `ray start --head`"
        if address == "auto" and place:
            fix = "RAY_ADDRESS names it; unset the variable, or correct it"
        reason = f"no Ray cluster answers at {named}: {error}; {fix}"
        raise RefusedError(Problem(Option("address"), reason)) from error


def _check_listening(address: str) -> None:
    """OSError if nothing listens at `host:port`: Ray would try to connect for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


@contextmanager
def local_ray(placement: Placement) -> Iterator[None]:
    """The Ray that this process is connected to, or a new one for it that ends with the run."""
    if ray.is_initialized():
        yield
        return
    check_ulimits(ULIMITS_OF_RAY)
    # — Ray waits for its processes meanwhile, for seconds. The end does not wait for the import: an
    # import of this thread that Ctrl-C ended may keep a lock
    threading.Thread(target=_import_graph, name="import", daemon=True).start()
    passive = PASSIVE if PASSIVE.keys().isdisjoint(os.environ) else {}
    with own_folder() as folder, token_mode(starts=True), variables(_FOR_PROCESSES | passive):
        # — documents are committed beside the engines. Ray starts this many workers at once, and
        # the mailbox and Ray Data take two before an engine does
        started = _start(
            num_cpus=1 + max(2, placement.cores),
            # — by its own count Ray misses what torch sees, such as MIG devices
            num_gpus=placement.actors * placement.gpus,
            folder=str(folder),
        )
        with started, _ended_with_services():
            yield


def _start(*, num_cpus: int, num_gpus: int, folder: str) -> Any:
    """A context manager that ends the Ray that it has started; an AssayError in one line."""
    unused: dict[str, Any] = {name: lambda *_, **__: None for name in _STARTS}
    try:
        with (
            patch.multiple("ray._private.node.Node", create=True, **unused),
            # — Ray would replace the address by one that other machines reach, and listen there
            patch("ray._private.services.resolve_ip_for_localhost", lambda host: host),
        ):
            return _init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                _node_ip_address=LOOPBACK,
                _temp_dir=folder,
                # — in a thread, Ray warns that it sets no handler of SIGTERM; none is needed
                logging_level=logging.ERROR,
            )
    except Exception as error:
        _kill_ray()  # the processes that have started
        if "AF_UNIX path length" in str(error):
            fix = "Ray's sockets need paths of at most 107 bytes; name a folder with a shorter path"
            raise SpecError([Problem("TMPDIR", fix, tempfile.gettempdir())]) from error
        if "timed out during startup" not in str(error):  # — Ray has no class for this
            raise
        message = "Ray did not start within its 30 s: the machine is busy; run again"
        raise UnavailableError(message) from error


def _init(**options: Any) -> Any:
    """`ray.init`, which replaces the handler of SIGTERM by one that prints a stack."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _no_greeting():
            return ray.init(log_to_driver=False, **options)
    finally:
        # — only the main thread may set a handler; in another, Ray sets none
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _no_greeting() -> Iterator[None]:
    """Drops what Ray's core prints before it reads that only fatal errors are asked for."""
    sys.stderr.flush()
    error = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(error, 2)
            os.close(error)


@contextmanager
def _ended_with_services() -> Iterator[None]:
    """Ends this process when a service of its Ray ends, as Ray does a minute later."""
    # — psutil keeps a name that it has read
    services = {each.name(): each for each in _processes_of_ray() if each.name() in _SERVICES}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(1.0):
            if ended := [name for name, each in services.items() if not _runs(each)]:
                reason = "the system may have killed it for its memory"
                advice = "run the same command again: finished shards are kept"
                logger.error("Ray's %s has ended (%s); %s", ended[0], reason, advice)
                _kill_ray()
                os._exit(StalledError.exit_code)

    threading.Thread(target=watch, name="services", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _import_graph() -> None:
    """Imports Ray Data, which a run without work does not need."""
    with quick_imports():
        importlib.import_module("pipeline.runtime.graph")


def _processes_of_ray() -> list[psutil.Process]:
    """The processes of the Ray that this process started, and of no other program."""
    running = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(_OF_RAY):
                running.append(process)
    return running


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill_ray() -> None:
    for process in _processes_of_ray():
        with suppress(psutil.NoSuchProcess):
            process.kill()
