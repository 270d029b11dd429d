"""A run on a cluster whose workers come with the work is planned for those workers."""

from __future__ import annotations

import pytest
from ray._private.state import state
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RaySystemError
from ray.util.client import ray as client

from pipeline.runtime.connection import node_resources
from pipeline.runtime.placement import Resources, cluster, nodes_at_largest, place
from pipeline.spec.model import ModelSpec

HEAD: Resources = {"CPU": 0.0, "node:__internal_head__": 1.0}
GPU: Resources = {"CPU": 4.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("alive", "promised", "gpus"),
    [
        ([HEAD], [(HEAD, 0), (GPU, 8)], 8),
        ([HEAD, {**GPU, "memory": 1.0}], [(HEAD, 0), (GPU, 8)], 8),
        ([HEAD, GPU, GPU], [(GPU, 1)], 2),
        ([HEAD], [(GPU, -1)], 1),
        ([HEAD, GPU], [], 1),
    ],
)
def test_nodes_that_may_come_count_like_those_that_are_there(
    alive: list[Resources], promised: list[tuple[Resources, int]], gpus: int
) -> None:
    placement = place(ModelSpec(path="m"), cluster(nodes_at_largest(alive, promised)))
    assert placement.device == "cuda" and placement.actors == gpus


def test_what_ray_says_of_its_autoscaler_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = autoscaler_pb2.ClusterConfig()
    config.node_group_configs.add(name="head", resources={"CPU": 0}, min_count=0, max_count=0)
    config.node_group_configs.add(name="gpu", resources={"CPU": 4, "GPU": 1}, max_count=3)
    head = {"Resources": HEAD, "Alive": True}
    gone = {"Resources": GPU, "Alive": False}
    monkeypatch.setattr("ray.nodes", lambda: [head, gone])
    monkeypatch.setattr(state, "get_cluster_config", lambda: config)
    assert node_resources() == [HEAD, GPU, GPU, GPU]
    monkeypatch.setattr(state, "get_cluster_config", lambda: None)
    assert node_resources() == [HEAD]


def test_through_rays_client_the_autoscaler_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RaySystemError("Ray has not been started yet")

    monkeypatch.setattr("ray.nodes", lambda: [{"Resources": GPU, "Alive": True}])
    monkeypatch.setattr(state, "get_cluster_config", refuse)
    monkeypatch.setattr("ray.util.client.RayAPIStub.is_connected", lambda self: True)
    assert node_resources() == [GPU]
    monkeypatch.undo()
    assert client.is_connected() is False
