"""Machines on a network of this machine's own: namespaces of Linux, joined by a bridge.

Each machine has an address, processes and a small disk of its own, and no way beyond the bridge.
Entry point: `network`. Nothing here depends on Ray or on jobs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

_PROGRAMS = ("ip", "tc", "nsenter", "unshare", "mount")
# The first process of a machine, which mounts its disk, and takes in processes without a parent.
_FIRST = 'hostname "$1"; mount -t tmpfs -o "size=$2" disk "$3" && echo; while sleep 1; do :; done'


@dataclass(frozen=True)
class Machine:
    """One machine, until it fails."""

    name: str  # also of its cable's end at the bridge
    address: str
    disk: Path  # the same path on each machine, with other files
    first: psutil.Process  # all others end with it

    def command(self, *words: str) -> tuple[str, ...]:
        """The words as a command that runs on the machine."""
        enter = ("nsenter", "--net", "--mount", "--pid", "--uts", f"--target={self.first.pid}")
        return (*enter, "--", *words)

    def start(
        self, *words: str, environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Starts a command on the machine, and writes what it prints to the log."""
        command = self.command(*words)
        with log.open("ab") as out:
            return subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def processes(self) -> str:
        """A line with the command line of each process, as the process shows it."""
        command = self.command("ps", "-e", "-o", "args=")
        return subprocess.run(command, capture_output=True, text=True).stdout

    def unplug(self) -> None:
        """Cuts the machine off, without a message to the others."""
        _run("ip", "link", "set", self.name, "down")

    def plug(self) -> None:
        """Connects the machine again."""
        _run("ip", "link", "set", self.name, "up")

    @contextmanager
    def slow(self, rate: str) -> Iterator[None]:
        """In this block, the machine sends at most this rate, such as `80kbit`."""
        device = ("dev", "eth0", "root")
        shape = ("tbf", "rate", rate, "burst", "4kb", "limit", "10mb")
        _run("tc", "-n", self.name, "qdisc", "add", *device, *shape)
        yield
        _run("tc", "-n", self.name, "qdisc", "del", *device)

    def fill_disk(self) -> None:
        """Fills the disk to its last byte."""
        full = Path(f"/proc/{self.first.pid}/root{self.disk}/full")
        with suppress(OSError), full.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def fail(self) -> None:
        """Ends all processes at once; no connection is closed first, as without power."""
        self.unplug()
        _end(self.first)


@contextmanager
def network() -> Iterator[Callable[..., Machine]]:
    """Adds machines to a new network, by a name and the size of the disk, until the block ends."""
    lacking = [name for name in _PROGRAMS if shutil.which(name) is None]
    if lacking or os.geteuid():
        pytest.skip(f"machines of a network need root and {', '.join(lacking or _PROGRAMS)}")
    bridge = f"as{secrets.token_hex(2)}"
    subnet = f"198.18.{secrets.randbelow(256)}"  # of addresses for tests of networks (RFC 2544)
    with ExitStack() as stack:
        disk = Path(tempfile.mkdtemp(prefix="m"))  # — a socket's path has at most 107 characters
        stack.callback(disk.rmdir)
        try:
            _run("ip", "link", "add", bridge, "type", "bridge")
            stack.callback(_run, "ip", "link", "del", bridge)
            _run("ip", "address", "add", f"{subnet}.1/24", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
        except RuntimeError as error:
            pytest.skip(f"this system makes no bridge: {error}")
        machines: list[Machine] = []

        def add(name: str, disk_size: str = "1g") -> Machine:
            address = f"{subnet}.{len(machines) + 2}"
            made = _machine(f"{bridge}{name}", address, bridge, disk, disk_size)
            machines.append(stack.enter_context(made))
            return machines[-1]

        yield add


@contextmanager
def _machine(name: str, address: str, bridge: str, disk: Path, disk_size: str) -> Iterator[Machine]:
    with ExitStack() as stack:
        try:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
            cable = ("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0")
            _run(*cable, "netns", name)
            # — sockets that still wait for an answer would keep it for minutes
            stack.callback(_run, "ip", "link", "del", name)
            _run("ip", "link", "set", name, "master", bridge, "up")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        except RuntimeError as error:
            pytest.skip(f"this system makes no network namespace: {error}")
        own = ("unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc")
        shell = ("sh", "-c", _FIRST, "first", name, disk_size, str(disk))
        started = subprocess.Popen(
            ["ip", "netns", "exec", name, *own, *shell],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # — unshare warns of its own signals
            text=True,
        )
        stack.enter_context(started)  # which ends with its child
        assert started.stdout is not None
        if not started.stdout.readline():
            pytest.skip("this system makes no namespaces of mounts and processes")
        (first,) = psutil.Process(started.pid).children()
        stack.callback(_end, first)
        yield Machine(name, address, disk, first)


def _end(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _run(*words: str) -> None:
    """RuntimeError if the program fails."""
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)}: {ended.stderr.strip()}")
