"""A run on a Ray of two nodes, of which the workers of one cannot load a model.

`python two_nodes.py SPEC`. In a process of its own, because pytest's would be the Ray's driver.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from pipeline.runtime.run import run
from pipeline.spec.parse import load_spec


def main(spec: Path) -> None:
    logging.basicConfig(level=logging.WARNING)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.add_node(num_cpus=2, env_vars={"ASSAY_FAULT": "loading=fail:"})
    made.add_node(num_cpus=2)
    made.wait_for_nodes()
    try:
        outcome = run(load_spec(spec), cache_dir=spec.parent / "cache", address=made.address)
        assert outcome.complete and outcome.snapshot == 1, outcome
    finally:
        ray.shutdown()
        made.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
