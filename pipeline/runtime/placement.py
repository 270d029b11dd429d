"""Where the labelling actors run: device, number of actors, number format. Entry point: `place`.

Must not import torch: the driver decides this without a model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Problem, SpecError
from pipeline.spec.schema import ModelSpec

Resources = dict[str, float]  # of one Ray node, by name

# Flags of processors with native bfloat16 matrix multiplication. Others compute it at about a
# hundredth of the rate of float32.
_CPU_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one machine, or of the nodes of a cluster."""

    gpus: tuple[int, ...]  # the number of each node that has GPUs
    cpus: int  # of the smallest node
    nodes: int = 1
    cpu_flags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """How one labelling actor runs, and the largest number of actors."""

    device: str  # cpu | cuda
    dtype: str  # a torch dtype's name
    actors: int
    threads: int
    gpus: int = 0  # of one actor


def this_machine() -> Machine:
    """The CPUs and GPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    cpuinfo = Path("/proc/cpuinfo")  # of Linux alone
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "").partition(":")[2]
    return Machine((gpus,) if gpus else (), cpus, cpu_flags=frozenset(flags.split()))


def cluster(nodes: Sequence[Resources]) -> Machine:
    """The hardware of a Ray cluster; its processors are assumed to equal this machine's."""
    cpus = [int(node["CPU"]) for node in nodes if node.get("CPU")]
    gpus = tuple(int(node["GPU"]) for node in nodes if node.get("GPU", 0) >= 1)
    flags = this_machine().cpu_flags
    return Machine(gpus, min(cpus, default=1), nodes=max(1, len(cpus)), cpu_flags=flags)


def place(model: ModelSpec, machine: Machine) -> Placement:
    """Where the actors run; SpecError if the machine lacks what the spec asks for."""
    if model.device == "cuda" and not machine.gpus:
        fix = "there is no GPU here; write device: auto or cpu"
        raise SpecError([Problem("model.device", fix, model.device)])
    on_gpu = bool(machine.gpus) and model.device != "cpu"
    # — bfloat16 where the device computes it natively
    fastest = "bfloat16" if on_gpu or _CPU_BFLOAT16 & machine.cpu_flags else "float32"
    dtype = fastest if model.dtype == "auto" else model.dtype
    if not on_gpu and model.gpus > 1:
        raise SpecError([Problem("model.gpus", "there is no GPU here; write 1", model.gpus)])
    if not on_gpu:
        return Placement("cpu", dtype, machine.nodes, threads=machine.cpus)
    actors = sum(gpus // model.gpus for gpus in machine.gpus)  # one actor uses GPUs of one node
    if not actors:
        fix = f"no node has this many GPUs; the largest has {max(machine.gpus)}"
        raise SpecError([Problem("model.gpus", fix, model.gpus)])
    return Placement("cuda", dtype, actors, threads=1, gpus=model.gpus)


def node_resources() -> list[Resources]:
    """The resources of each node of the connected cluster, with those that it may still start."""
    # Imported here: a `Labeller` places its model without Ray.
    import ray
    from ray._private.state import state
    from ray.util.client import ray as client

    alive = [
        dict(node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    # — through Ray's client (ray://) only the head can read the autoscaler's configuration
    through_client: bool = client.is_connected()  # type: ignore[no-untyped-call]
    # — None for a cluster that does not scale
    config: Any = None if through_client else state.get_cluster_config()
    groups = [] if config is None else config.node_group_configs
    promised = [(dict(group.resources), int(group.max_count)) for group in groups]
    return nodes_at_largest(alive, promised)


def nodes_at_largest(
    alive: Sequence[Resources], promised: Sequence[tuple[Resources, int]]
) -> list[Resources]:
    """The alive nodes, and the nodes of each promised kind that may still start.

    A node's kind is its number of CPUs and GPUs. A kind without a limit (-1) counts as one node.
    """
    nodes = list(alive)
    for resources, limit in promised:
        started = sum(_kind(node) == _kind(resources) for node in alive)
        nodes += [resources] * max(0, (1 if limit < 0 else limit) - started)
    return nodes


def _kind(resources: Resources) -> tuple[float, float]:
    return resources.get("CPU", 0), resources.get("GPU", 0)
