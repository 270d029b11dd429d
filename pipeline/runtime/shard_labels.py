"""The labels of one shard: its steps are answered one after the other, each where its condition is.

Entry point: `ShardLabels.labelled`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import LoadError
from pipeline.hashes import canonical_json
from pipeline.ledger.attempts import ALONE_OR_NOT, Attempts
from pipeline.ledger.columns import Bools, labels_of, only, overlaid
from pipeline.ledger.counts import LabelCost, ShardCounts
from pipeline.ledger.failed_rows import is_failed_status
from pipeline.ledger.failpoints import failpoint, failpoints_set
from pipeline.ledger.label_files import TAKEN_OVER, LabelFile
from pipeline.ledger.label_rows import unanswered_rows
from pipeline.runtime.cascades import StagedTask
from pipeline.runtime.conditions import accepted_by, input_names
from pipeline.runtime.job import Job
from pipeline.runtime.progress import LabelProgress, Send
from pipeline.runtime.readers import JobReader
from pipeline.runtime.reading import ReadShard, answered, readable
from pipeline.sources.condition import input_columns
from pipeline.sources.documents import QUARANTINED, SKIPPED
from pipeline.spec.tasks import TaskSpec


@dataclass(frozen=True, slots=True)
class Step:
    """What one reader answers of a task: all of it, or a stage of its cascade."""

    task: TaskSpec  # of the whole job
    stage: int  # from 0
    reader: JobReader
    asked: TaskSpec  # what the reader answers

    @property
    def version(self) -> str:
        """The name of the version of the task that the reader answers."""
        return self.reader.version(self.task.name)

    @property
    def by_model(self) -> bool:
        """Whether a model answers, and not a classifier."""
        return self.asked.classifier is None


class ShardLabels:
    """Collects the answers to the missing tasks of one shard.

    Args:
        job: The whole job.
        readers: What answers; a cascade's stages are in their order.
        shard: The shard.
    """

    def __init__(self, job: Job, readers: Sequence[JobReader], shard: ReadShard) -> None:
        self._job, self._readers, self._shard = job, readers, shard
        self._staged = {
            task.name: StagedTask(task, job.thresholds[task.name]) for task in job.spec.cascades
        }
        self._documents, self._work = shard.documents, shard.work
        self._rows = self._documents.num_rows
        self._status = self._documents.column("status").cast(pa.string()).to_pylist()
        self._readable = readable(self._documents, shard.inside)
        self._tasks = [task for task in job.spec.tasks if task.name in shard.work.tasks]
        self._steps = [
            Step(task, stage, reader, reader.job.spec.task(task.name))
            for task in self._tasks
            for stage, reader in enumerate(r for r in readers if task.name in r.job.fp)
        ]
        # By version: [docs] rows of label files, null without an answer.
        self._answers: dict[str, pa.StructArray] = dict(shard.answers)
        self._costs: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._unjudged: dict[str, int] = {}  # by task, the rows on which its condition fails

    def labelled(
        self, attempts: Attempts, send: Send, turn: ALONE_OR_NOT
    ) -> tuple[list[LabelFile], ShardCounts]:
        """The shard's label files and counts. Finds the documents that kill their worker."""
        open_rows, rows_for_model = self._open_rows()
        progress = LabelProgress(send, self._work, rows_for_model)
        if open_rows or len(self._readers) > 1:
            doc_ids = self._documents.column("doc_id")

            def ask(start: int, end: int) -> None:
                for doc_id in doc_ids[start:end] if failpoints_set() else ():
                    failpoint(f"document {doc_id}")
                self._ask(start, end, progress)

            for row in attempts.run(self._rows, ask, turn):
                self._status[row] = QUARANTINED
        # — first what a later choice of thresholds reuses: it is of no use before the shard is done
        stages = [self._stage_file(step) for step in self._steps if step.task.name in self._staged]
        files = [self._task_file(task) for task in self._tasks]
        counts = self._counts(files)
        progress.finish(self._rows, sum(n for s, n in counts.status.items() if is_failed_status(s)))
        # — of a retry, a task that names another first: without the other, both are tried once more
        return [*stages, *(files[::-1] if self._work.retry else files)], counts

    def _ask(self, start: int, end: int, progress: LabelProgress) -> None:
        """Answers the steps about the rows from `start` to before `end`.

        Steps of one reader whose conditions are known are answered in one reading.
        """
        within = np.zeros(self._rows, np.bool_)
        within[start:end] = True
        left = list(self._steps)
        while left:
            waiting = {step.task.name for step in left}
            ready = [step for step in left if self._is_ready(step, left, waiting)]
            first = min(ready, key=lambda step: self._readers.index(step.reader)).reader
            now = [step for step in ready if step.reader is first]
            left = [step for step in left if step not in now]
            by_model = {}
            for step in now:
                asked = within & self._asked(step) & ~self._answered(step.version)
                if step.by_model and asked.any():
                    by_model[step.task.name] = asked
                elif asked.any():
                    loaded(partial(first.load_classifier, step.asked))
                    more = partial(progress.advance, 0, 0.0)
                    answers = first.classify(step.asked, self._documents, asked, more)
                    self._add(step.version, answers)
            if by_model:
                self._ask_model(first, by_model, progress)
            failpoint(f"stage {self._readers.index(first) + 1} asked")

    def _is_ready(self, step: Step, left: Sequence[Step], waiting: set[str]) -> bool:
        """Whether all that the condition of a step depends on is answered."""
        earlier = any(s.task is step.task and s.stage < step.stage for s in left)
        return not earlier and waiting.isdisjoint(self._job.named_by(step.task.name))

    def _ask_model(
        self, reader: JobReader, by_model: Mapping[str, Bools], progress: LabelProgress
    ) -> None:
        """Adds what a reader's model answers about [docs] by task."""
        loaded(reader.load_tokenizer)
        started = time.perf_counter()
        chunks, status = reader.tokenise(self._documents, np.any([*by_model.values()], axis=0))
        if any(map(len, chunks)):
            loaded(reader.load)
        by_task, read, usage = reader.label(
            self._documents, chunks, status, by_model, progress.advance
        )
        for name, answers in by_task.items():
            self._add(reader.version(name), answers)
        seconds = time.perf_counter() - started
        number = str(self._readers.index(reader))
        self._costs[number].update(asdict(LabelCost(seconds, read, **asdict(usage))))

    def _add(self, version: str, answers: pa.StructArray) -> None:
        known = self._answers.get(version)
        self._answers[version] = answers if known is None else overlaid(answers, known)

    def _answered(self, version: str) -> Bools:
        return answered(self._answers.get(version), self._rows)

    def _accepted(self, task: TaskSpec) -> Bools:
        """[docs]: which readable documents of the slice the condition of a task accepts."""
        if task.when is None:
            return self._readable
        named = {name: self._rows_of(name) for name in self._job.named_by(task.name)}
        met, self._unjudged[task.name] = accepted_by(
            self._job.spec, task, self._documents, named, self._input_values
        )
        return self._readable & met

    @cached_property
    def _input_values(self) -> pa.Table | None:
        """[docs] the columns of the input that conditions name."""
        names = input_names(self._tasks)
        options = self._job.spec.input.storage_options
        return input_columns(self._work.shard, names, options) if names else None

    def _asked(self, step: Step) -> Bools:
        """[docs]: which documents a step is asked about, whether they are answered or not."""
        asked = self._accepted(step.task)
        for before in self._steps:
            if before.task is step.task and before.stage < step.stage:
                answers = self._answers.get(before.version)
                if answers is None:
                    return np.zeros_like(asked)
                asked = asked & self._answered(before.version)
                asked &= ~self._staged[step.task.name].decides(answers)
        return asked

    def _open_rows(self) -> tuple[int, int]:
        """The most rows that the first steps are asked about, and those of them by a model.

        Equal texts count once each.
        """
        asked = {True: np.zeros(self._rows, np.bool_), False: np.zeros(self._rows, np.bool_)}
        for step in self._steps:
            if step.stage == 0:
                asked[step.by_model] |= self._readable & ~self._answered(step.version)
        return int((asked[True] | asked[False]).sum()), int(asked[True].sum())

    def _rows_of(self, name: str) -> pa.StructArray:
        """[docs] the rows of a task's label file, of those that are answered by now."""
        if name in self._shard.known:
            return self._shard.known[name]
        task = next(task for task in self._tasks if task.name == name)
        steps = [step for step in self._steps if step.task is task]
        accepted = self._accepted(task)
        rows = unanswered_rows(self._status_of(accepted), task)
        answers = [self._answers.get(step.version) for step in steps]
        answers = [None if a is None else only(a, accepted) for a in answers]
        if task.name in self._staged:
            return self._staged[task.name].rows(rows, answers)
        return overlaid(answers[0], rows)

    def _status_of(self, asked: Bools) -> list[str]:
        """[docs] the status of documents without an answer, of a question about some of them."""
        out = ~self._shard.inside | (self._readable & ~asked)
        return [SKIPPED if is_out else own for own, is_out in zip(self._status, out, strict=True)]

    def _task_file(self, task: TaskSpec) -> LabelFile:
        """The task's label file."""
        steps = [step for step in self._steps if step.task is task]
        metadata, fp = self._job.metadata(task), self._job.fp[task.name]
        for step in steps:
            metadata |= step.reader.metadata if step.reader.job.fp[task.name] == fp else {}
        if reused := self._shard.reused.get(steps[0].version):
            metadata[TAKEN_OVER] = canonical_json(dict(reused)).decode()
        rows = self._rows_of(task.name)
        return LabelFile(task.name, fp, self._work.shard.id, rows, metadata, self._work.retry)

    def _stage_file(self, step: Step) -> LabelFile:
        """The answers of a stage, for later choices of thresholds."""
        own, asked = step.asked, self._asked(step)
        rows = unanswered_rows(self._status_of(asked), own)
        if (answers := self._answers.get(step.version)) is not None:
            rows = overlaid(only(answers, asked), rows)
        fp, sid = step.reader.job.fp[own.name], self._work.shard.id
        metadata = step.reader.job.metadata(own) | step.reader.metadata
        return LabelFile(own.name, fp, sid, rows, metadata, self._work.retry)

    def _counts(self, files: Sequence[LabelFile]) -> ShardCounts:
        inside = self._shard.inside
        kept = pa.array(inside)
        status = pa.array(self._status, pa.string()).filter(kept)
        labels, answered, skipped, stages = {}, {}, {}, {}
        for file in files:
            own = file.rows.filter(kept)
            labels[file.task] = dict(Counter(labels_of(own).to_pylist()))
            answered[file.task] = len(own.field("margin").drop_null())
            of_task = own.field("status")
            is_skipped = pc.equal(of_task, SKIPPED)
            skipped[file.task] = pc.sum(is_skipped).as_py() or 0
            status = pc.if_else(is_skipped, status, _worse(status, of_task))
            if file.task in self._staged:
                decided = Counter(map(str, own.field("stage").drop_null().to_pylist()))
                stages[file.task] = dict(decided)
        reused = [sum(of_version.values()) for of_version in self._shard.reused.values()]
        return ShardCounts(
            sid=self._work.shard.id,
            rows=int(inside.sum()),
            status=dict(Counter(status.to_pylist())),
            labels=labels,
            answered=answered,
            skipped=skipped,
            costs={stage: LabelCost(**cost) for stage, cost in self._costs.items()},
            outside=int((~inside).sum()),
            undecided=self._shard.undecided + max(self._unjudged.values(), default=0),
            reused=max(reused, default=0),
            stages=stages,
        )


def loaded(load: Callable[[], object]) -> None:
    """Loads what a worker needs. LoadError, because the rows are not the cause."""
    try:
        load()
    except Exception as error:
        raise LoadError(error) from error


def _worse(status: pa.StringArray, other: pa.StringArray) -> pa.StringArray:
    """[docs] the status, or the other one where only that says that the document failed.

    A document that is `ok` so far has the other status.
    """
    failed = pa.array(
        [reason for reason in pc.unique(other).to_pylist() if is_failed_status(reason)], pa.string()
    )
    is_worse = pc.or_(pc.is_in(other, value_set=failed), pc.equal(status, "ok"))
    return pc.if_else(is_worse, other, status)
