"""Uniform samples of documents, with the answers of a task to them. Entry point: `Sampling`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import UnavailableError
from pipeline.evaluation.promises import Bools, Groups
from pipeline.ledger.columns import probabilities
from pipeline.ledger.counts import Counts
from pipeline.ledger.rows import aligned_batches, wide_schema
from pipeline.options import RunOptions
from pipeline.runtime.conditions import drawn_below, draws, input_columns
from pipeline.runtime.job import Job, Run
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.placement import Placement
from pipeline.runtime.progress import Progress
from pipeline.runtime.run import label
from pipeline.runtime.session import remote_ray
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

Floats = NDArray[np.float64]
Result = TypeVar("Result")
Announce = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Documents that were drawn, with answers: the same rows in the same order, whoever answers."""

    rows: pa.Table  # sid, row in the shard, draw, content_hash, and a struct for each task
    share: float  # of all documents; a document with a draw below it is one of them
    fps: Mapping[str, str]  # by task, the raw fingerprint
    job: Job

    @property
    def first_half(self) -> Bools:  # [docs], to which everything is fitted
        drawn: Floats = self.rows["draw"].to_numpy()
        return np.asarray(drawn < self.share / 2, np.bool_)

    @property
    def tokens(self) -> NDArray[Any]:  # [docs], the most that a task read
        tokens = np.zeros(self.rows.num_rows, np.int64)
        for name in self.fps:
            read = pc.struct_field(self.rows[name].combine_chunks(), "n_tokens")
            tokens = np.maximum(tokens, pc.fill_null(read, 0).to_numpy(zero_copy_only=False))
        return tokens

    def p(self, task: TaskSpec) -> Floats:  # [docs, labels]; NaN without an answer
        return probabilities(self.rows[task.name].combine_chunks(), list(task.labels))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the documents of one sample are answered and read, by whichever task."""

    spec: JobSpec
    cache_dir: Path
    address: str | None
    options: RunOptions
    announce: Announce
    run: Run  # of which the sample is a part
    shards: Mapping[str, Shard]  # of the input, by id
    share: float  # of all documents, that is drawn
    n: Counts = field(default_factory=Counts)  # of what was labelled for the sample

    def answered(self, tasks: Mapping[str, TaskSpec]) -> Sample:
        """The sample with the answers of these tasks, each in the place of the spec's task.

        UnavailableError if some are missing.
        """
        own = tuple(tasks.get(task.name, task) for task in self.spec.tasks)
        with label(
            self.spec.model_copy(update={"tasks": own}),
            cache_dir=self.cache_dir,
            address=self.address,
            options=replace(self.options, publish_partial=False),
            limit=drawn_below(self.share),
            announce=self.announce,
            part_of=self.run,
        ) as labelled:
            self.n.update(labelled.tally.n)
            if labelled.plan.work_items:  # — files that cannot be read have no documents
                raise UnavailableError(f"the sample of a cascade is not complete; {labelled.left}")
            fps = {name: labelled.job.fingerprints[name].raw.id for name in tasks}
            rows = _drawn(labelled, sorted(tasks), self.share)
            return Sample(rows, self.share, fps, labelled.job)

    def where_engines_run(self, call: Callable[[], Result], placement: Placement) -> Result:
        """The result of a call: of this process, or on a node of the cluster.

        There it has the processors of an engine of this placement.
        """
        with remote_ray(self.address, insecure=self.options.insecure_cluster) as connected:
            if not connected:
                return call()
            from pipeline.runtime.graph import on_a_node  # — imports Ray Data

            if placement.gpus:
                return on_a_node(call, num_gpus=placement.gpus)
            return on_a_node(call, num_cpus=max(1, placement.cores // placement.workers))

    def values(self, sample: Sample, column: str) -> Groups:  # [docs]
        """The value of a column of the input, of each document of the sample, as a text."""
        options, texts = self.spec.input.storage_options, list[str]()
        for shard, rows in self._by_shard(sample.rows):
            values = input_columns(shard, [column], options).to_pydict().get(column, [])
            texts += [str(values[row]) if row < len(values) else "" for row in rows]
        return np.array(texts, np.str_)

    def texts(self, rows: pa.Table) -> tuple[str, ...]:
        """The texts of these rows of a sample."""
        texts = list[str]()
        for shard, own in self._by_shard(rows):
            start = 0
            for documents in read_documents(shard, self.spec.input.storage_options):
                here = [row - start for row in own if start <= row < start + documents.num_rows]
                part = documents["text"].take(pa.array(here, pa.int64()))
                texts += [text or "" for text in part.to_pylist()]
                start += documents.num_rows
                if start > own[-1]:
                    break
        return tuple(texts)

    def _by_shard(self, rows: pa.Table) -> Iterator[tuple[Shard, Sequence[int]]]:
        """The numbers of the rows in each shard, in the order of the table, which is theirs."""
        pairs = zip(rows["sid"].to_pylist(), rows["row"].to_pylist(), strict=True)
        for sid, own in groupby(pairs, itemgetter(0)):
            yield self.shards[sid], [row for _, row in own]


def _drawn(labelled: Outcome, tasks: Sequence[str], share: float) -> pa.Table:
    """The rows of the sample; see `Sample`."""
    wide = wide_schema(labelled.contents, tasks)
    schema = pa.schema([wide.field(name) for name in ("content_hash", *tasks)])
    tables = []
    batches = aligned_batches(labelled.store, labelled.contents, schema)
    for shard, batch in zip(labelled.contents.shards, batches, strict=True):
        of_shard = draws(shard.sid, shard.rows)
        rows = np.flatnonzero(of_shard < share)
        places = {
            "sid": pa.repeat(shard.sid, len(rows)),
            "row": pa.array(rows),
            "draw": pa.array(of_shard[rows]),
        }
        own = pa.Table.from_batches([batch.take(pa.array(rows))])
        for name, values in places.items():
            own = own.append_column(name, values)
        tables.append(own)
    return pa.concat_tables(tables)
