"""What a process may use: the least of affinity, quotas and memory limits of its cgroups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

from pipeline.runtime.limits import Gpus, available_bytes, usable_cores, usable_gpus

GIB = 1024**3
V1_CPU = "sys/fs/cgroup/cpu"
V2 = "sys/fs/cgroup"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    """A machine's root with these files."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def quota(microseconds: str) -> dict[str, str]:
    """The files of a cgroup of version 2 with this quota in each tenth of a second."""
    return {"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": f"{microseconds} 100000\n"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, 16, id="not Linux"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, 16, id="no limit file"),
        pytest.param(quota("max"), 16, id="v2, no quota"),
        pytest.param(quota("200000"), 2, id="v2 container"),
        pytest.param(quota("150000"), 1, id="v2, 1.5"),
        pytest.param(quota("9900000"), 16, id="v2, more than the affinity"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/user.slice/run-1.scope\n",
                f"{V2}/user.slice/cpu.max": "300000 100000\n",
                f"{V2}/user.slice/run-1.scope/cpu.max": "max 100000\n",
            },
            3,
            id="v2, the slice above has the quota",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:memory:/\n2:cpu,cpuacct:/job\n0::/\n",
                f"{V1_CPU}/cpu.cfs_quota_us": "-1\n",
                f"{V1_CPU}/cpu.cfs_period_us": "100000\n",
                f"{V1_CPU}/job/cpu.cfs_quota_us": "400000\n",
                f"{V1_CPU}/job/cpu.cfs_period_us": "100000\n",
            },
            4,
            id="v1, nested",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "1:cpu:/docker/abc\n",
                f"{V1_CPU}/cpu.cfs_quota_us": "200000\n",
                f"{V1_CPU}/cpu.cfs_period_us": "100000\n",
            },
            2,
            id="v1 container, which sees its own cgroup as the top",
        ),
    ],
)
def test_the_cores_are_the_least_of_affinity_and_quotas(
    files: Mapping[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    assert usable_cores(tree(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "free"),
    [
        pytest.param({"proc/self/cgroup": "0::/\n"}, 8 * GIB, id="no limit"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": f"{6 * GIB}\n",
                f"{V2}/memory.current": f"{5 * GIB}\n",
                f"{V2}/memory.stat": f"anon {2 * GIB}\nactive_file {GIB}\ninactive_file {GIB}\n",
            },
            3 * GIB,
            id="v2: cached files are not used memory",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/job/memory.stat": (
                    f"active_file 0\ninactive_file 0\n"
                    f"total_active_file {GIB}\ntotal_inactive_file 0\n"
                ),
            },
            2 * GIB,
            id="v1",
        ),
    ],
)
def test_the_memory_is_what_machine_and_cgroups_leave(
    files: Mapping[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = psutil.virtual_memory()._replace(available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert available_bytes(tree(tmp_path, files)) == free


@pytest.mark.parametrize(
    ("limit", "to", "call", "error"),
    [
        ("AS", 600 << 20, "main(['status', 'x.yaml'])", "ulimit -v: is too low; run `ulimit -v 20"),
        ("AS", 8 << 30, "check_ulimits(ULIMITS_OF_RAY)", "ulimit -v: is too low; run `ulimit -v 1"),
        ("NOFILE", 64, "check_ulimits(ULIMITS_OF_RAY)", "ulimit -n: is too low; run `ulimit -n 25"),
        ("FSIZE", 9, "check_ulimits(ULIMITS_OF_RAY)", "ulimit -f: is too low; run `ulimit -f "),
    ],
)
def test_a_limit_of_the_shell_that_is_too_low_is_named(
    limit: str, to: int, call: str, error: str
) -> None:
    """Libraries in C++ abort, and Ray crashes, or waits without an end."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_{limit}, ({to}, {to}))
from pipeline.cli import main
from pipeline.runtime.limits import ULIMITS_OF_RAY, check_ulimits
raise SystemExit({call})
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == (2 if "main" in call else 1)
    assert error in ended.stderr.splitlines()[-1]


def printed(*capabilities: tuple[int, int], cuda: str | None = "13.0") -> CompletedProcess[str]:
    """What a torch that sees GPUs of these capabilities prints."""
    answer = json.dumps(["2.13.0", cuda, capabilities])
    return CompletedProcess([], 0, f"a line of a library\n{answer}\n", "")


@pytest.mark.parametrize(
    ("answer", "gpus", "reason"),
    [
        (printed((9, 0)), Gpus(1, frozenset({"bfloat16", "fp8"})), ""),
        (printed((8, 9), (10, 0)), Gpus(2, frozenset({"bfloat16", "fp8"})), ""),
        (printed((8, 0), (8, 6)), Gpus(2, frozenset({"bfloat16"})), ""),
        (printed((9, 0), (7, 5)), Gpus(2), ""),
        (printed(cuda=None), Gpus(), "2.13.0 does not see: it is a build for CPUs"),
        (printed(), Gpus(), "2.13.0 does not see: its driver or CUDA_VISIBLE_DEVICES hides it"),
        (CompletedProcess([], 1, "", "a trace\nno driver"), Gpus(), "does not see: no driver"),
    ],
)
def test_torch_reports_which_gpus_can_be_used_and_one_that_it_does_not_see_is_one_warning(
    answer: CompletedProcess[str],
    gpus: Gpus,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    root = tree(tmp_path, {"dev/nvidia0": "", "dev/nvidiactl": ""})
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert usable_gpus(root) == gpus
    warning = f"{root}/dev/nvidia0 is a GPU that torch {reason}; the model runs on the CPU"
    assert caplog.messages == [warning] * bool(reason)


@pytest.mark.parametrize("hidden", ["", "-1", None])
def test_torch_is_not_asked_without_a_device_or_where_all_are_hidden(
    hidden: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        tree(tmp_path, {"dev/nvidia0": ""})
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("torch was asked"))
    assert usable_gpus(tmp_path) == Gpus()
    assert caplog.messages == []
