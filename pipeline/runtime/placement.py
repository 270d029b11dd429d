"""What the labelling actors run on: which device, how many, in which number format.

Knows this machine and a Ray cluster's resources. Knows nothing of torch, models or specs' tasks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Problem, SpecError
from pipeline.spec.schema import ModelSpec

# Flags of processors whose bfloat16 matrix multiply is native; without one it runs at a
# hundredth of float32's rate.
_CPU_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to run on: one machine, or the nodes of a cluster."""

    gpus: tuple[int, ...]  # of each node that has any
    cpus: int  # of one node, the smallest
    nodes: int = 1
    cpu_flags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """How one labelling actor runs, and how many of them there may be."""

    device: str  # cpu | cuda
    dtype: str  # a torch dtype's name
    actors: int
    threads: int
    gpus: int = 0  # of one actor


def this_machine() -> Machine:
    """The processors and GPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        gpus=tuple(filter(None, [len(list(Path("/dev").glob("nvidia[0-9]*")))])),
        cpus=len(affinity(0)) if affinity else os.cpu_count() or 1,
        cpu_flags=_cpu_flags(Path("/proc/cpuinfo")),
    )


def cluster(nodes: Sequence[Mapping[str, float]]) -> Machine:
    """What a Ray cluster's nodes have; their processors are taken to be like this machine's."""
    with_cpus = [int(node["CPU"]) for node in nodes if node.get("CPU")]
    return Machine(
        gpus=tuple(int(node["GPU"]) for node in nodes if node.get("GPU", 0) >= 1),
        cpus=min(with_cpus, default=1),
        nodes=max(1, len(with_cpus)),
        cpu_flags=_cpu_flags(Path("/proc/cpuinfo")),
    )


def place(model: ModelSpec, machine: Machine) -> Placement:
    """Where the actors run; SpecError if the spec wants what is not there."""
    if model.device == "cuda" and not machine.gpus:
        fix = "there is no GPU here; write device: auto or cpu"
        raise SpecError([Problem("model.device", fix, model.device)])
    if machine.gpus and model.device != "cpu":
        return Placement(
            "cuda", _dtype(model, native=True), _gpu_actors(model, machine), 1, gpus=model.gpus
        )
    if model.gpus > 1:
        raise SpecError([Problem("model.gpus", "there is no GPU here; write 1", model.gpus)])
    native = bool(_CPU_BFLOAT16 & machine.cpu_flags)
    return Placement("cpu", _dtype(model, native=native), machine.nodes, threads=machine.cpus)


def _gpu_actors(model: ModelSpec, machine: Machine) -> int:
    """How many actors there are GPUs for; one actor's all lie in one node."""
    actors = sum(gpus // model.gpus for gpus in machine.gpus)
    if not actors:
        fix = f"no node has so many GPUs; the largest has {max(machine.gpus)}"
        raise SpecError([Problem("model.gpus", fix, model.gpus)])
    return actors


def _dtype(model: ModelSpec, *, native: bool) -> str:
    """The spec's dtype; `auto` is bfloat16 where the device computes it natively."""
    if model.dtype != "auto":
        return model.dtype
    return "bfloat16" if native else "float32"


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """The flags of the first processor; none where the system does not tell."""
    if not cpuinfo.exists():
        return frozenset()
    lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    return frozenset(next(lines, ":").partition(":")[2].split())


Resources = dict[str, float]


def node_resources() -> list[Resources]:
    """The resources of each node that the connected cluster has, or may have at its largest."""
    # Imported here: a `Labeller` places its model without Ray.
    import ray
    from ray._private.state import state
    from ray.util.client import ray as client

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
    return nodes_at_largest(alive, promised)


def nodes_at_largest(
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
