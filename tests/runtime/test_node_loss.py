"""A node that disappears without warning ends its workers, and no row is lost or doubled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from local_cluster import wait_until
from many_rows import assert_every_row_once, has_begun, write_many
from ray.cluster_utils import Cluster

from pipeline.runtime.ray_token import token_mode
from pipeline.spec.parse import load_spec
from pipeline.verbs.run import judged_run

DOCUMENTS = 400


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three nodes on this machine; the first, where the driver is, has no room for an actor."""
    ray.shutdown()  # of the tests that share one Ray
    with token_mode(starts=True):
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(2):
            made.add_node(num_cpus=2)
        made.wait_for_nodes()
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_node_removed_without_warning(
    cluster: Cluster, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    spec = load_spec(write_spec(input=write_many(tmp_path, DOCUMENTS, shard_bytes=20_000)))
    removed: list[str] = []

    def remove_busy_node() -> None:
        wait_until(lambda: has_begun(output))
        actors = ray.util.state.list_actors(
            address=f"http://{cluster.webui_url}", filters=[("state", "=", "ALIVE")]
        )
        busy = next(actor.node_id for actor in actors if "ShardWorker" in actor.class_name)
        (node,) = [node for node in cluster.worker_nodes if node.node_id == busy]
        cluster.remove_node(node, allow_graceful=False)
        removed.append(busy)

    thread = threading.Thread(target=remove_busy_node)
    thread.start()
    outcome = judged_run(spec, cache_dir=tmp_path / "cache", address=cluster.address)
    thread.join()
    assert len(removed) == 1, "the run ended before the node was removed"
    assert outcome.complete and outcome.snapshot == 1
    assert_every_row_once(output, DOCUMENTS)
    print(
        f"\nnode removed without warning | disk | documents {DOCUMENTS}, kills 1, lost 0, doubled 0"
    )
