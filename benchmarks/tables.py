"""Delta, Iceberg and Lance tables beside Parquet files: reading as input, and exports of labels.

    python -m benchmarks.tables --documents 1000000

The same documents are in each. Those of a few files are read in turns with Parquet, in one process:
the ratio is the median of paired rounds. Each export runs in a process of its own, whose peak
memory the operating system reports. The answers are random.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq

from benchmarks.filters import SHARD_BYTES, measure, write_labels
from pipeline.runtime.limits import usable_cores
from pipeline.sources.shards import Shard
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.spec.schema import Columns

CATALOG = "PYICEBERG_CATALOG__BENCHMARK__"  # variables that configure pyiceberg
READ_FILES = 4  # of FILE_ROWS documents


def main() -> None:
    """Prints a line for each table that is read, and for each target of an export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[f"{CATALOG}URI"] = f"sqlite:///{folder}/catalog.db"
        os.environ[f"{CATALOG}WAREHOUSE"] = f"file://{folder}"
        spec = write_labels(folder, options.documents)
        # — pyiceberg reads the variables when it is imported
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(_write_tables, folder).result()
            pool.submit(_read_in_turns, folder, options.rounds).result()
        targets = {
            "parquet": f"{folder}/labels/",
            "delta": f"delta+{folder}/labels-delta",
            "iceberg": "iceberg://benchmark/labels.all",
            "lance": _inputs(folder)["lance"],
        }
        for kind, to in targets.items():
            words = ["export", str(spec), "--to", to]
            measure(f"export {kind:8}", words, options.documents, folder / "cache")


def _inputs(folder: Path) -> dict[str, str]:
    """The same documents in each format, as `input.path` names them."""
    return {
        "parquet": f"{folder}/in",
        "delta": f"delta+{folder}/delta",
        "iceberg": "iceberg://benchmark/docs.all",
        "lance": f"lance+{folder}/lance",
    }


def _write_tables(folder: Path) -> None:
    """Writes each Parquet file as one commit to each table, and prints the time."""
    import lance
    from deltalake import write_deltalake
    from pyiceberg.catalog import load_catalog

    started = time.perf_counter()
    catalog = load_catalog("benchmark")
    catalog.create_namespace("docs")
    files = sorted((folder / "in").iterdir())
    for number, file in enumerate(files):
        rows = pq.read_table(file)
        write_deltalake(folder / "delta", rows, mode="append")
        lance.write_dataset(rows, folder / "lance", mode="append" if number else "create")
        catalog.create_table_if_not_exists("docs.all", schema=rows.schema).append(rows)
    seconds = time.perf_counter() - started
    print(f"{len(files)} files written to each table, {seconds:.1f} s", flush=True)


def _read_in_turns(folder: Path, rounds: int) -> None:
    """Reads each table as a run does, in turns with the Parquet files; prints a line for each."""
    # — torch: the memory of the process that starts the exports counts as theirs
    from benchmarks.timing import Turn, processor, take_turns

    print(f"{processor()}, {usable_cores()} cores", flush=True)
    turns = {}
    for kind, path in _inputs(folder).items():
        objects = find_objects(path, folder / "cache")[:READ_FILES]
        shards = [each for o in objects for each in cut(o, Columns("text", "id"), SHARD_BYTES)]
        rows = sum(shard.rows for shard in shards)
        turns[kind] = Turn(partial(_read, shards), documents=rows, rounds=rounds, warm_up=True)
    parquet = turns.pop("parquet")
    for kind, turn in turns.items():
        timed = take_turns({"parquet": parquet, kind: turn})
        print(
            f"read {kind:8} {1e6 * timed[kind].median:6.1f} µs a document, "
            f"{timed[kind].times(timed['parquet']):5.2f} times the time of Parquet",
            flush=True,
        )


def _read(shards: Sequence[Shard]) -> int:
    """The number of documents."""
    return sum(len(part) for shard in shards for part in read_documents(shard, {}))


if __name__ == "__main__":
    main()
