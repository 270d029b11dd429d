"""Planning new shards against an output that has an index of its texts: time and memory.

    python -m benchmarks.planning models/smollm2-135m-instruct.gguf

A synthetic output on disk has 10 million documents of two tasks. Of one million new documents in
2,000 shards, nine tenths have a text that the output has: of each new shard, in two earlier ones,
as in a new version of a file. The index is real; label files, which a plan only lists, are empty.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pipeline.cache import cache_dir
from pipeline.ledger.cuts import load_or_cut
from pipeline.ledger.keys import documents_key, index_key, label_key
from pipeline.ledger.text_index import MAX_ENTRIES, Hashes, IndexObject
from pipeline.runtime.answer_sources import plan_reuse
from pipeline.runtime.job import list_missing, make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.sources.source import InputObject
from pipeline.spec.parse import spec_of
from pipeline.spec.schema import Columns
from pipeline.stores.local import LocalStore

SHARD_ROWS = 500
KNOWN_SHARE = 0.9
TASKS = ("toxic", "topic")


def main() -> None:
    """Writes the output, plans, and prints seconds and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="GGUF file or model folder; it is hashed, and not loaded")
    parser.add_argument("--documents", type=int, default=10_000_000, help="of the output")
    parser.add_argument("--new", type=int, default=1_000_000)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        content = {
            "name": "planning",
            "model": {"path": str(Path(options.model).absolute()), "dtype": "float32"},
            "input": {"path": str(folder / "in")},
            "output": str(folder / "out"),
            "tasks": [{"name": n, "question": "?", "labels": ["yes", "no"]} for n in TASKS],
        }
        job = make_job(spec_of(content), place(spec_of(content).model, this_machine()), cache_dir())
        store = LocalStore(folder / "out")
        old = _written(folder / "out", job.fp, options.documents // SHARD_ROWS)
        source = np.random.default_rng(1)
        new = InputObject("/corpus/new.parquet", options.new * 1_000, "0" * 32, "parquet")
        starts = range(0, options.new, SHARD_ROWS)
        pieces = [[row, row + SHARD_ROWS, SHARD_ROWS * 1_000, None, None] for row in starts]
        entry = [new.path, new.size_bytes, new.etag, new.format, "text", None]
        log = {"cuts": [{"object": entry, "pieces": pieces}]}
        store.create("inputs/00000001.json", json.dumps(log).encode())
        cuts = load_or_cut(store, [new], Columns("text", None), 1)
        known = {}
        for shard in cuts.shards:
            hashes = source.integers(0, 2**64, SHARD_ROWS, np.uint64)
            is_known = source.random(SHARD_ROWS) < KNOWN_SHARE
            start = source.integers(len(old) - SHARD_ROWS)
            hashes[is_known] = old[start : start + SHARD_ROWS][is_known]
            known[shard.id] = hashes
        del old
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again here
        started = time.perf_counter()
        planned = list_missing(job, store, cuts)
        listed = time.perf_counter()
        planned = plan_reuse(job, store, planned, read=known, keep=False)
        done = time.perf_counter()
        to_ask = sum(work.rows_without_answer or 0 for work in planned.work_items)
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) / 1_000
        print(f"{len(cuts.shards):,} new shards; {to_ask:,} of {options.new:,} texts to ask")
        print(f"listing {listed - started:.1f} s, reuse {done - listed:.1f} s, {peak:,.0f} MB")


def _written(folder: Path, fp: Mapping[str, str], shards: int) -> Hashes:
    """Writes the files of labelled shards and their index; returns the hashes of all texts."""
    source = np.random.default_rng(0)
    sids = [source.bytes(16).hex() for _ in range(shards)]
    for sid in sids:
        for key in (documents_key(sid), *(label_key(task, fp[task], sid) for task in TASKS)):
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(64))
    store, parts = LocalStore(folder), list[Hashes]()
    of_object = MAX_ENTRIES // SHARD_ROWS
    for number, first in enumerate(range(0, shards, of_object), start=1):
        texts = {
            sid: source.integers(0, 2**64, SHARD_ROWS, np.uint64)
            for sid in sids[first : first + of_object]
        }
        store.create(index_key(number), IndexObject.of(texts).to_bytes())
        parts += texts.values()
    return np.concatenate(parts)


if __name__ == "__main__":
    main()
