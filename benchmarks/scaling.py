"""Documents a second on 1, 2 and 4 nodes, with an engine of a fixed cost in place of the model.

    python -m benchmarks.scaling --model FOLDER [--documents N] [--seconds S]

Each node is a Ray node of its own on this machine with one CPU for labelling; the engine sleeps, so
that nodes do not compete for this machine's cores. What is measured is the graph and the storage:
what they cost a node, and whether nodes wait for one another. Then one of two nodes is four times
slower than the other, and one of four is taken away in the middle.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cyclopts

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

    from pipeline.runtime.progress import Progress

SHARD_DOCUMENTS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The nodes of a run."""

    name: str
    slower: Sequence[float]  # for each node: the factor by which each document takes longer
    preempted: bool = False  # one of them goes away when a third of the shards is committed


SHAPES = (
    Shape("1", [1]),
    Shape("2", [1, 1]),
    Shape("4", [1, 1, 1, 1]),
    Shape("2, one 4x slower", [1, 4]),
    Shape("4, one taken away", [1, 1, 1, 1], preempted=True),
)


def main(*, model: str, documents: int = 192, seconds: float = 0.25) -> None:
    """Measure documents a second on 1, 2 and 4 nodes, and print one row for each shape.

    Parameters
    ----------
    model
        Folder of a small model: only its tokenizer is used.
    documents
        Number of documents for each node.
    seconds
        Time that the engine takes for each document.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    print(f"{'nodes':20}documents/s  of linear  computed again", flush=True)
    alone = None
    for shape in SHAPES:
        rate, again = measured(shape, model, documents * len(shape.slower), seconds)
        alone = alone or rate
        # — a node that takes N times as long counts as 1/N of a node
        nodes = sum(1 / times for times in shape.slower) - shape.preempted
        print(f"{shape.name:20}{rate:11.2f}  {rate / alone / nodes:9.0%}  {again:14}", flush=True)


def measured(shape: Shape, model: str, documents: int, seconds: float) -> tuple[float, int]:
    """Documents a second, and the number of documents that reached an engine more than once.

    The rate is that of the later half: the pool grows while the first shards are labelled.
    """
    from pipeline.runtime.run import run
    from pipeline.spec.parse import spec_of

    shards: list[tuple[float, int]] = []  # when each was committed, and its rows
    with tempfile.TemporaryDirectory() as folder:
        corpus, read = Path(folder) / "corpus.jsonl", Path(folder) / "read"
        line = json.dumps({"text": "word " * 40})
        corpus.write_text(f"{line}\n" * documents)
        spec = spec_of(
            {
                "name": "scaling",
                "tasks": [{"name": "toxic", "question": "Rude?", "labels": ["Yes", "No"]}],
                "model": {"path": model, "device": "cpu"},
                "input": {"path": str(corpus), "shard_bytes": SHARD_DOCUMENTS * (len(line) + 1)},
                "output": f"{folder}/out",
            }
        )
        with cluster_of(shape, _SLEEPS.format(seconds=seconds, read=str(read))) as cluster:
            preempt_at = documents // SHARD_DOCUMENTS // 3 if shape.preempted else None

            def announced(progress: Progress) -> None:
                more = progress.committed - sum(rows for _, rows in shards)
                if not more:
                    return
                shards.append((time.monotonic(), more))
                if len(shards) == preempt_at:
                    node = next(iter(cluster.worker_nodes))
                    cluster.remove_node(node, allow_graceful=False)

            outcome = run(
                spec,
                cache_dir=Path(folder) / "cache",
                address=cluster.address,
                announce=announced,
            )
        assert outcome.complete and outcome.tally.rows == documents, outcome
        again = sum(map(int, read.read_text().split())) - documents
    half = len(shards) // 2
    (start, _), (end, _) = shards[half - 1], shards[-1]
    return sum(rows for _, rows in shards[half:]) / (end - start), again


@contextmanager
def cluster_of(shape: Shape, engine: str) -> Iterator[Cluster]:
    """A head without work, and the shape's nodes with one labelling actor's CPUs each."""
    from ray.cluster_utils import Cluster

    # Workers import `sitecustomize` before anything: the engine is replaced there, and only there.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(engine)
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = folder + (before and os.pathsep + before)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            for times in shape.slower:
                made.add_node(num_cpus=1, env_vars={"SCALING_SLOWER": str(times)})
            made.wait_for_nodes()
            yield made
        finally:
            made.shutdown()  # type: ignore[no-untyped-call]
            os.environ["PYTHONPATH"] = before


_SLEEPS = """
import importlib.abc, importlib.machinery, os, sys, time

SECONDS = {seconds} * float(os.environ.get("SCALING_SLOWER", "1"))

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "pipeline.inference.engine":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            def label(self, documents, *, tasks=None):
                import numpy as np
                with open({read!r}, "a") as log:
                    log.write(f"{{len(documents)}}\\n")
                time.sleep(SECONDS * len(documents))
                shapes = [(len(documents), len(q.labels)) for q in self.prompt.questions]
                answers = [np.full(shape, -2.0, np.float32) for shape in shapes]
                return module.Labelled(tuple(answers), module.Usage())
            module.LabelEngine.label = label
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""

if __name__ == "__main__":
    cyclopts.run(main)
