"""Uniform samples of documents, with the answers of tasks to them. Entry point: `Sample`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.evaluation.promises import Bools, Groups
from pipeline.ledger.columns import probabilities, structs
from pipeline.ledger.counts import Counts
from pipeline.ledger.label_files import read_file
from pipeline.options import RunOptions
from pipeline.runtime.conditions import drawn_below, drawn_rows, input_columns
from pipeline.runtime.job import Run
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.placement import Placement
from pipeline.runtime.progress import Progress
from pipeline.runtime.run import label
from pipeline.runtime.session import elsewhere, remote_ray
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Result = TypeVar("Result")
Announce = Callable[[Progress], None]


class TimeIsOver(Exception):
    """`--max-hours` ended the labelling of the sample."""


class ShardsFailed(Exception):
    """Shards of the sample cannot be labelled: the sample is drawn again, without them."""


@dataclass(frozen=True, slots=True)
class Answers:
    """A task's answers about the documents of a sample."""

    fp: str  # the raw fingerprint of the task
    p: Floats  # [docs, labels]; NaN without an answer
    tokens: Ints  # [docs], that it read


@dataclass(frozen=True, slots=True)
class Sample:
    """Documents that were drawn, and how any task answers and reads them."""

    spec: JobSpec
    cache_dir: Path
    address: str | None
    options: RunOptions
    announce: Announce
    run: Run  # of which the sample is a part
    share: float  # of all documents, that is drawn
    shards: Sequence[Shard]  # that have these documents: `drawn_from` all
    n: Counts = field(default_factory=Counts)  # of what was labelled for the sample
    failed: set[str] = field(default_factory=set)  # ids of shards that cannot be labelled

    @property
    def rows(self) -> list[tuple[Shard, Ints, Bools]]:
        """By shard, the rows of these documents, and which of them are in the first half.

        All that is [docs] has this order. Everything is fitted to the first half.
        """
        return [(s, *drawn_rows(s.id, s.rows, self.share)) for s in self.shards]

    @property
    def first_half(self) -> Bools:  # [docs]
        return np.concatenate([first for _, _, first in self.rows])

    def answers(self, tasks: Mapping[str, TaskSpec]) -> dict[str, Answers]:
        """The answers of these tasks, each in the place of the spec's task.

        The run that follows judges how many documents fail. TimeIsOver if the run has no time left.
        ShardsFailed if a shard fails that has not failed before.
        """
        own = tuple(tasks.get(task.name, task) for task in self.spec.tasks)
        with label(
            self.spec.model_copy(update={"tasks": own, "max_error_rate": None}),
            cache_dir=self.cache_dir,
            address=self.address,
            options=replace(self.options, publish_partial=False),
            limit=drawn_below(self.share),
            announce=self.announce,
            part_of=self.run,
        ) as labelled:
            self.n.update(labelled.tally.n)
            if labelled.stopped:
                raise TimeIsOver
            failed = {work.shard.id for work in labelled.plan.work_items}
            if failed - self.failed:
                logger.warning("the sample of a cascade is not complete; %s", labelled.left)
            # — of a file that is gone by now, a shard is not in the plan
            gone = {s.id for s in self.shards} - {s.id for s in labelled.plan.shards}
            if not failed | gone <= self.failed:
                self.failed.update(failed, gone)
                raise ShardsFailed
            return {name: self._stored(labelled, task) for name, task in tasks.items()}

    def _stored(self, labelled: Outcome, task: TaskSpec) -> Answers:
        """The answers of a task that has labelled the sample."""
        p, tokens, done = list[Floats](), list[Ints](), labelled.plan.done
        for shard, rows, _ in self.rows:
            key = done.label_key(task.name, shard.id)
            file = structs(read_file(labelled.store, key, ["p", "n_tokens"]))
            own = file.take(pa.array(rows))
            p.append(probabilities(own, list(task.labels)))
            read = pc.fill_null(pc.struct_field(own, "n_tokens"), 0)
            tokens.append(read.to_numpy(zero_copy_only=False))
        fp = labelled.job.fingerprints[task.name].raw.id
        return Answers(fp, np.concatenate(p), np.concatenate(tokens))

    def where_engines_run(self, call: Callable[[], Result], placement: Placement) -> Result:
        """The result of a call: of this process, or on a node of the cluster that runs workers.

        There it has the processors of an engine of this placement.
        """
        with remote_ray(self.address, insecure=self.options.insecure_cluster) as connected:
            if not connected:
                return call()
            from pipeline.runtime.graph import on_a_node  # — imports Ray Data

            where = elsewhere(self.run.unable)
            if placement.gpus:
                return on_a_node(call, num_gpus=placement.gpus, **where)
            return on_a_node(call, num_cpus=placement.threads, **where)

    def values(self, column: str) -> Groups:  # [docs]
        """The value of a column of the input, of each document, as a text."""
        options, texts = self.spec.input.storage_options, list[str]()
        for shard, rows, _ in self.rows:
            values = input_columns(shard, [column], options).to_pydict().get(column, [])
            texts += [str(values[row]) if row < len(values) else "" for row in rows]
        return np.array(texts, np.str_)

    def texts(self, of: Bools) -> tuple[str, ...]:
        """The texts of these documents of the first half, [texts]; others are empty."""
        options, texts = self.spec.input.storage_options, list[str]()
        for shard, rows, first in self.rows:
            asked = of[len(texts) : len(texts) + first.sum()]
            read = [""] * len(asked)
            if asked.any():
                column = pa.concat_tables(read_documents(shard, options))["text"]
                read = column.take(pa.array(rows[first])).to_pylist()
            texts += (text or "" if own else "" for text, own in zip(read, asked, strict=True))
        return tuple(texts)
