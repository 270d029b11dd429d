"""The Ray that a run starts on one machine: few processes, all of which end with the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# One process has all tests that start Ray.
pytestmark = pytest.mark.xdist_group("ray")

PROBE = """
import json, sys, psutil, ray
from ray._private.node import Node
from pipeline.runtime.connection import local_ray
from pipeline.runtime.placement import Placement

own = Node.start_monitor, Node.start_api_server, Node.start_log_monitor
with local_ray(Placement("cpu", "float32", actors=1, threads=1)):
    answer = ray.get(ray.remote(lambda: 3).remote())
    graph = "pipeline.runtime.graph" in sys.modules
    family = psutil.Process().children(recursive=True)
    words = {word.strip().rpartition("/")[2] for each in family for word in each.cmdline()}
_, left = psutil.wait_procs(family, timeout=20)
restored = own == (Node.start_monitor, Node.start_api_server, Node.start_log_monitor)
print(json.dumps([answer, graph, sorted(words), len(left), restored]))
"""


def test_a_local_ray_has_no_process_that_a_run_does_not_use() -> None:
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    output = subprocess.check_output([sys.executable, "-c", PROBE], text=True, env=environment)
    answer, graph, words, left, restored = json.loads(output.splitlines()[-1])
    assert answer == 3
    assert graph, "Ray Data is imported while Ray starts"
    assert {"gcs_server", "raylet"} <= {*words}
    assert "ray::DashboardAgent" in words, "it exports the metrics"
    assert {"monitor.py", "dashboard.py", "log_monitor.py"}.isdisjoint(words)
    assert left == 0 and restored
