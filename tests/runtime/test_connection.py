"""The Ray that a run starts on one machine: few processes, all of which end with the run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import RefusedError, SpecError
from pipeline.runtime.connection import remote_ray, token_mode

# One process has all tests that start Ray.
pytestmark = pytest.mark.xdist_group("ray")

PROBE = """
import json, sys, psutil, ray
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from ray._private.node import Node
from pipeline.runtime.connection import local_ray
from pipeline.runtime.placement import Placement

own = Node.start_monitor, Node.start_api_server, Node.start_log_monitor
with local_ray([Placement("cpu", "float32", actors=1, threads=1)]):
    answer = ray.get(ray.remote(lambda: 3).remote())
    graph = "pipeline.runtime.graph" in sys.modules
    family = psutil.Process().children(recursive=True)
    all_of_run = [psutil.Process(), *family]
    words = {word.strip().rpartition("/")[2] for each in family for word in each.cmdline()}
    sockets = [socket for each in all_of_run for socket in each.net_connections("inet")]
    listening = [s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN]
    listening = {ip.removeprefix("::ffff:") for ip in listening}
    session = ray._private.worker._global_node.get_session_dir_path()
    mode = oct(Path(session).stat().st_mode & 0o777)
_, left = psutil.wait_procs(family, timeout=20)
restored = own == (Node.start_monitor, Node.start_api_server, Node.start_log_monitor)
print(json.dumps([answer, graph, sorted(words), sorted(listening), mode, len(left), restored]))
"""


def test_a_local_ray_has_no_process_that_a_run_does_not_use_and_is_closed_to_others() -> None:
    output = subprocess.check_output([sys.executable, "-c", PROBE], text=True)
    answer, graph, words, listening, mode, left, restored = json.loads(output.splitlines()[-1])
    assert answer == 3
    assert graph, "Ray Data is imported while Ray starts"
    assert {"gcs_server", "raylet"} <= {*words}
    assert "ray::DashboardAgent" in words, "it exports the metrics"
    assert {"monitor.py", "dashboard.py", "log_monitor.py"}.isdisjoint(words)
    assert left == 0 and restored
    assert listening == ["127.0.0.1"]
    assert mode == "0o700"


ENDING = """
import sys, threading
from pipeline.errors import SpecError
from pipeline.runtime import connection
from pipeline.runtime.placement import Placement

connection._import_graph = threading.Event().wait
try:
    with connection.local_ray([Placement("cpu", "float32", actors=1, threads=1)]):
        sys.exit(3)
except SpecError as error:
    sys.exit(str(error))
"""


def ended(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENDING],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_end_does_not_wait_for_an_import_that_hangs() -> None:
    assert ended().returncode == 3


def test_a_folder_whose_path_is_too_long_for_sockets_is_one_line(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 40)
    long.mkdir()
    process = ended(TMPDIR=str(long))
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("TMPDIR: Ray's sockets need paths of at most")


# Ray reads its environment when it is imported: here before everything else, without a token.
AFTER_THE_IMPORT = """
import ray, torch
import asyncio, json, os, subprocess, sys, threading
from pipeline.runtime.connection import local_ray
from pipeline.runtime.placement import Placement

CLIENT = "import sys, ray; print(len(ray._raylet.GcsClient(sys.argv[1]).get_all_node_info()))"
before = dict(os.environ)
answers = []

def start():
    with local_ray([Placement("cpu", "float32", actors=1, threads=1)]):
        address = ray.get_runtime_context().gcs_address
        stranger = {name: os.environ[name] for name in ("PATH", "HOME")}
        for environment in (None, stranger):
            client = subprocess.run(
                [sys.executable, "-c", CLIENT, address],
                env=environment, capture_output=True, text=True,
            )
            answers.append([client.stdout.strip(), "AuthenticationError" in client.stderr])
        mode = ray.remote(lambda: os.environ["RAY_AUTH_MODE"]).remote()
        answers.append(ray.get(mode))

async def in_a_loop():
    start()

start()
asyncio.run(in_a_loop())
thread = threading.Thread(target=start)
thread.start()
thread.join()
changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
of_ray = {"PYTHONBREAKPOINT", "RAY_CLIENT_MODE", "RAY_USAGE_STATS_ENABLED"}  # it sets these itself
print(json.dumps([answers, sorted(changed - of_ray)]))
"""


def without_a_token(home: Path, **changes: str) -> dict[str, str]:
    """The environment of a person who has never heard of Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "HOME": str(home), **changes}


def test_after_an_import_of_ray_in_a_loop_and_in_a_thread_only_this_process_has_the_token(
    tmp_path: Path,
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", AFTER_THE_IMPORT],
        env=without_a_token(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (process.returncode, process.stderr) == (0, "")
    answers, changed = json.loads(process.stdout)
    assert answers == [["1", False], ["", True], "token"] * 3
    assert changed == []
    assert not (tmp_path / ".ray").exists(), "the token is in no file"


PLAIN = """
from pipeline.runtime import connection
from pipeline.runtime.placement import Placement

connection._STARTS = (*connection._STARTS, "start_of_another_version")
with connection.local_ray([Placement("cpu", "float32", actors=1, threads=1)]):
    print(connection.ray.get(connection.ray.remote(lambda: 3).remote()))
"""


def test_without_a_private_name_ray_starts_plainly_and_says_so(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PLAIN],
        env=without_a_token(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.stdout == "3\n"
    (line,) = process.stderr.splitlines()
    assert "start_of_another_version is unknown; Ray starts plainly" in line
    assert not (tmp_path / ".ray").exists()


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
    ("place", "mode", "warned"),
    [("10.0.0.7:6379", "", 1), ("10.0.0.7:6379", "token", 0), ("127.0.0.1:6379", "", 0)],
)
def test_a_cluster_that_others_reach_without_a_token_is_named(
    place: str,
    mode: str,
    warned: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connected = SimpleNamespace(gcs_address=place)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.get_runtime_context", lambda: connected)
    monkeypatch.setattr("pipeline.runtime.connection.token_mode", nullcontext)
    monkeypatch.setattr("pipeline.runtime.connection._connect", nullcontext)
    monkeypatch.setattr("pipeline.runtime.connection.node_resources", list)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with remote_ray(place) as nodes:
        assert nodes == []
    line = (
        f"the Ray cluster at {place} asks for no token: whoever reaches it can run programs there"
    )
    assert [line in message for message in caplog.messages] == [True] * warned


def test_a_stale_address_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        stale = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", stale)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    # — it would end the token's mode of the Ray that the tests of this process share
    monkeypatch.setattr("pipeline.runtime.connection.token_mode", nullcontext)
    reason = rf"answers at auto \({stale}\).*; RAY_ADDRESS names it; unset the variable"
    with pytest.raises(RefusedError, match=reason), remote_ray("auto"):
        pass
