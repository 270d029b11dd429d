"""A run on a cluster is planned for its nodes, of which one of each kind is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from pipeline.errors import UnavailableError
from pipeline.runtime.placement import Machine, place
from pipeline.runtime.session import NODE_ID, cluster_machine
from pipeline.spec.model import ModelSpec

HEAD = {"CPU": 0.0, "node:__internal_head__": 1.0}
FAST, SLOW = {"CPU": 8.0}, {"CPU": 4.0}
GPU = {"CPU": 4.0, "GPU": 1.0, "accelerator_type:T4": 1.0}


class FakeRay:
    """A cluster whose nodes answer as their resources say; the first request brings more nodes."""

    def __init__(self, *alive: dict[str, float], brings: dict[str, float] | None = None) -> None:
        self.alive = list(alive)
        self.brings = brings
        self.asked: list[dict[str, Any]] = []

    def nodes(self) -> list[dict[str, Any]]:
        gone = {"NodeID": "gone", "Resources": SLOW, "Alive": False}
        named = enumerate(self.alive)
        return [gone, *({"NodeID": f"n{n}", "Resources": r, "Alive": True} for n, r in named)]

    def remote(self, **_: Any) -> Any:
        def options(**needs: Any) -> Any:
            self.asked.append(needs)
            return SimpleNamespace(remote=lambda: needs)

        return lambda _function: SimpleNamespace(options=options)

    def get(self, asked: Any, timeout: float) -> Any:
        if isinstance(asked, dict):
            if self.brings is None:
                raise GetTimeoutError("no answer")
            self.alive.append(self.brings)
            return None
        nodes = [int(needs["label_selector"][NODE_ID].removeprefix("n")) for needs in asked]
        return [self.alive[node] is FAST for node in nodes]


def machine_of(fake: FakeRay, monkeypatch: pytest.MonkeyPatch, device: str = "auto") -> Machine:
    for name in ("nodes", "remote", "get"):
        monkeypatch.setattr(f"ray.{name}", getattr(fake, name))
    return cluster_machine(device)


def placed(machine: Machine, device: str = "auto") -> tuple[str, str]:
    placement = place(ModelSpec(path="m", device=device), machine)
    return placement.device, placement.dtype


@pytest.mark.parametrize(
    ("nodes", "kinds", "dtype"),
    [
        ((HEAD, FAST, FAST), 1, "bfloat16"),
        ((HEAD, FAST, SLOW, FAST), 2, "float32"),
        ((HEAD, SLOW), 1, "float32"),
    ],
)
def test_a_node_of_each_kind_says_whether_its_processors_have_a_fast_bfloat16(
    nodes: tuple[dict[str, float], ...],
    kinds: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.runtime.session.multiplies_bfloat16", pytest.fail)
    fake = FakeRay(*nodes)
    machine = machine_of(fake, monkeypatch)
    assert placed(machine) == ("cpu", dtype) and not machine.grows
    assert len(fake.asked) == kinds and all("label_selector" in needs for needs in fake.asked)


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


def test_a_machine_that_does_not_come_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="no node of the cluster with a GPU answers"):
        machine_of(FakeRay(HEAD, FAST), monkeypatch, "cuda")
