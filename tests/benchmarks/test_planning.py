"""The driver's requests for many shards: counted on a made-up store, and with a worker on moto."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.planning import RUNS, measure

REPOSITORY = Path(__file__).parents[2]


def test_a_driver_reads_and_writes_as_often_for_twice_the_shards(
    model_folder: Path, tmp_path: Path
) -> None:
    needs: dict[int, dict[str, Counter[str]]] = {}
    for shards in (100, 200):
        folder = tmp_path / str(shards)
        folder.mkdir()
        needs[shards] = {run: measure(run, str(model_folder), folder, shards) for run in RUNS}
    few, many = needs.values()
    for run in RUNS:
        for kind in ("PUT", "HEAD", "GET", "LIST", "DELETE"):
            assert few[run][kind] == many[run][kind] > 0, (run, kind)
    assert many["first"]["bytes of snapshots"] > 0 == many["again"]["bytes of snapshots"]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_shard_of_two_tasks_has_three_files_and_two_markers(smollm2_gguf: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.requests", str(smollm2_gguf), "--shards"]
    done = subprocess.run(
        [*command, "10", "20"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    per_shard = dict(re.findall(r"^(\w[\w, ]*?) +(-?[\d.]+) for each", done.stdout, re.MULTILINE))
    assert per_shard["PUT"] == "5.00" and per_shard["DELETE"] == "2.00", done.stdout
    assert float(per_shard["messages, new"]) >= 5, done.stdout
