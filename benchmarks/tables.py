"""Delta, Iceberg and Lance tables beside Parquet files: reading as input, and exports of labels.

    python -m benchmarks.tables --documents 1000000

The same documents are in each. All shards are read in turns, in one process: the ratio to Parquet
is the median of paired rounds. Each export runs in a process of its own, whose peak memory the
operating system says. The answers are random.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq

from benchmarks.filters import SHARD_BYTES, measure, write_labels
from benchmarks.timing import Timed, Turn, processor, take_turns
from pipeline.runtime.limits import usable_cores
from pipeline.sources.shards import Shard
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.spec.schema import Columns

CATALOG = "PYICEBERG_CATALOG__BENCHMARK__"  # variables of pyiceberg, which has no other place


def main() -> None:
    """Prints a line for each format that is read, and for each target of an export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{processor()}, {usable_cores()} cores")
    with TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[f"{CATALOG}URI"] = f"sqlite:///{folder}/catalog.db"
        os.environ[f"{CATALOG}WAREHOUSE"] = f"file://{folder}"
        spec = write_labels(folder, options.documents)
        # — pyiceberg reads the variables when it is imported
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(_write_tables, folder).result()
            read = pool.submit(_read_in_turns, folder, options.rounds).result()
        for kind, timed in read.items():
            ratio = timed.times(read["parquet"])
            print(f"read {kind:8} {timed.median:6.2f} s, {ratio:5.2f} times the time of Parquet")
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
    """Writes each Parquet file as one commit to each table."""
    import lance
    from deltalake import write_deltalake
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("benchmark")
    catalog.create_namespace("docs")
    for number, file in enumerate(sorted((folder / "in").iterdir())):
        rows = pq.read_table(file)
        write_deltalake(folder / "delta", rows, mode="append")
        lance.write_dataset(rows, folder / "lance", mode="append" if number else "create")
        catalog.create_table_if_not_exists("docs.all", schema=rows.schema).append(rows)


def _read_in_turns(folder: Path, rounds: int) -> dict[str, Timed]:
    """The seconds of each format, as a run reads it."""
    turns = {}
    for kind, path in _inputs(folder).items():
        objects = find_objects(path, folder / "cache")
        shards = [each for o in objects for each in cut(o, Columns("text", "id"), SHARD_BYTES)]
        turns[kind] = Turn(partial(_read, shards), documents=1, rounds=rounds, warm_up=True)
    return take_turns(turns)


def _read(shards: Sequence[Shard]) -> int:
    """The number of documents."""
    return sum(len(part) for shard in shards for part in read_documents(shard, {}))


if __name__ == "__main__":
    main()
