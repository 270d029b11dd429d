"""The Ray that a run starts on one machine: few processes, all of which end with the run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import RefusedError, SpecError
from pipeline.runtime.ray_token import token_mode
from pipeline.runtime.session import remote_ray
from pipeline.spec.parse import load_spec
from pipeline.verbs.run import judged_run

# One process has all tests that start Ray.
on_ray = pytest.mark.xdist_group("ray")

# Ray reads its environment when it is imported: here before everything else, without a token.
# Two of Ray's starts in one process: in the main thread; and in a thread, in a loop, while an
# import hangs.
PROBE = """
import ray, torch
import asyncio, json, os, subprocess, sys, tempfile, threading
from pathlib import Path
import psutil
from pipeline.errors import SpecError
from pipeline.runtime import session
from pipeline.runtime.placement import Placement

CLIENT = "import sys, ray; print(len(ray._raylet.GcsClient(sys.argv[1]).get_all_node_info()))"
variables, report = dict(os.environ), {"clients": []}

def local_ray():
    return session.local_ray(Placement("cpu", "float32", actors=1, threads=1))

def ask_as_others():
    address = ray.get_runtime_context().gcs_address
    variables = {name: os.environ[name] for name in ("PATH", "HOME")}
    for environment in (None, variables):
        command = [sys.executable, "-c", CLIENT, address]
        client = subprocess.run(command, env=environment, capture_output=True, text=True)
        refused = "AuthenticationError" in client.stderr
        report["clients"].append([client.stdout.strip(), refused])
    report["clients"].append(ray.get(ray.remote(lambda: os.environ["RAY_AUTH_MODE"]).remote()))

with local_ray():
    ask_as_others()
    report["graph"] = "pipeline.runtime.graph" in sys.modules
    family = psutil.Process().children(recursive=True)
    words = {word.strip().rpartition("/")[2] for each in family for word in each.cmdline()}
    report["words"] = sorted(words)
    processes = [psutil.Process(), *family]
    sockets = [socket for each in processes for socket in each.net_connections("inet")]
    listening = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
    report["listening"] = sorted({ip.removeprefix("::ffff:") for ip in listening})
    path = ray._private.worker._global_node.get_session_dir_path()
    report["mode"] = oct(Path(path).parents[1].stat().st_mode & 0o777)
report["removed"] = not Path(path).parent.exists()
report["left"] = len(psutil.wait_procs(family, timeout=20)[1])

async def in_a_loop():
    with local_ray():
        ask_as_others()

session._import_graph = threading.Event().wait
thread = threading.Thread(target=lambda: asyncio.run(in_a_loop()))
thread.start()
thread.join()
names = {*variables, *os.environ}
changed = {name for name in names if variables.get(name) != os.environ.get(name)}
of_ray = {"PYTHONBREAKPOINT", "RAY_CLIENT_MODE", "RAY_USAGE_STATS_ENABLED"}  # it sets these itself
report["changed"] = sorted(changed - of_ray)

os.environ["TMPDIR"] = tempfile.tempdir = sys.argv[1]
try:
    with local_ray():
        pass
except SpecError as error:
    report["long folder"] = str(error)
os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

