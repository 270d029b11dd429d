"""What the driver of a run needs for many shards: memory, requests, LIST replies, snapshot bytes.

    python -m benchmarks.planning models/smollm2-135m-instruct.gguf --shards 1000 10000 100000

The driver is that of `assay run`. Its store is simulated, and its workers commit each shard at
once: no Ray, no file, no model. Each run has a process of its own; then come the slopes for each
shard.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import pickle
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from pipeline.errors import StorageError
from pipeline.hashes import sha256_hex
from pipeline.inference.memory import trim_malloc
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import Counts, ShardCounts
from pipeline.ledger.cuts import CutLog
from pipeline.ledger.keys import documents_key, label_key
from pipeline.ledger.label_files import FileCounts, to_parquet
from pipeline.runtime.job import Job
from pipeline.sources.shards import Piece, Shard
from pipeline.sources.source import InputObject
from pipeline.spec.parse import spec_of
from pipeline.spec.schema import Columns
from pipeline.stores.store import StoredObject
from pipeline.verbs.run import judged_run

ROWS = 1_000  # of a shard
SHARDS_A_FILE = 10
TASKS = ("toxic", "topic")
# A new output; the same when all is done; and when half of it is labelled, and nothing published.
RUNS = ("first", "again", "resumed")
KEYS = 1_000  # of one LIST or DELETE of S3


def etag_of(key: str) -> str:
    """The etag of an object of the store."""
    return sha256_hex(key.encode(), 32)


def file_of(key: str, *counts: int) -> FileCounts:
    """The counts of a file that a worker committed."""
    return FileCounts(key, etag_of(key), sha256_hex(key.encode(), 16), 0, *counts)


@dataclass
class MadeUpStore:
    """An output on S3 that counts requests; the files of shards are made when they are read."""

    url: str = "s3://bucket/out"
    objects: dict[str, bytes] = field(default_factory=dict)  # all but files of shards
    documents: set[str] = field(default_factory=set)  # shard ids
    labelled: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def create(self, key: str, data: bytes) -> str | None:
        created = self.objects.setdefault(key, data) is data
        self.counts["PUT"] += 1
        self.counts["HEAD"] += not created  # — to read its nonce
        if key.startswith(("snapshots/", "index/")):
            self.counts[f"bytes of {key.partition('/')[0]}"] += len(data)
        self.counts["largest PUT, bytes"] = max(self.counts["largest PUT, bytes"], len(data))
        return etag_of(key) if created else None

    def read(self, key: str) -> bytes:
        self.counts["GET"] += 1
        if key.startswith("labels/"):
            return to_parquet(pa.table({"status": ["ok"] * ROWS}), {})
        if key.startswith("documents/"):
            source = random.Random(key)
            hashes = [f"{source.getrandbits(128):032x}" for _ in range(ROWS)]
            return to_parquet(pa.table({"content_hash": hashes, "status": ["ok"] * ROWS}), {})
        if key not in self.objects:
            raise StorageError(f"{self.url}/{key}: is missing")
        return self.objects[key]

    def delete(self, keys: Sequence[str]) -> None:
        self.counts["DELETE"] += -(-len(keys) // KEYS)
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        kind, _, version = prefix.strip("/").partition("/")
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        if kind == "documents":
            keys = [documents_key(sid) for sid in sorted(self.documents)]
        elif kind == "labels":
            task, fp = version.split("/")
            keys = [label_key(task, fp, sid) for sid in sorted(self.labelled)]
        self.counts["LIST"] += max(1, -(-len(keys) // KEYS))
        # — as `S3Store` does: all keys of the prefix are in memory at once
        yield from [StoredObject(key, 4_000, etag_of(key), 0.0) for key in keys]

    def label_items(self, items: Sequence[WorkItem], job: Job, *_: object) -> Iterator[ShardCounts]:
        """Commits every shard at once, as `graph.label_items` does with workers."""
        n = Counts({("rows", "ok"): ROWS, ("asked", "0"): ROWS, ("label_ms", "0"): 60_000})
        n.update({("label", task, label): ROWS // 2 for task in TASKS for label in ("yes", "no")})
        n.update({("answered", task): ROWS for task in TASKS})
        for work in items:
            sid = work.shard.id
            self.documents.add(sid)
            self.labelled.add(sid)
            keys = [label_key(task, job.fp[task], sid) for task in TASKS]
            files = file_of(documents_key(sid)), *(file_of(key, 0, 0, 0, 0) for key in keys)
            yield ShardCounts(sid, TASKS, n, files)

    def read_items(self, items: Sequence[WorkItem], *_: object) -> Iterator[ShardCounts]:
        """Commits the documents files at once, as `graph.read_items` does with workers."""
        for work in items:
            self.documents.add(work.shard.id)
            files = (file_of(documents_key(work.shard.id)),)
            yield ShardCounts(work.shard.id, (), Counts({("rows", "ok"): ROWS}), files)


def main() -> None:
    """Measures each run at each size, and prints what it needs for each further shard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="GGUF file or model folder; it is hashed, and not loaded")
    parser.add_argument("--shards", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS])
    options = parser.parse_args()
    measured: dict[str, Counter[str]] = {}
    spawn = multiprocessing.get_context("spawn")
    print("run, shards, what each further shard needs (of the first size: the whole)")
    for few, many in pairwise([0, *sorted(options.shards)]):
        with TemporaryDirectory() as folder:
            for name in options.runs:
                with ProcessPoolExecutor(1, spawn) as pool:
                    now = pool.submit(measure, name, options.model, Path(folder), many).result()
                before = measured.get(name, Counter())
                per_shard = {
                    figure: (now[figure] - before[figure]) / (many - few) for figure in now
                }
                print(f"{name} {many:,}", {figure: f"{n:.4g}" for figure, n in per_shard.items()})
                measured[name] = now


