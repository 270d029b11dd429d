"""How busy a worker keeps a GPU: a device that takes a fixed time a batch, and does nothing.

`python -m benchmarks.busy jobs/specs/demo.yaml` labels shards as a worker with a GPU does, without
Ray: `shards_at_work` of them at once. Reading, tokenising, rows and commits are real; in
place of the model, a process sleeps for each batch. As on a GPU, batches are queued, and the
answers are waited for at the end. Prints the share of the time between the first batch and the last
in which the device was at work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.cache import cache_dir
from pipeline.inference.engine import DocumentIds, Labelled
from pipeline.inference.schedules.batching import Usage
from pipeline.ledger.cells import record_specs
from pipeline.runtime.graph import Places, shards_at_work
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.runtime.worker import label_shard, load_readers
from pipeline.sources.source import read_documents
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import open_store


class SleepingDevice:
    """An engine whose batches take a fixed time, and whose labels are all equally likely."""

    def __init__(self, tasks: Sequence[TaskSpec], documents: int, batch_s: float) -> None:
        self._labels = {task.name: len(task.labels) for task in tasks}
        self._documents = documents
        self._queue, device_end = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=_sleep_for_each, args=(device_end, batch_s), daemon=True
        )
        process.start()
        self.at_work: list[tuple[float, float]] = []  # when each batch began and ended

    def label(
        self,
        documents: Sequence[DocumentIds],
        *,
        tasks: Collection[str] | None = None,
        on_batch: Callable[[Sequence[int]], None] = lambda _documents: None,
    ) -> Labelled:
        """Queues each batch and waits for all; the interface of `LabelEngine.label`."""
        firsts = range(0, len(documents), self._documents)
        for first in firsts:
            self._queue.send(None)
            on_batch(range(first, min(first + self._documents, len(documents))))
        self.at_work += [self._queue.recv() for _ in firsts]
        asked = [count for name, count in self._labels.items() if tasks is None or name in tasks]
        shapes = [(len(documents), count) for count in asked]
        answers = tuple(np.full(shape, -np.log(shape[1]), np.float32) for shape in shapes)
        return Labelled(answers, Usage())

    @property
    def busy_share(self) -> float:
        """Of the time between the start of the first batch and the end of the last."""
        asleep_s = sum(ended_s - began_s for began_s, ended_s in self.at_work)
        return asleep_s / (self.at_work[-1][1] - self.at_work[0][0])


def _sleep_for_each(queue: Connection, batch_s: float) -> None:
    """The device: a process, so that it waits for no lock of Python's."""
    while True:
        queue.recv()
        began_s = time.monotonic()
        time.sleep(batch_s)
        queue.send((began_s, time.monotonic()))


def with_many_documents(spec: JobSpec, folder: Path, count: int) -> JobSpec:
    """The spec with this number of different texts like those of its input."""
    job = make_job(spec, place(spec.model, this_machine()), cache_dir())
    shards = plan(job, open_store(spec.output, spec.storage_options), keep=False).shards
    tables = [t for shard in shards for t in read_documents(shard, spec.input.storage_options)]
    texts = pa.concat_tables(tables)["text"].drop_null().to_pylist()
    with (folder / "documents.jsonl").open("w") as file:
        for number, text in enumerate(islice(cycle(texts), count)):
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
    path = str(folder / "documents.jsonl")
    return JobSpec.model_validate(
        {
            **spec.model_dump(exclude_unset=True),
            "input": {"path": path, "shard_bytes": 256 * 1024},
            "output": str(folder / "out"),
        }
    )


def main() -> None:
    """Labels the documents and prints the busy share of the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="a spec whose model is at hand; its tokenizer is used")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=16, help="documents of a batch")
    parser.add_argument("--batch-ms", type=float, default=10.0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        spec = with_many_documents(load_spec(args.spec), folder, args.documents)
        on_gpu = replace(place(spec.model, this_machine()), gpus=1)
        job = make_job(spec, on_gpu, cache_dir())
        store = open_store(spec.output, {})
        work = plan(job, store).work_items
        record_specs(store, job.versions)
        readers = load_readers(job, asks=False)
        device = SleepingDevice(spec.model_parts, args.batch, args.batch_ms / 1_000)
        for reader in readers:
            vars(reader)["_engine"] = device
            reader.load_tokenizer()
        places = Places(shards_at_work(job))
        with ThreadPoolExecutor(shards_at_work(job)) as threads:
            list(threads.map(lambda w: label_shard(job, readers, store, w, turn=places.of), work))
    finally:
        shutil.rmtree(folder)
    print(
        f"{len(work):,} shards, {len(device.at_work):,} batches of {args.batch} documents and "
        f"{args.batch_ms:g} ms: the device was at work for {device.busy_share:.1%} of the time"
    )


if __name__ == "__main__":
    main()
