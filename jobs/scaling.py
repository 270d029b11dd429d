"""Documents a second on 1, 2 and 4 nodes, with an engine of a fixed cost in place of the model.

    python -m jobs.scaling [--documents N] [--seconds S]

Each node is a Ray node of its own on this machine with one CPU for labelling; the engine sleeps, so
that nodes do not compete for this machine's cores. What is measured is the graph and the storage:
what they cost a node, and whether nodes wait for one another.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NODES = (1, 2, 4)
SHARD_DOCUMENTS = 8
_SPEC: Mapping[str, Any] = {
    "name": "scaling",
    "tasks": [{"name": "toxic", "question": "Rude?", "labels": ["Yes", "No"]}],
}


def main() -> None:
    """Prints one row a number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a small model: only its tokenizer works")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=0.25, help="of each document")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    print("nodes  documents/s  of linear", flush=True)
    alone = None
    for nodes in NODES:
        rate = measured(nodes, options.model, options.documents, options.seconds)
        alone = alone or rate
        print(f"{nodes:5}  {rate:11.2f}  {rate / alone / nodes:9.0%}", flush=True)


def measured(nodes: int, model: str, documents: int, seconds: float) -> float:
    """Documents a second, from the first shard committed to the last: actors are there by then."""
    from pipeline.data.run import run
    from pipeline.spec import spec_of

    with tempfile.TemporaryDirectory() as folder, cluster_of(nodes, seconds) as address:
        corpus = Path(folder) / "corpus.jsonl"
        line = json.dumps({"text": "word " * 40})
        corpus.write_text(f"{line}\n" * documents)
        spec = spec_of(
            {
                **_SPEC,
                "model": {"path": model, "device": "cpu"},
                "input": {
                    "path": str(corpus),
                    "shard_bytes": SHARD_DOCUMENTS * (len(line) + 1),
                },
                "output": f"{folder}/out",
            }
        )
        committed: list[tuple[float, int]] = []
        outcome = run(
            spec,
            cache_dir=Path(folder) / "cache",
            address=address,
            announce=lambda _: lambda rows: committed.append((time.monotonic(), rows)),
        )
    assert outcome.complete and outcome.tally.rows == documents, outcome
    # — the pool grows while the first shards are labelled: the later half shows all nodes at work
    half = len(committed) // 2
    (start, _), (end, _) = committed[half - 1], committed[-1]
    return sum(rows for _, rows in committed[half:]) / (end - start)


@contextmanager
def cluster_of(nodes: int, seconds: float) -> Iterator[str]:
    """A head without work, and so many nodes with one labelling actor's CPUs each."""
    from ray.cluster_utils import Cluster

    # Workers import `sitecustomize` before anything: the engine is replaced there, and only there.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SLEEPS.format(seconds=seconds))
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [before])])
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            for _ in range(nodes):
                made.add_node(num_cpus=1)
            made.wait_for_nodes()
            yield made.address
        finally:
            made.shutdown()  # type: ignore[no-untyped-call]
            os.environ["PYTHONPATH"] = before


_SLEEPS = """
import importlib.abc, importlib.machinery, sys, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "pipeline.inference.engine":
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        load = found.loader.exec_module
        def exec_module(module):
            load(module)
            def label(self, documents, *, tasks=None):
                import numpy as np
                time.sleep({seconds} * len(documents))
                shapes = [(len(documents), len(q.labels)) for q in self.prompt.questions]
                answers = [np.full(shape, -2.0, np.float32) for shape in shapes]
                return module.Labelled(tuple(answers), module.Usage())
            module.LabelEngine.label = label
        found.loader.exec_module = exec_module
        return found

sys.meta_path.insert(0, Finder())
"""

if __name__ == "__main__":
    main()
