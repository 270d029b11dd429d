"""A plan of 200,000 shards: resumed and published within 1 GB, and labelled in windows.

The job is this file as a program, which prints what it took as JSON: the most memory that a process
ever had is asked of the operating system.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pytest
from memory_store import MemoryStore

from pipeline.hashes import sha256_hex
from pipeline.ledger.cells import committed, remaining
from pipeline.ledger.counts_log import log_counts
from pipeline.ledger.cuts import CutLog, load_or_cut
from pipeline.ledger.keys import documents_key, label_key, manifest_key, snapshot_key
from pipeline.ledger.label_files import FileCounts
from pipeline.ledger.snapshots import SnapshotTask, publish
from pipeline.sources.shards import Piece, Shard
from pipeline.sources.source import InputObject
from pipeline.spec.schema import Columns
from pipeline.stores.store import StoredObject

BOUND_MIB = 1024
OBJECTS = 20_000
PIECES = [Piece(1_000 * n, 1_000 * (n + 1), 4_000_000, None, None) for n in range(10)]
FPS = {name: f"{n:016x}" for n, name in enumerate(("toxic", "quality", "mood", "art"))}
TASKS = {task: SnapshotTask(fp, ("yes", "no")) for task, fp in FPS.items()}
LABELS = [f"labels/{task}/{fp}/" for task, fp in FPS.items()]
GONE = 7
LOGGED = 10_000


@dataclass(frozen=True)
class NearlyDone:
    """A store with every file of the shards except the `missing`; it holds their names alone."""

    objects: MemoryStore = field(default_factory=MemoryStore)
    sids: list[str] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    url: str = "memory://"

    def create(self, key: str, data: bytes) -> str | None:
        return self.objects.create(key, data)

    def read(self, key: str) -> bytes:
        return self.objects.read(key)

    def delete(self, keys: Sequence[str]) -> None:
        self.objects.delete(keys)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        kind, _, place = prefix.partition("/")
        if kind in ("inputs", "counts", "snapshots"):
            yield from self.objects.list(prefix)
        elif kind in ("documents", "labels"):
            task, _, fp = place.strip("/").partition("/")
            keys = (label_key(task, fp, s) if task else documents_key(s) for s in self.sids)
            for number, key in enumerate(keys):
                if key not in self.missing:
                    yield StoredObject(key, 4_000, f"{number:032x}", 0.0)


def input_objects() -> list[InputObject]:
    names = (f"s3://bucket/corpus/part-{n:08d}.parquet" for n in range(OBJECTS))
    return [InputObject(name, 40_000_000, f"{n:032x}", "parquet") for n, name in enumerate(names)]


def peak_mib() -> int:
    """This process's own peak: `getrusage` would return its parent's, if that is greater."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def run_large_job() -> None:
    store, objects, columns = NearlyDone(), input_objects(), Columns("text", None)
    versions = [item.version(columns) for item in objects]
    log = CutLog(store)
    log.append({version: [Shard(version, piece) for piece in PIECES] for version in versions})
    del log, versions
    cuts = load_or_cut(store, objects, columns, 1)
    store.sids.extend(sorted(shard.id for shard in cuts.shards))
    lacking = random.Random(1).sample(store.sids, GONE)
    store.missing.update(label_key("mood", FPS["mood"], sid) for sid in lacking[1:])
    store.missing.update(documents_key(sid) for sid in lacking[:2])
    nothing_committed = committed(MemoryStore(), FPS, store.sids)
    assert len(remaining(cuts.shards, FPS, nothing_committed)) == len(cuts.shards)
    del nothing_committed
    done = committed(store, FPS, store.sids)
    work_items = remaining(cuts.shards, FPS, done)

    # — as runs log them: there are no label files that could be read
    for kind, *counts in (("documents/",), *((prefix, 0, 0, 0, 0) for prefix in LABELS)):
        listed = store.list(kind)
        while items := list(islice(listed, LOGGED)):
            own = [(item.key, item.etag, sha256_hex(item.key.encode(), 16)) for item in items]
            log_counts(store, [FileCounts(*file, 0, *counts) for file in own])

    def published(stamp: str) -> int:
        return publish(store, "large", TASKS, cuts.shards, done, created_at=stamp)

    result = {
        "shards": len(cuts.shards),
        "incomplete": sorted(lacking),
        "work_items": sorted(work.shard.id for work in work_items),
        "numbers": [published("1"), published("2")],
        "snapshot_bytes": len(store.read(snapshot_key(1))),
        "manifest_bytes": len(store.read(manifest_key(1))),
        "peak_mib": peak_mib(),
    }
    print(json.dumps(result))


@pytest.mark.slow
def test_200_000_shards_are_planned_resumed_and_published_within_1_gb() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    out = subprocess.check_output([sys.executable, __file__], env=environment, timeout=300)
    measured = json.loads(out)
    assert measured["shards"] == 200_000
    assert measured["work_items"] == measured["incomplete"] and len(measured["work_items"]) == 7
    assert measured["numbers"] == [1, 1]
    assert measured["snapshot_bytes"] < 1_000
    assert measured["manifest_bytes"] < 300 * measured["shards"]
    assert measured["peak_mib"] < BOUND_MIB


if __name__ == "__main__":
    run_large_job()
