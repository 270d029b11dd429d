"""The labels of one shard: its steps are answered in order, each where its condition accepts.

Entry point: `ShardLabels`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import LoadError
from pipeline.inference.images import IMAGES_AT_ONCE
from pipeline.ledger.attempts import Attempts, Turn
from pipeline.ledger.columns import (
    STAGE,
    Bools,
    labels_of,
    only,
    overlaid,
    probabilities,
    with_column,
)
from pipeline.ledger.counts import Counts
from pipeline.ledger.failpoints import failpoint, failpoints_set
from pipeline.ledger.label_files import TAKEN_OVER, LabelFile, failed_rows
from pipeline.ledger.label_rows import unanswered_rows
from pipeline.ledger.reuse import text_identities
from pipeline.runtime.conditions import accepted_by, input_columns, input_names
from pipeline.runtime.job import Job, Step
from pipeline.runtime.progress import LabelProgress, Send
from pipeline.runtime.readers import LoadedReader
from pipeline.runtime.reading import ReadShard, readable
from pipeline.sources.documents import OK, QUARANTINED, SKIPPED
from pipeline.spec.tasks import TaskSpec


class ShardLabels:
    """Collects the answers to the missing tasks of one shard.

    `readers` answer, as `Job.readers`. The shard must have texts if `asks` is true.
    """

    def __init__(self, job: Job, readers: Sequence[LoadedReader], shard: ReadShard) -> None:
        self._job, self._readers, self._shard = job, readers, shard
        self._documents, self._work = shard.documents, shard.work
        self._rows = self._documents.num_rows
        self._status = self._documents.column("status").cast(pa.string()).to_pylist()
        self._readable = readable(self._documents, shard.inside)
        self._tasks = [task for task in job.spec.tasks if task.name in shard.work.tasks]
        self._steps = [step for step in job.steps if step.task in shard.work.tasks]
        # By version: [docs] rows of label files, null without an answer.
        self._answers: dict[str, pa.StructArray] = dict(shard.answers)
        self._counts = Counts()
        self._met: dict[str, Bools] = {}  # by task, [docs]: its condition with the answers so far
        self._unjudged: dict[str, int] = {}  # by task, the rows on which its condition fails

    @cached_property
    def asks(self) -> bool:
        """Whether a document needs an answer that the output does not have."""
        # — a condition depends on earlier steps alone, and no document needs an answer of those
        return any(
            (self._asked(step) & ~self._answered(step.version)).any() for step in self._steps
        )

    def answer(self, attempts: Attempts, send: Send, turn: Turn) -> None:
        """Answers what is missing. Finds the documents that kill their worker."""
        progress = LabelProgress(send, self._work, self._rows_for_model())
        if not self.asks:
            return
        doc_ids = self._documents.column("doc_id")

        def ask(start: int, end: int) -> None:
            for doc_id in doc_ids[start:end] if failpoints_set() else ():
                failpoint(f"document {doc_id}")
            self._ask(start, end, progress)

        for row in attempts.run(self._rows, ask, turn):
            self._status[row] = QUARANTINED
        self._met.clear()

    def files(self) -> tuple[list[LabelFile], Counts]:
        """The shard's label files, when all its rows are answered, and its counts."""
        # — those of stages first, for other thresholds: no run reads them before the shard is done
        stages = [self._stage_file(step) for step in self._steps if step.thresholds is not None]
        files = [self._task_file(task) for task in self._tasks]
        self._count(files)
        # — of a retry, a task that names another first: without the other, both are tried once more
        return [*stages, *(files[::-1] if self._work.retry else files)], self._counts

    def _ask(self, start: int, end: int, progress: LabelProgress) -> None:
        """Answers the steps about the rows from `start` to before `end`.

        Questions to one model whose conditions are known are answered in one reading, and
        classifiers before them: a condition may depend on a classifier.
        """
        within = np.zeros(self._rows, np.bool_)
        within[start:end] = True
        left = list(self._steps)
        while left:
            ready = [step for step in left if self._is_ready(step, left)]
            first = min(ready, key=lambda step: (step.by_model, step.reader))
            now = [s for s in ready if (s.by_model, s.reader) == (first.by_model, first.reader)]
            left = [step for step in left if step not in now]
            asked = [within & self._asked(s) & ~self._answered(s.version) for s in now]
            needed = [(step, rows) for step, rows in zip(now, asked, strict=True) if rows.any()]
            if needed and first.by_model:
                self._ask_model(self._readers[first.reader], needed, progress)
            elif needed:
                self._classify(self._readers[first.reader], needed, progress)

    def _is_ready(self, step: Step, left: Sequence[Step]) -> bool:
        """Whether all that the condition of a step depends on is answered."""
        named = self._job.named_by(step.task)
        earlier = (s.task in named or (s.task == step.task and s.stage < step.stage) for s in left)
        return not any(earlier)

    def _classify(
        self, reader: LoadedReader, steps: Sequence[tuple[Step, Bools]], progress: LabelProgress
    ) -> None:
        """Adds what a reader's classifiers answer about [docs], by step."""
        for step, asked in steps:
            loaded(partial(reader.load_classifier, step.asked))
            more = partial(progress.advance, 0, 0.0)
            self._add(step.version, reader.classify(step.asked, self._documents, asked, more))

    def _ask_model(
        self, reader: LoadedReader, steps: Sequence[tuple[Step, Bools]], progress: LabelProgress
    ) -> None:
        """Adds what a reader's model answers about [docs], by step."""
        loaded(reader.load_tokenizer)
        started, number = time.perf_counter(), str(self._readers.index(reader))
        rows = np.flatnonzero(np.any([asked for _, asked in steps], axis=0))
        for part in self._together(rows):
            chunks, status = reader.tokenise(self._documents, part)
            if any(map(len, chunks)):
                loaded(reader.load)
            by_task, read, usage = reader.label(
                self._documents,
                chunks,
                status,
                {step.task: asked & part for step, asked in steps},
                partial(progress.advance, of_shard=part.sum() / len(rows)),
            )
            for step, _ in steps:
                if step.task in by_task:
                    self._add(step.version, by_task[step.task])
            self._counts["asked", number] += read
            self._counts["prefix_tokens", number] += usage.prefix_tokens_computed
            self._counts["question_tokens", number] += usage.question_tokens_computed
            if usage.requests:
                self._counts["prompt_tokens", number] += usage.prefix_tokens_computed
                self._counts["answer_tokens", number] += usage.question_tokens_computed
            self._counts["requests", number] += usage.requests
            self._counts["not_returned", number] += round(1e6 * usage.not_returned)
        self._counts["label_ms", number] += round(1_000 * (time.perf_counter() - started))

    def _together(self, rows: NDArray[np.int64]) -> Iterator[Bools]:
        """[docs], a group after the other: those of the rows that are tokenised, and then read.

        The pixels of an image are kept until it is read, so a group has few different images.
        """
        group_of = np.zeros(len(rows), np.int64)
        if "image" in self._documents.column_names:
            texts = text_identities(self._documents.take(pa.array(rows)))
            group_of = texts.dictionary_encode().indices.to_numpy() // IMAGES_AT_ONCE
        for group in np.unique(group_of):
            yield np.isin(np.arange(self._rows), rows[group_of == group])

    def _add(self, version: str, answers: pa.StructArray) -> None:
        known = self._answers.get(version)
        self._answers[version] = answers if known is None else overlaid(answers, known)
        self._met.clear()  # — conditions that name this task may be met by more rows

    def _answered(self, version: str) -> Bools:
        """[docs] whether there is an answer."""
        answers = self._answers.get(version)
        none = np.zeros(self._rows, np.bool_)
        return none if answers is None else np.array(answers.is_valid(), np.bool_)

    def _accepted(self, task: TaskSpec) -> Bools:
        """[docs]: which readable documents the conditions of the run and of a task accept."""
        if task.when is None:
            return self._readable
        if task.name not in self._met:
            named = {name: self._rows_of(name) for name in self._job.named_by(task.name)}
            met, self._unjudged[task.name] = accepted_by(
                self._job.spec, task, self._documents, named, self._input_values
            )
            self._met[task.name] = self._readable & met
        return self._met[task.name]

    @cached_property
    def _input_values(self) -> pa.Table | None:
        """[docs] the columns of the input that conditions name."""
        names = input_names(self._tasks)
        options = self._job.spec.input.storage_options
        return input_columns(self._work.shard, names, options) if names else None

    def _asked(self, step: Step) -> Bools:
        """[docs]: which documents a step is asked about, whether they are answered or not."""
        asked = self._accepted(self._job.spec.task(step.task))
        for before in self._steps_of(step.task)[: step.stage]:
            answers = self._answers.get(before.version)
            if answers is None:
                return np.zeros_like(asked)
            asked = asked & self._answered(before.version) & ~decided(before, answers)
        return asked

    def _rows_for_model(self) -> int:
        """The most rows that a model is asked about first; equal texts count once each."""
        asked = np.zeros(self._rows, np.bool_)
        for step in self._steps:
            if step.stage == 0 and step.by_model:
                asked |= self._readable & ~self._answered(step.version)
        return int(asked.sum())

    def _steps_of(self, task: str) -> list[Step]:
        return [step for step in self._steps if step.task == task]

    def _rows_of(self, name: str) -> pa.StructArray:
        """[docs] the rows of a task's label file, of those that are answered by now."""
        if name in self._shard.known:
            return self._shard.known[name]
        task = next(task for task in self._tasks if task.name == name)
        steps, accepted = self._steps_of(name), self._accepted(task)
        rows = unanswered_rows(self._status_of(accepted), task, self._job.spec.documents)
        answers = [self._answers.get(step.version) for step in steps]
        answers = [None if a is None else only(a, accepted) for a in answers]
        if task.stages:
            return rows_of_stages(rows, steps, answers)
        return overlaid(answers[0], rows)

    def _status_of(self, asked: Bools) -> list[str]:
        """[docs] the status of documents without an answer, of a question about some of them."""
        out = ~self._shard.inside | (self._readable & ~asked)
        return [SKIPPED if is_out else own for own, is_out in zip(self._status, out, strict=True)]

    def _task_file(self, task: TaskSpec) -> LabelFile:
        """The task's label file."""
        steps, fingerprint = self._steps_of(task.name), self._job.fingerprints[task.name]
        metadata = self._job.metadata(fingerprint, steps)
        if len(steps) == 1:  # — the files of several stages have the metadata
            metadata |= self._readers[steps[0].reader].metadata
        if reused := self._shard.reused.get(steps[0].version):
            metadata[TAKEN_OVER] = str(reused)
        rows = self._rows_of(task.name)
        sid, retry = self._work.shard.id, self._work.retry
        return LabelFile(task.name, fingerprint.id, sid, rows, metadata, retry)

    def _stage_file(self, step: Step) -> LabelFile:
        """The answers of a stage, for later choices of thresholds."""
        asked = self._asked(step)
        documents = self._readers[step.reader].reader.spec.documents
        rows = unanswered_rows(self._status_of(asked), step.asked, documents)
        if (answers := self._answers.get(step.version)) is not None:
            rows = overlaid(only(answers, asked), rows)
        fingerprint, sid, retry = step.fingerprint, self._work.shard.id, self._work.retry
        metadata = self._job.metadata(fingerprint, [step])
        metadata |= self._readers[step.reader].metadata
        return LabelFile(step.task, fingerprint.id, sid, rows, metadata, retry)

    def _count(self, files: Sequence[LabelFile]) -> None:
        """Counts the rows of the label files."""
        counts, inside = self._counts, self._shard.inside
        kept = pa.array(inside)
        status = pa.array(self._status, pa.string()).filter(kept)
        for file in files:
            own = file.rows.filter(kept)
            of_task = own.field("status")
            is_skipped = pc.equal(of_task, SKIPPED)
            # — a failure in one task counts, and so does the first status other than `ok`
            is_worse = pc.or_(failed_rows(of_task), pc.equal(status, OK))
            status = pc.if_else(pc.and_not(is_worse, is_skipped), of_task, status)
            counts["answered", file.task] = len(own.field("margin").drop_null())
            counts["skipped", file.task] = pc.sum(is_skipped).as_py() or 0
            counts.count("label", file.task, values=labels_of(own).to_pylist())
            if self._job.spec.task(file.task).stages:
                stages = own.field(STAGE).drop_null().to_pylist()
                counts.count("decided", file.task, values=map(str, stages))
        counts.count("rows", values=status.to_pylist())
        counts["outside",] = int((~inside).sum())
        counts["undecided",] = self._shard.undecided + max(self._unjudged.values(), default=0)
        counts["reused",] = max(self._shard.reused.values(), default=0)