def measure(name: str, model: str, folder: Path, shards: int) -> Counter[str]:
    """What one run needs: bytes of memory, seconds, and the counts of the store."""
    objects = [
        InputObject(f"s3://bucket/in/part-{n:08d}.parquet", 10**8, f"{n:032x}", "parquet")
        for n in range(shards // SHARDS_A_FILE)
    ]
    kept = folder / "store.pickle"  # as the run before left it
    store = pickle.loads(kept.read_bytes()) if kept.exists() else _new_store(objects)
    if name == "resumed":
        half = sorted(store.labelled)[::2]
        store.documents, store.labelled = set(half), set(half)
        made = [key for key in store.objects if key.startswith(("snapshots/", "index/"))]
        store.delete(made)
    store.counts.clear()
    content = {
        "name": "planning",
        "model": {"path": str(Path(model).absolute()), "dtype": "float32"},
        "input": {"path": "s3://bucket/in"},
        "output": str(folder / "out"),
        "tasks": [{"name": task, "question": "?", "labels": ["yes", "no"]} for task in TASKS],
    }
    driver: dict[str, Any] = {"open_store": lambda *_: store, "local_ray": lambda *_: nullcontext()}
    workers: dict[str, Any] = {"label_items": store.label_items, "read_items": store.read_items}
    with (
        patch.multiple("pipeline.runtime.run", **driver),
        patch.multiple("pipeline.runtime.graph", **workers),
        patch("pipeline.runtime.plan.find_objects", lambda *_, **__: objects),
    ):
        gc.collect()
        trim_malloc()
        before = _bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again here
        started = time.perf_counter()
        outcome = judged_run(spec_of(content), cache_dir=folder / "cache")
        store.counts["ms"] = round(1_000 * (time.perf_counter() - started))
    assert outcome.complete and outcome.shards == shards, outcome
    store.counts["bytes of memory"] = _bytes("VmHWM") - before
    kept.write_bytes(pickle.dumps(store))
    return store.counts


def _new_store(objects: Sequence[InputObject]) -> MadeUpStore:
    """A store with the log of the cuts: a run that cuts reads the input's footers besides."""
    pieces = [Piece(ROWS * n, ROWS * (n + 1), 4_000_000, None, None) for n in range(SHARDS_A_FILE)]
    versions = [item.version(Columns("text", None)) for item in objects]
    store = MadeUpStore()
    CutLog(store).append({version: [Shard(version, p) for p in pieces] for version in versions})
    return store


def _bytes(name: str) -> int:
    """A size in this process's status."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1_024


if __name__ == "__main__":
    main()
