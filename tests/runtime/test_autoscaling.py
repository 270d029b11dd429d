"""A run on a cluster is planned for its nodes, of which each is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, WorkerCrashedError

from pipeline.errors import UnavailableError
from pipeline.runtime.placement import Machine, place
from pipeline.runtime.session import NODE_ID, cluster_machine, elsewhere
from pipeline.spec.model import ModelSpec

HEAD = {"CPU": 0.0, "node:__internal_head__": 1.0}
FAST, SLOW = {"CPU": 8.0}, {"CPU": 8.0, "memory": 1e9}
FULL = {"CPU": 64.0}  # whose disk is full: no worker starts there
GPU = {"CPU": 4.0, "GPU": 1.0, "accelerator_type:T4": 1.0}


class FakeRay:
    """A cluster whose nodes answer by their resources; the first request brings more nodes."""

    def __init__(self, *alive: dict[str, float], brings: dict[str, float] | None = None) -> None:
        self.alive = list(alive)
        self.brings = brings
        self.asked: list[dict[str, Any]] = []

    def nodes(self) -> list[dict[str, Any]]:
        dead_node = {"NodeID": "gone", "Resources": SLOW, "Alive": False}
        named = enumerate(self.alive)
        alive = {"Alive": True, "NodeManagerAddress": "198.18.0.9"}
        return [dead_node, *({"NodeID": f"n{n}", "Resources": r, **alive} for n, r in named)]

    def remote(self, **_: Any) -> Any:
        def options(**needs: Any) -> Any:
            self.asked.append(needs)
            return SimpleNamespace(remote=lambda: needs)

        return lambda _function: SimpleNamespace(options=options)

    def get(self, asked: Any, timeout: float) -> Any:
        if "label_selector" not in asked:
            if self.brings is None:
                raise GetTimeoutError("no answer")
            self.alive.append(self.brings)
            return None
        node = self.alive[int(asked["label_selector"][NODE_ID].removeprefix("n"))]
        if node is FULL:
            raise WorkerCrashedError()
        fast = frozenset({"float32", "bfloat16"})
        return fast if node is FAST else fast - {"bfloat16"}


def machine_of(fake: FakeRay, monkeypatch: pytest.MonkeyPatch, device: str = "auto") -> Machine:
    for name in ("nodes", "remote", "get"):
        monkeypatch.setattr(f"ray.{name}", getattr(fake, name))
    return cluster_machine(device)


def placed(machine: Machine, device: str = "auto") -> tuple[str, str]:
    placement = place(ModelSpec(path="m", device=device), machine)
    return placement.device, placement.dtype


@pytest.mark.parametrize(
    ("nodes", "dtype"),
    [
        ((HEAD, FAST, FAST), "bfloat16"),
        ((HEAD, FAST, SLOW, FAST), "float32"),
        ((HEAD, SLOW), "float32"),
    ],
)
def test_the_format_is_one_that_each_node_computes_at_speed_and_a_difference_is_named(
    nodes: tuple[dict[str, float], ...],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pipeline.runtime.session.processor_formats", pytest.fail)
    fake = FakeRay(*nodes)
    machine = machine_of(fake, monkeypatch)
    assert placed(machine) == ("cpu", dtype) and not machine.grows
    assert len(fake.asked) == len(nodes) - 1  # without the head
    assert all("label_selector" in needs for needs in fake.asked)
    differ = "not all have bfloat16 at speed, so CPUs compute in float32"
    assert (differ in caplog.text) == (len(nodes) == 4)


@pytest.mark.parametrize(
    ("device", "needs", "brings", "expected"),
    [
        ("auto", {"num_cpus": 1}, GPU, ("cuda", "float16")),
        ("auto", {"num_cpus": 1}, FAST, ("cpu", "bfloat16")),
        ("cuda", {"num_gpus": 1}, GPU, ("cuda", "float16")),
    ],
)
def test_a_cluster_without_workers_is_asked_for_one(
    device: str,
    needs: dict[str, int],
    brings: dict[str, float],
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRay(HEAD, brings=brings)
    machine = machine_of(fake, monkeypatch, device)
    assert placed(machine, device) == expected and machine.grows
    assert fake.asked[0] == needs


def test_a_node_that_runs_no_worker_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = machine_of(FakeRay(HEAD, FULL, FAST), monkeypatch)
    assert machine.unable == {"n1"} and machine.cores == (8,)
    (named,) = caplog.messages
    assert named.startswith("node 198.18.0.9 cannot run a worker (The worker died unexpectedly")
    assert elsewhere(machine.unable) == {"label_selector": {NODE_ID: "!in(n1)"}}
    with pytest.raises(UnavailableError, match="no node of the cluster with a CPU answers"):
        machine_of(FakeRay(HEAD, FULL), monkeypatch)


def test_a_machine_that_does_not_come_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="no node of the cluster with a GPU answers"):
        machine_of(FakeRay(HEAD, FAST), monkeypatch, "cuda")