def decided(step: Step, answers: pa.StructArray) -> Bools:
    """[docs]: which answered documents no later stage is asked about.

    A document whose answer failed is one of them: its status has the reason.
    """
    assert step.thresholds is not None, step.task
    labels = tuple(step.asked.labels)
    p = probabilities(answers, list(labels))  # [docs, labels]
    return np.isnan(p).any(axis=1) | step.thresholds.decides(p, labels)


def rows_of_stages(
    unanswered: pa.StructArray,  # [docs]: label rows without an answer
    steps: Sequence[Step],
    answers: Sequence[pa.StructArray | None],  # [docs] by step, or null
) -> pa.StructArray:
    """[docs] the rows of a label file with a cascade: the answers of the stage that decides."""
    rows, open_rows = unanswered, np.ones(len(unanswered), np.bool_)
    decided_by = np.zeros(len(unanswered), np.int8)
    for number, (step, of_step) in enumerate(zip(steps, answers, strict=True), start=1):
        if of_step is None:
            continue
        now = open_rows & np.array(of_step.is_valid(), np.bool_)
        if number < len(steps) and now.any():
            now &= decided(step, of_step)
        rows = overlaid(only(of_step, now), rows)
        decided_by[now] = number
        open_rows &= ~now
    stage = pa.array(decided_by, pa.int8(), mask=decided_by == 0)
    return with_column(rows, STAGE, stage)


def loaded(load: Callable[[], object]) -> None:
    """Loads what a worker needs. LoadError, because the rows are not the cause."""
    try:
        load()
    except Exception as error:
        raise LoadError(error) from error
