"""What this process may use of its machine.

Entry points: `usable_cores`, `available_bytes`, `usable_gpus` and `check_ulimits`. Must not import
torch: the driver decides where a model runs without loading one.

A container, a systemd unit or a batch system limits a process by its control groups (cgroups),
which neither `os.cpu_count` nor psutil reads. A process has a cgroup of each controller in version
1, and one cgroup in version 2. The limits of all cgroups above it hold as well.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from pipeline.errors import Problem, SpecError

logger = logging.getLogger(__name__)

ROOT = Path("/")
# The least that a command needs, and Ray: the option of `ulimit`, the limit, bytes or files, and
# the unit of `ulimit`. Below it, libraries in C++ abort, and Ray crashes or never starts.
ULIMITS = (("-v", resource.RLIMIT_AS, 2 * 2**30, 1024),)
ULIMITS_OF_RAY = (
    ("-n", resource.RLIMIT_NOFILE, 256, 1),
    ("-v", resource.RLIMIT_AS, 16 * 2**30, 1024),
    # — the file of Ray's shared memory, which has 30 % of the machine's
    ("-f", resource.RLIMIT_FSIZE, psutil.virtual_memory().total * 4 // 10, 1024),
)
# The first compute capability with products of a number format: Ampere and Ada.
_FIRST_CAPABILITY = {"bfloat16": (8, 0), "fp8": (8, 9)}
# torch applies CUDA_VISIBLE_DEVICES, MIG devices and the limits of a container.
_ASK_TORCH = """
import json, torch
capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, torch.version.cuda, capabilities]))
"""
_ASK_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one machine on which torch can compute."""

    count: int = 0
    formats: frozenset[str] = frozenset()  # bfloat16 and fp8, in which all of them multiply


def usable_cores(root: Path = ROOT) -> int:
    """The whole cores that this process may use: the least of its affinity and its CPU quotas.

    A quota of 1.5 cores is one: a second busy thread would be stopped for half of the time.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    return max(1, int(min([cores, *map(_quota, _cgroups(root, "cpu"))])))


def available_bytes(root: Path = ROOT) -> int:
    """The memory that this process can still use without swapping, also within its cgroups."""
    free = map(_free_bytes, _cgroups(root, "memory"))
    return max(0, int(min([psutil.virtual_memory().available, *free])))


def check_ulimits(ulimits: Sequence[tuple[str, int, int, int]]) -> None:
    """SpecError for each of these limits that is lower in this process."""
    problems = []
    for option, limit, least, unit in ulimits:
        now, _ = resource.getrlimit(limit)
        if now != resource.RLIM_INFINITY and now < least:
            fix = f"is too low; run `ulimit {option} {least // unit}` before, or more"
            problems.append(Problem(f"ulimit {option}", fix, now // unit))
    if problems:
        raise SpecError(problems)


@cache
def usable_gpus(root: Path = ROOT) -> Gpus:
    """The GPUs that torch sees here; a new process asks it once, and only where there is a device.

    A device that torch does not see, for example with a build for CPUs, is a logged warning.
    """
    devices = sorted((root / "dev").glob("nvidia[0-9]*")) or list((root / "dev").glob("dxg"))
    if not devices or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Gpus()
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        answer = subprocess.CompletedProcess(command, 1, "", f"no answer in {_ASK_TIMEOUT_S} s")
    if answer.returncode:
        version, reason = "", (answer.stderr.strip().splitlines() or ["it fails"])[-1]
        capabilities: list[list[int]] = []
    else:
        version, cuda, capabilities = json.loads(answer.stdout.splitlines()[-1])
        reason = "its driver or CUDA_VISIBLE_DEVICES hides it" if cuda else "it is a build for CPUs"
    if not capabilities:
        logger.warning(
            "%s is a GPU that torch %sdoes not see: %s; the model runs on the CPU",
            *(devices[0], version and f"{version} ", reason),
        )
    least = min(map(tuple, capabilities), default=())
    formats = (name for name, first in _FIRST_CAPABILITY.items() if least >= first)
    return Gpus(len(capabilities), frozenset(formats))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the process's cgroups for a controller, and of all cgroups above them.

    Inside a container, the folder of the container's own cgroup is the top.
    """
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            tops = [root / "sys/fs/cgroup" / controller]
        elif not controllers:  # version 2, alone or beside version 1
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for top in tops:
            yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _quota(cgroup: Path) -> float:
    """The cores of a cgroup's quota; infinite without one."""
    if (v2 := cgroup / "cpu.max").is_file():
        quota, period = v2.read_text().split()
    elif (v1 := cgroup / "cpu.cfs_quota_us").is_file():
        quota, period = v1.read_text(), (cgroup / "cpu.cfs_period_us").read_text()
    else:
        return float("inf")
    unlimited = quota.strip() in ("max", "-1")
    return float("inf") if unlimited else int(quota) / int(period)


def _free_bytes(cgroup: Path) -> float:
    """The bytes up to a cgroup's limit; infinite without one. Cached files do not count as used."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        if not (cgroup / limit).is_file() or (cgroup / limit).read_text().strip() == "max":
            continue
        lines = (cgroup / "memory.stat").read_text().splitlines()
        counts = {name: int(count) for name, count in map(str.split, lines)}
        # — version 1 counts its children only in the names with `total_`
        cached = sum(
            counts.get(f"total_{name}", counts.get(name, 0))
            for name in ("active_file", "inactive_file")
        )
        limit_bytes, used_bytes = (int((cgroup / name).read_text()) for name in (limit, usage))
        return limit_bytes - (used_bytes - cached)
    return float("inf")
