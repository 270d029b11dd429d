"""A run on a Ray of two nodes, of which the workers of one cannot load a model.

`python two_nodes.py SPEC [FOLDER]`: with a folder, the workers of one node are in it, and those of
the other node and the driver are in that of the spec, so `/proc/self/cwd/NAME` is two outputs. In a
process of its own, because pytest's would be the Ray's driver.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from pipeline.options import RunOptions
from pipeline.runtime.run import run
from pipeline.spec.parse import load_spec


def main(spec: Path, folder: Path | None = None) -> None:
    logging.basicConfig(level=logging.WARNING)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    if folder is None:
        made.add_node(num_cpus=2, env_vars={"ASSAY_FAULT": "loading=fail:"})
    else:
        os.chdir(folder)
        made.add_node(num_cpus=2)
        os.chdir(spec.parent)
    made.add_node(num_cpus=2)
    made.wait_for_nodes()
    try:
        # — it has no token, and listens where other machines may reach it
        options = RunOptions(insecure_cluster=True)
        outcome = run(
            load_spec(spec),
            cache_dir=spec.parent / "cache",
            address=made.address,
            options=options,
        )
        assert outcome.complete and outcome.snapshot == 1, outcome
    finally:
        ray.shutdown()
        made.shutdown()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
