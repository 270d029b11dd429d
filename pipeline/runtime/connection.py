"""The Ray that a run uses: this process's own, a cluster's, or a new one on this machine.

Entry points: `remote_ray` and `local_ray` for a run, `token_mode` for Ray's other clients. Only
this module uses Ray's private names. A version of Ray that lacks one is used without it.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import AuthenticationError, RayError
from ray.util.client import ray as client

from pipeline.errors import (
    Option,
    Problem,
    RefusedError,
    SpecError,
    UnavailableError,
    option_error,
)
from pipeline.runtime.imports import PASSIVE, quick_imports
from pipeline.runtime.limits import ULIMITS_OF_RAY, check_ulimits
from pipeline.runtime.placement import Placement, Resources, nodes_at_largest
from pipeline.runtime.ray_processes import kill_all, own_folder, own_services, processes_of_ray
from pipeline.spec.portable import is_loopback

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
LOOPBACK = "127.0.0.1"
MIN_TOKEN_CHARACTERS = 16
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
# Functions of Ray that `local_ray` replaces: they start the autoscaler, the server of the dashboard
# and the reader of the workers' logs, for which a run on one machine has no use. No option turns
# them off. On two cores they take two seconds of the start, and one of the end.
_STARTS = ("start_monitor", "start_api_server", "start_log_monitor")
# This one replaces the loopback address, on which Ray's processes are to listen, by one that other
# machines reach.
_RESOLVE = "resolve_ip_for_localhost"
# A line of the log of Ray's core: [2026-11-25 10:18:02,731 W 14513 14513] gcs_client.cc:210: ...
_OF_CORE = re.compile(rb"\[[\d:, -]*[DIWE] \d+( \d+)?\] |.*RAY_BACKEND_LOG_LEVEL")


@contextmanager
def remote_ray(address: str | None, *, insecure: bool = False) -> Iterator[list[Resources]]:
    """The resources of the nodes of the cluster at `address`; without an address, of the Ray that
    this process is connected to, or none. RefusedError for a cluster that accepts anyone.
    """
    if address is None:
        yield node_resources() if ray.is_initialized() else []
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
    with token_mode(), _variables(_FOR_PROCESSES), _connect(address):
        if not insecure:
            _refuse_open(address)
        yield node_resources()


def _refuse_open(address: str) -> None:
    """RefusedError for a cluster that accepted this process without a token, and so anyone.

    Of `auto`, a warning: this process runs on one of the cluster's machines.
    """
    place = ray.get_runtime_context().gcs_address
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" or is_loopback(f"//{place}"):
        return
    text = f"the Ray cluster at {place} asks for no token, and whoever reaches it can run programs "
    text += "there; start it with RAY_AUTH_MODE=token, or accept the risk with --insecure-cluster"
    if address != "auto":
        raise RefusedError(Problem(Option("address"), text))
    logger.warning("%s", text)


def _connect(address: str) -> Any:
    """A context manager that ends the connection; RefusedError if no cluster accepts it."""
    # — Ray uses these for `auto`, even after the cluster has ended
    place: str | None = address
    if address == "auto" and not (place := os.environ.get("RAY_ADDRESS")):
        # — that of the cluster that was started last on this machine, as Ray has noted it
        read = _private("_private.services:get_ray_address_from_environment")
        place = read("auto", None) if read else None
    named = address if place in (None, address) else f"{address} ({place})"
    try:
        if place:
            _check_listening(place)
        with without_core_greeting(), _sigterm_handler_kept():
            check_token = _private("_raylet:GcsClient")
            if place and check_token:
                check_token(place)  # — a wrong token fails here at once, and below in 20 s
            return ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RayError) as error:
        if _refuses_token(error):
            raise refused_token(named) from error
        fix = "correct the address, or start a cluster with `ray start --head`"
        if address == "auto" and place == os.environ.get("RAY_ADDRESS"):
            fix = "RAY_ADDRESS names it; unset the variable, or correct it"
        reason = f"no Ray cluster answers at {named}: {error}; {fix}"
        raise RefusedError(Problem(Option("address"), reason)) from error


def refused_token(address: str) -> RefusedError:
    """The error of a cluster that asks for a token and got another one, or none."""
    fix = f"{address} refuses the token, or got none; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to "
    return RefusedError(Problem(Option("address"), f"{fix}the cluster's own"))


def _refuses_token(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, AuthenticationError) or "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _check_listening(address: str) -> None:
    """OSError if nothing listens at `host:port`: Ray would try to connect for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def node_resources() -> list[Resources]:
    """The resources of each node of the connected cluster, with those that it may still start."""
    alive = [
        dict(node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    state = _private("_private.state:state")
    # — through Ray's client (ray://) only the head can read the autoscaler's configuration
    if state is None or client.is_connected():  # type: ignore[no-untyped-call]
        return alive
    config = state.get_cluster_config()  # None for a cluster that does not scale
    groups = [] if config is None else config.node_group_configs
    promised = [(dict(group.resources), int(group.max_count)) for group in groups]
    return nodes_at_largest(alive, promised)


def is_alive(actor_id: str, pid: int) -> bool:
    """Whether this process of the actor runs, or is stopped, as far as Ray knows."""
    state = _private("_private.state:state")
    if state is None:
        return True
    actor = state.actor_table(actor_id)
    return bool(actor) and (actor["State"], actor["Pid"]) == ("ALIVE", pid)


@contextmanager
def local_ray(placements: Sequence[Placement]) -> Iterator[None]:
    """The Ray that this process is connected to, or a new one that ends with the run.

    A new one has room for each of the placements, one at a time.
    """
    if ray.is_initialized():
        yield
        return
    check_ulimits(ULIMITS_OF_RAY)
    # — Ray waits for its processes meanwhile, for seconds. The end does not wait for the import: an
    # import of this thread that Ctrl-C ended may keep a lock
    threading.Thread(target=_import_graph, name="import", daemon=True).start()
    passive = PASSIVE if PASSIVE.keys().isdisjoint(os.environ) else {}
    with own_folder() as folder, token_mode(starts=True), _variables(_FOR_PROCESSES | passive):
        # — on GPUs, documents are read and committed beside the engines. Ray starts this many
        # workers at once, and the mailbox and Ray Data take two before an engine does
        started = _start(
            num_cpus=1 + max(2, *(placement.cores for placement in placements)),
            # — by its own count Ray misses what torch sees, such as MIG devices
            num_gpus=max(placement.actors * placement.gpus for placement in placements),
            folder=str(folder),
        )
        services, orphans = own_services(), list[psutil.Process]()
        try:
            with started:
                try:
                    yield
                finally:
                    if services.stopped:  # Ray would wait for its answer without an end
                        kill_all(processes_of_ray())
                    elif services.ended:  # the others would wait for it, for half a minute
                        orphans = processes_of_ray()
        finally:
            kill_all(orphans)


def _start(*, num_cpus: int, num_gpus: int, folder: str) -> Any:
    """A context manager that ends the Ray that it has started; an AssayError in one line."""
    try:
        with without_core_greeting(), _sigterm_handler_kept(), _replaced() as listening:
            return ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                _temp_dir=folder,
                log_to_driver=False,
                # — in a thread Ray warns that it sets no handler of SIGTERM, which nobody wants
                logging_level=logging.ERROR,
                **listening,
            )
    except Exception as error:
        kill_all(processes_of_ray())  # those that have started
        if "AF_UNIX path length" in str(error):
            fix = "Ray's sockets need paths of at most 107 bytes; name a folder with a shorter path"
            raise SpecError([Problem("TMPDIR", fix, tempfile.gettempdir())]) from error
        if "timed out during startup" not in str(error):  # — Ray has no class for this
            raise
        message = "Ray did not start within its 30 s: the machine is busy; run again"
        raise UnavailableError(message) from error


@contextmanager
def token_mode(*, starts: bool = False) -> Iterator[None]:
    """In this block, Ray in this process and in new ones uses a token, where there is one.

    The token is that of `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH` or `~/.ray/auth_token`, as in Ray.
    A Ray that this process starts gets a random one that is in no file, unless a variable has one.
    `RAY_AUTH_MODE=disabled` asks for no token.

    SpecError for a token that Ray cannot use.
    """
    mode = os.environ.get("RAY_AUTH_MODE") or "token"
    own = _token_variables(starts=starts) if mode.lower() == "token" else {}
    if os.environ.get("RAY_AUTH_MODE"):
        os.environ.update(own)  # — what the process asked for stays, with its token
        own = {}
    try:
        with _variables(own):
            _read_variables_again()
            yield
    finally:
        _read_variables_again()


def _token_variables(*, starts: bool) -> dict[str, str]:
    """The variables with which Ray uses a token; none where there is no token."""
    in_mode = {"RAY_AUTH_MODE": "token"}
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        _check_token("RAY_AUTH_TOKEN", token, starts=starts)
        return in_mode
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        try:
            token = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            fix = f"cannot be read ({error}); write a token to it, or unset the variable"
            raise SpecError([Problem("RAY_AUTH_TOKEN_PATH", fix, path)]) from error
        _check_token("RAY_AUTH_TOKEN_PATH", token, starts=starts)
        return in_mode
    has_file = (Path.home() / ".ray/auth_token").is_file()
    if starts and not (has_file and os.environ.get("RAY_AUTH_MODE")):
        return {**in_mode, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return in_mode if has_file else {}


def _check_token(place: str, token: str, *, starts: bool) -> None:
    """SpecError if the token cannot be sent, or is too short for a Ray that starts here."""
    if not (token.isascii() and token.isprintable()):
        raise SpecError([Problem(place, "the token may have printable ASCII characters only")])
    if starts and len(token) < MIN_TOKEN_CHARACTERS:
        fix = f"the token has {len(token)} characters, and needs {MIN_TOKEN_CHARACTERS}; unset the "
        raise SpecError([Problem(place, f"{fix}variable to get a random one")])


def _read_variables_again() -> None:
    """Lets Ray's core read its environment again: it does so once, when it is imported."""
    config, loader = _private("_raylet:Config"), _private("_raylet:AuthenticationTokenLoader")
    if config and loader:
        # — in this order: a thread of Ray that still asks for the token ends the process if the
        # mode asks for one and there is none
        config.initialize("")
        loader.instance().reset_cache()


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets the environment variables that have no value, until the block ends."""
    own = {name: value for name, value in values.items() if not os.environ.get(name)}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


@contextmanager
def _replaced() -> Iterator[dict[str, Any]]:
    """Replaces functions of Ray for a run on one machine; the options that go with that.

    Where this version of Ray lacks one of them, none is replaced, and Ray starts plainly.
    """
    node, services = _private("_private.node:Node"), _private("_private.services")
    places: dict[tuple[Any, str], Any] = {(node, name): lambda *_, **__: None for name in _STARTS}
    places[services, _RESOLVE] = lambda host: host
    if lacking := [name for owner, name in places if not hasattr(owner, name)]:
        logger.warning("%s: %s is unknown; Ray starts plainly", _version(), ", ".join(lacking))
        yield {}
        return
    own = {place: getattr(*place) for place in places}
    for place, replacement in places.items():
        setattr(*place, replacement)
    try:
        # — with this address Ray's processes listen on the loopback interface alone
        yield {"_node_ip_address": LOOPBACK}
    finally:
        for place, function in own.items():
            setattr(*place, function)


def _private(name: str) -> Any:
    """What `module:name` below `ray` is; None, and a warning, where this version lacks it."""
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(f"ray.{module}")
        return getattr(imported, attribute) if attribute else imported
    except (ImportError, AttributeError):
        logger.warning("%s: ray.%s is unknown; the run goes on without it", _version(), name)
        return None


def _version() -> str:
    return f"Ray {ray.__version__}, which assay was not tested with"


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
    """Holds standard error back while Ray starts, and drops the lines of its core's log.

    Only fatal errors are asked for, but the core prints others before it reads that, and a line
    that says where it read it.
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
            os.write(2, b"".join(line for line in lines if not _OF_CORE.match(line)))
