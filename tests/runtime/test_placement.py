"""Where actors run, and in which number format."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import SpecError
from pipeline.runtime.placement import Machine, Placement, cluster, place, this_machine
from pipeline.spec.schema import ModelSpec

OLD = Machine(gpus=(), cpus=8, cpu_flags=frozenset({"avx2"}))
AMX = Machine(gpus=(), cpus=8, cpu_flags=frozenset({"amx_bf16"}))
GPUS = Machine(gpus=(2, 2), cpus=16, nodes=2)
UNEVEN = Machine(gpus=(1, 5), cpus=16, nodes=2)  # one actor's GPUs all lie in one node


@pytest.mark.parametrize(
    ("model", "machine", "expected"),
    [
        ({}, OLD, Placement("cpu", "float32", actors=1, threads=8)),
        ({}, AMX, Placement("cpu", "bfloat16", actors=1, threads=8)),
        ({"dtype": "bfloat16"}, OLD, Placement("cpu", "bfloat16", actors=1, threads=8)),
        ({}, GPUS, Placement("cuda", "bfloat16", actors=4, threads=1, gpus=1)),
        ({"device": "cpu"}, GPUS, Placement("cpu", "float32", actors=2, threads=16)),
        ({"gpus": 2}, GPUS, Placement("cuda", "bfloat16", actors=2, threads=1, gpus=2)),
        ({"gpus": 2}, UNEVEN, Placement("cuda", "bfloat16", actors=2, threads=1, gpus=2)),
        ({"dtype": "float16"}, GPUS, Placement("cuda", "float16", actors=4, threads=1, gpus=1)),
    ],
)
def test_auto_takes_what_the_device_computes_natively(
    model: dict[str, Any], machine: Machine, expected: Placement
) -> None:
    assert place(ModelSpec(path="m", **model), machine) == expected


def test_a_gpu_that_is_not_there_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match=r"model\.device: there is no GPU here"):
        place(ModelSpec(path="m", device="cuda"), OLD)


@pytest.mark.parametrize(("machine", "fix"), [(OLD, "no GPU here"), (GPUS, "largest has 2")])
def test_more_gpus_than_a_node_has_are_a_spec_error(machine: Machine, fix: str) -> None:
    with pytest.raises(SpecError, match=rf"model\.gpus: .*{fix}"):
        place(ModelSpec(path="m", gpus=3), machine)


def test_a_cluster_is_as_wide_as_its_smallest_node_with_processors() -> None:
    machine = cluster([{"CPU": 0.0}, {"CPU": 16.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 2.0}])
    assert (machine.gpus, machine.cpus, machine.nodes) == ((1, 2), 8, 2)


def test_this_machine_has_a_processor() -> None:
    assert this_machine().cpus >= 1
