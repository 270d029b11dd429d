"""`assay filter`, its dry run and `assay report` on many synthetic labels: time and memory.

    python -m benchmarks.filters --documents 1000000

Real input files and label files are written; the answers are random. Each command runs in a process
of its own, whose peak memory the operating system reports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger.cells import committed, record_specs
from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.cuts import load_or_cut
from pipeline.ledger.label_files import LabelFile, commit_shard
from pipeline.ledger.label_rows import probability_columns, reading_columns
from pipeline.ledger.snapshots import SnapshotTask, publish
from pipeline.sources.shards import Shard
from pipeline.sources.source import find_objects, read_documents
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.schema import Columns
from pipeline.stores.local import LocalStore

FILE_ROWS, SHARD_BYTES = 50_000, 8_000_000
TASKS = {"toxic": ("toxic", "clean"), "language": ("en", "de", "fr", "es", "it")}
FINGERPRINTS = {task: Fingerprint({"task": task}) for task in TASKS}
WORDS = 60  # of a text, on average


def main() -> None:
    """Writes a corpus and its labels, runs the commands, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        spec = write_labels(folder, options.documents)
        for words in (
            ["filter", str(spec), "--dry-run"],
            ["report", str(spec), "--by", "doc.source", "--to", str(folder / "page.html")],
            ["filter", str(spec), "--to", str(folder / "clean")],
        ):
            name = " ".join(word for word in words[::2] if word.startswith("-") or word == words[0])
            measure(name, words, options.documents, folder / "cache")
        print(f"the page has {(folder / 'page.html').stat().st_size / 1e6:.1f} MB")


def write_labels(folder: Path, documents: int) -> Path:
    """Writes Parquet files to `in` and their labels to `out`; the spec, which has a filter."""
    # — a process that is forked from a large one counts the memory of both
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        shards = pool.submit(_labelled, folder, documents).result()
    print(f"{documents:,} documents in {shards:,} shards of two tasks", flush=True)
    spec = folder / "spec.json"
    top = {"share": 0.05, "of": "toxic.p.toxic", "by": "language"}
    content = {
        "name": "synthetic",
        "model": {"path": "none"},
        "input": {"path": str(folder / "in"), "id": "id"},
        "output": str(folder / "out"),
        "tasks": [
            {"name": task, "question": "?", "labels": list(labels)}
            for task, labels in TASKS.items()
        ],
        "filter": {"keep": "language.label != 'it'", "drop_top": top, "on_error": "keep"},
    }
    spec.write_text(json.dumps(content))
    return spec


def _labelled(folder: Path, documents: int) -> int:
    """Writes input and output; the number of shards."""
    source = np.random.default_rng(0)
    vocabulary = np.array([f"w{number:x}" * 2 for number in range(5_000)])
    (folder / "in").mkdir()
    for first in range(0, documents, FILE_ROWS):
        rows = min(FILE_ROWS, documents - first)
        lengths = source.poisson(WORDS, rows) + 1
        words = vocabulary[source.integers(0, len(vocabulary), int(lengths.sum()))]
        texts = [" ".join(part) for part in np.split(words, np.cumsum(lengths)[:-1])]
        ids = [f"d{number}" for number in range(first, first + rows)]
        sources = np.array(["web", "books", "mail"])[source.integers(0, 3, rows)]
        table = pa.table({"id": ids, "text": texts, "source": sources})
        path = folder / "in" / f"{first:09}.parquet"
        pq.write_table(table, path, row_group_size=5_000)
    store = LocalStore(folder / "out")
    objects = find_objects(str(folder / "in"), folder / "cache")
    shards = load_or_cut(store, objects, Columns("text", "id"), SHARD_BYTES).shards
    fp = {task: fingerprint.id for task, fingerprint in FINGERPRINTS.items()}
    record_specs(store, FINGERPRINTS.items())
    for shard in shards:
        _commit(store, shard, source)
    done = committed(store, fp, [shard.id for shard in shards])
    tasks = {task: SnapshotTask(fp[task], labels) for task, labels in TASKS.items()}
    publish(store, "synthetic", tasks, shards, done, created_at="2026-01-01T00:00:00Z")
    return len(shards)


def _commit(store: LocalStore, shard: Shard, source: np.random.Generator) -> None:
    documents = pa.concat_tables(read_documents(shard, {})).combine_chunks()
    rows, files = documents.num_rows, []
    status = documents.column("status").to_pylist()
    for task, labels in TASKS.items():
        p = source.dirichlet(np.full(len(labels), 0.3), rows).astype(np.float32)
        tokens, n_chunks = source.integers(20, 200, rows), np.ones(rows, np.int64)
        mass = source.uniform(0.5, 1, rows).astype(np.float32)
        read = reading_columns(mass, tokens, n_chunks, status)
        columns = probability_columns(p, labels) | read
        answers = pa.StructArray.from_arrays(
            [columns[name] for name in ANSWER_COLUMNS], names=ANSWER_COLUMNS
        )
        files.append(LabelFile(task, FINGERPRINTS[task].id, shard.id, answers, {"task": task}))
    commit_shard(store, shard, documents, files)


def measure(name: str, words: list[str], documents: int, cache: Path) -> None:
    """Runs a command, and prints a line with its time and its peak memory."""
    environment = {**os.environ, "ASSAY_CACHE": str(cache)}
    command = [sys.executable, "-m", "pipeline", *words, "--json"]
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    print(
        f"{name:18} {seconds:6.1f} s, {documents / seconds:9,.0f} documents/s, "
        f"peak {usage.ru_maxrss / 1_000:,.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
