"""The nodes that a cluster may have, though none of them is there yet.

Knows what Ray's autoscaler says of itself. Knows nothing of models or placements. A cluster whose
workers come with the work has a head alone when a run begins: planned for that, it would label on
the head's kind of processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray._private.state import state
from ray.util.client import ray as client

Resources = dict[str, float]


def node_resources() -> list[Resources]:
    """The resources of each node that the connected cluster has, or may have at its largest."""
    alive = [
        dict(node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    # — through Ray's client (ray://) nobody but the head can ask it
    through_client: bool = client.is_connected()  # type: ignore[no-untyped-call]
    # — None where nothing scales
    config: Any = None if through_client else state.get_cluster_config()
    groups = [] if config is None else config.node_group_configs
    promised = [(dict(group.resources), int(group.max_count)) for group in groups]
    return at_largest(alive, promised)


def at_largest(
    alive: Sequence[Resources], promised: Sequence[tuple[Resources, int]]
) -> list[Resources]:
    """The nodes that are there, and of each promised kind as many more as there may be.

    A kind is told by its CPUs and GPUs; one without a limit (-1) is counted on for one node.
    """
    nodes = list(alive)
    for resources, most in promised:
        there = sum(_kind(node) == _kind(resources) for node in alive)
        wanted = 1 if most < 0 else most
        nodes += [resources] * max(0, wanted - there)
    return nodes


def _kind(resources: Resources) -> tuple[float, float]:
    return resources.get("CPU", 0), resources.get("GPU", 0)