print(json.dumps(report), flush=True)
sys.exit(3)
"""


@dataclass(frozen=True)
class Probed:
    """What the process of `PROBE` reported, and what it was seen to do."""

    report: dict[str, Any]
    errors: str
    exit_code: int
    home: Path


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Probed:
    """A process without any settings of Ray starts Ray several times."""
    home = tmp_path_factory.mktemp("home")
    long_folder = home / ("long" * 40)
    long_folder.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.run(
        [sys.executable, "-c", PROBE, str(long_folder)],
        env={**variables, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.stdout, process.stderr
    report = json.loads(process.stdout.splitlines()[-1])
    return Probed(report, process.stderr, process.returncode, home)


@on_ray
def test_a_local_ray_ends_with_all_its_processes_and_is_closed_to_others(probed: Probed) -> None:
    report = probed.report
    assert report["graph"], "Ray Data is imported while Ray starts"
    assert {"gcs_server", "raylet"} <= {*report["words"]}
    assert "ray::DashboardAgent" in report["words"], "it exports the metrics"
    assert {"monitor.py", "dashboard.py", "log_monitor.py"}.isdisjoint(report["words"])
    assert report["left"] == 0
    assert report["listening"] == ["127.0.0.1"]
    assert report["mode"] == "0o700" and report["removed"]


@on_ray
def test_after_an_import_of_ray_and_in_a_loop_of_a_thread_only_this_process_has_the_token(
    probed: Probed,
) -> None:
    assert probed.report["clients"] == [["1", False], ["", True], "token"] * 2
    assert probed.report["changed"] == []
    assert not (probed.home / ".ray").exists(), "the token is in no file"
    assert probed.errors == "", "nothing is printed"


@on_ray
def test_the_end_does_not_wait_for_an_import_that_hangs(probed: Probed) -> None:
    assert probed.exit_code == 3


@on_ray
def test_a_folder_whose_path_is_too_long_for_sockets_is_one_line(probed: Probed) -> None:
    (line,) = probed.report["long folder"].splitlines()
    assert line.startswith("TMPDIR: ")


@pytest.mark.parametrize(
    "variables, place, reason",
    [
        ({"RAY_AUTH_TOKEN": "short"}, "RAY_AUTH_TOKEN", "the token has 5 characters, and needs 16"),
        ({"RAY_AUTH_TOKEN": "ü" * 20}, "RAY_AUTH_TOKEN", "printable ASCII characters only"),
        ({"RAY_AUTH_TOKEN_PATH": "/none"}, "RAY_AUTH_TOKEN_PATH", "cannot be read"),
    ],
)
def test_a_token_that_ray_cannot_use_is_an_error_that_does_not_print_it(
    variables: dict[str, str], place: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecError) as raised, token_mode(starts=True):
        pass
    (problem,) = raised.value.problems
    assert problem.place == place and reason in problem.fix
    assert variables.get("RAY_AUTH_TOKEN", "-----") not in str(raised.value)


@pytest.mark.parametrize(
    ("address", "place", "mode", "insecure", "outcome"),
    [
        ("head:6379", "10.0.0.7:6379", "", False, "refused"),
        ("head:6379", "10.0.0.7:6379", "disabled", False, "refused"),
        ("head:6379", "10.0.0.7:6379", "", True, "accepted"),
        ("head:6379", "10.0.0.7:6379", "token", False, "accepted"),  # and it requires the token
        ("head:6379", "127.0.0.1:6379", "", False, "accepted"),
        ("auto", "10.0.0.7:6379", "", False, "named"),
    ],
)
def test_a_cluster_that_others_reach_without_a_token_is_refused_unless_the_risk_is_accepted(
    address: str,
    place: str,
    mode: str,
    insecure: bool,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connected = SimpleNamespace(gcs_address=place)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.get_runtime_context", lambda: connected)
    monkeypatch.setattr("pipeline.runtime.session.token_mode", nullcontext)
    monkeypatch.setattr("pipeline.runtime.session._connect", nullcontext)
    monkeypatch.setattr("pipeline.runtime.session.answers_without_token", lambda _: False)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    line = f"the Ray cluster at {place} requires no token, and anyone who reaches it can run"
    if outcome == "refused":
        refusal = pytest.raises(RefusedError, match=f"{line}.*--insecure-cluster")
        with refusal as raised, remote_ray(address, insecure=insecure):
            pass
        assert raised.value.exit_code == 4
    else:
        with remote_ray(address, insecure=insecure) as connected:
            assert connected
    assert [line in message for message in caplog.messages] == [True] * (outcome == "named")


def test_a_stale_address_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        stale = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", stale)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    # — it would end the token's mode of the Ray that the tests of this process share
    monkeypatch.setattr("pipeline.runtime.session.token_mode", nullcontext)
    reason = rf"answers at auto \({stale}\).*; RAY_ADDRESS names it; unset the variable"
    with pytest.raises(RefusedError, match=reason), remote_ray("auto"):
        pass


def test_a_run_with_relative_paths_is_refused_before_it_writes_or_connects(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = load_spec(write_spec(output="out"))
    spec = spec.model_copy(update={"output": "out"})
    text = "output: is a folder of this machine; write a URL, or a path that every node has"
    with pytest.raises(SpecError, match=text):
        judged_run(spec, cache_dir=tmp_path / "cache", address="10.0.0.7:6379")
    assert not (tmp_path / "out").exists()
