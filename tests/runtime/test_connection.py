"""The Ray that a run starts on one machine: few processes, all of which end with the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# One process has all tests that start Ray.
pytestmark = pytest.mark.xdist_group("ray")

PROBE = """
import json, sys, psutil, ray
from pathlib import Path
from ray._private.node import Node
from pipeline.runtime.connection import local_ray
from pipeline.runtime.placement import Placement

own = Node.start_monitor, Node.start_api_server, Node.start_log_monitor
with local_ray(Placement("cpu", "float32", actors=1, threads=1)):
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
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    output = subprocess.check_output([sys.executable, "-c", PROBE], text=True, env=environment)
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
    with connection.local_ray(Placement("cpu", "float32", actors=1, threads=1)):
        sys.exit(3)
except SpecError as error:
    sys.exit(str(error))
"""


def ended(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENDING],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", **environment},
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
