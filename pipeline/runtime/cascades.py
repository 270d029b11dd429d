"""Cascades: which documents a later stage is asked about, and the answers of all stages as one.

Entry points: `Cascades.items` and `Cascades.joined`. The answers of a stage are cells of their own,
found by the text as all others: the first stage labels whole shards, a later one slices of them,
with the texts that the stages before it did not decide. A task with `explain` has two: its answers,
and the continuations of those that its condition names. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.fitted.calibration import Calibration
from pipeline.hashes import canonical_json
from pipeline.ledger.blocks import LabelCost, ShardCounts
from pipeline.ledger.cells import Answers, WorkItem, committed
from pipeline.ledger.columns import (
    ADDED,
    DOCUMENTS_FILE_COLUMNS,
    EXPLANATION,
    EXPLANATION_TYPE,
    RAW,
    STAGE,
    answer_columns,
    answers_type,
    probabilities,
    structs,
)
from pipeline.ledger.failed_rows import READ_THREADS, counts_of
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import LabelFile, commit_labels, read_file
from pipeline.ledger.label_rows import with_calibrated
from pipeline.ledger.reuse import AnswerCache, overlaid
from pipeline.ledger.text_index import Hashes, leading_bits
from pipeline.runtime.calibration_files import stored_calibrations
from pipeline.runtime.job import Job, Plan
from pipeline.runtime.matching import matched, texts_item
from pipeline.sources.documents import OK
from pipeline.sources.rule import Rule
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import Store

Bools = NDArray[np.bool_]
_NO_COST = LabelCost(0.0, 0, 0, 0, 0)
# What a condition of `explain` may name, beside the column of its task.
_CONDITION_COLUMNS = ("doc_id", "n_chars", "status")


@dataclass(frozen=True, slots=True)
class _Stage:
    """The answers to one stage of one task that the output has."""

    job: Job
    task: TaskSpec  # as the stage asks it
    items: Mapping[str, WorkItem]  # by shard: it names the shards with answers to its texts

    def answers(
        self, cache: AnswerCache, sid: str, documents: pa.Table, *, retry: bool
    ) -> pa.StructArray:
        """[docs] rows of label files, null without an answer; failed rows only without `retry`."""
        work, name = self.items[sid], self.task.name
        # — a retry does not take quarantined rows for answers
        own = cache.find(replace(work, retry=int(retry)), documents, 0).answers.get(name)
        failed = None if retry else cache.find(work, documents, 0, failed=True).answers.get(name)
        stored = [answers for answers in (own, failed) if answers is not None]
        return pc.coalesce(*stored) if stored else pa.nulls(documents.num_rows)


@dataclass(frozen=True, slots=True)
class _Reached:
    """How far the documents of a shard came."""

    documents: pa.Table
    stage: NDArray[np.int8]  # [docs]: the stage that decided, from 1; 0: none yet
    answers: Sequence[pa.StructArray]  # by stage
    waiting: Bools  # [docs]: those without an answer to the last of the stages that were looked at


class Cascades:
    """The cascades of a job, in the shards that a plan lacks their labels of.

    Args:
        job: The whole job.
        store: The output.
        planned: The whole job's plan. Shards without a documents file are left out.
    """

    def __init__(self, job: Job, store: Store, planned: Plan) -> None:
        self._job, self._store, self._planned = job, store, planned
        self._cache = AnswerCache(store)
        self._works: dict[str, list[WorkItem]] = {task.name: [] for task in job.spec.in_stages}
        self._named = conditions(job.spec)
        for work in planned.work_items:
            if work.shard.id in planned.done.documents and self._works.keys() & {*work.tasks}:
                (name,) = work.tasks  # `by_reader` gives each cascade its own items
                self._works[name].append(work)

    def items(self, number: int, *, retry: bool) -> Iterator[tuple[Job, list[WorkItem]]]:
        """For each job of the stage with this number, from 0, the texts that it is asked about.

        With `retry` these include texts that it was asked about before and that failed. A text that
        several shards have is asked about in the first of them.
        """
        items: defaultdict[str, list[WorkItem]] = defaultdict(list)
        jobs = {}
        for name, works in self._works.items():
            asking = self._job.stage_jobs(name)
            if number >= len(asking) or not works:
                continue
            stages = self._stages(name, number + 1)
            texts = self._waiting(works, stages, retry=retry)
            own = asking[number]
            jobs[own.run_id] = own
            items[own.run_id] += self._slices(stages, works, texts, retry=retry)
        for run_id, of_job in items.items():
            if of_job:
                yield jobs[run_id], of_job

    def joined(self) -> Iterator[ShardCounts]:
        """Commits the answers of all stages as one; shards that lack some are left out."""
        for name, works in self._works.items():
            stages = self._stages(name, len(self._job.stage_jobs(name))) if works else []
            join = partial(self._join, stages=stages)
            with ThreadPoolExecutor(READ_THREADS) as pool:
                yield from (counts for counts in pool.map(join, works) if counts is not None)

    def _stages(self, name: str, count: int) -> list[_Stage]:
        """The first stages of a task, with the answers that the output has now."""
        stages = []
        items = tuple(WorkItem(work.shard, (name,), documents=False) for work in self._works[name])
        for job in self._job.stage_jobs(name)[:count]:
            done = committed(self._store, {name: job.fp[name]}, None)
            answers = Answers(done)
            # — as if nothing was labelled: the answers are found by their texts
            plan = matched(job, self._store, replace(self._planned, work_items=items), newest=True)
            by_shard = {}
            for item in plan.work_items:
                own = answers.of_shard(item.shard.id, [name])
                reuse = item.reuse if own is None else (own, *item.reuse)
                by_shard[item.shard.id] = replace(item, reuse=reuse)
            task = next(task for task in job.spec.tasks if task.name == name)
            stages.append(_Stage(job, task, by_shard))
        return stages

    def _reached(
        self, work: WorkItem, stages: Sequence[_Stage], *, retry: bool = False
    ) -> _Reached:
        """How far the shard's documents came, as if the last of these stages decided all others.

        With `retry`, what it failed to answer waits for it again.
        """
        sid = work.shard.id
        documents = read_file(self._store, documents_key(sid), list(DOCUMENTS_FILE_COLUMNS))
        is_open = np.array(pc.equal(documents.column("status").cast(pa.string()), OK), np.bool_)
        decided_by = np.zeros(documents.num_rows, np.int8)
        waiting, by_stage = np.zeros_like(is_open), []
        for number, stage in enumerate(stages, 1):
            is_last = number == len(stages)
            answers = stage.answers(self._cache, sid, documents, retry=retry and is_last)
            is_answered = np.array(answers.is_valid(), np.bool_)
            waiting = is_open & ~is_answered
            decided = is_open & is_answered
            if not is_last and decided.any():
                decided &= self._decides(stage, documents, answers)
            decided_by[decided] = number
            by_stage.append(answers)
            is_open &= is_answered & ~decided
        return _Reached(documents, decided_by, by_stage, waiting)

    def _decides(self, stage: _Stage, documents: pa.Table, answers: pa.StructArray) -> Bools:
        """[docs]: which answered documents no later stage is asked about.

        A document whose answer failed is one of them: its row says why.
        """
        name = stage.task.name
        if name in self._job.thresholds:
            p = probabilities(answers, RAW, list(stage.task.labels))  # [docs, labels]
            return np.isnan(p).any(axis=1) | self._job.thresholds[name].decides(p)
        has_label = np.array(pc.is_valid(answers.field("label")), np.bool_)
        if (rule := self._named.get(name)) is None:
            return ~has_label
        rows = flattened(answers)
        if (calibration := self._calibration(stage)) is not None:
            rows = with_calibrated(rows, calibration)
        columns = [structs(documents).field(column) for column in _CONDITION_COLUMNS]
        schema = condition_schema(self._task(name))
        batch = pa.record_batch(
            [*columns, structs(rows).cast(schema.field(name).type)], schema=schema
        )
        named = pc.fill_null(rule.verdicts(batch), False)
        return ~(has_label & np.array(named, np.bool_))

    def _calibration(self, stage: _Stage) -> Calibration | None:
        """The calibration of the task, if it has one."""
        name, job = stage.task.name, stage.job
        own = {name: job.contextual[name]} if name in job.contextual else {}
        files = {**job.calibrations, **stored_calibrations(self._store, own, lambda _tasks: {})}
        return files[name].calibration if name in files else None

    def _task(self, name: str) -> TaskSpec:
        return next(task for task in self._job.spec.tasks if task.name == name)

    def _waiting(
        self, works: Sequence[WorkItem], stages: Sequence[_Stage], *, retry: bool
    ) -> dict[str, Hashes]:
        """By shard, the texts that reach the last of these stages and have no answer to it."""

        def texts_of(work: WorkItem) -> Hashes:
            reached = self._reached(work, stages, retry=retry)
            hashes = reached.documents.column("content_hash").combine_chunks()
            return np.unique(leading_bits(hashes.filter(pa.array(reached.waiting))))

        with ThreadPoolExecutor(READ_THREADS) as pool:
            return dict(zip((w.shard.id for w in works), pool.map(texts_of, works), strict=True))

    def _slices(
        self,
        stages: Sequence[_Stage],
        works: Sequence[WorkItem],
        texts: Mapping[str, Hashes],
        *,
        retry: bool,
    ) -> Iterator[WorkItem]:
        """For the last stage, the texts of each shard that no shard before it has."""
        stage = stages[-1]
        hashes = np.concatenate([np.empty(0, np.uint64), *texts.values()])
        _, firsts = np.unique(hashes, return_index=True)
        is_first = np.zeros(len(hashes), np.bool_)
        is_first[firsts] = True
        edges = np.cumsum([len(of_shard) for of_shard in texts.values()])[:-1]
        parts = zip(np.split(hashes, edges), np.split(is_first, edges), strict=True)
        for work, (of_shard, is_own) in zip(works, parts, strict=True):
            own = of_shard[is_own]
            if len(own):
                # — what failed is asked again in a slice of its own, and not in the one that exists
                salt = self._job.run_id if retry else ""
                item = texts_item(work.shard, (stage.task.name,), own.tobytes(), salt=salt)
                if stage.job.continues:  # — it reads the answers that it continues
                    item = replace(item, reuse=stages[0].items[work.shard.id].reuse)
                yield replace(item, classified=stage.task.classifier is not None)

    def _join(self, work: WorkItem, stages: Sequence[_Stage]) -> ShardCounts | None:
        """Commits the shard's label file; None if a document has no answer yet."""
        (name,) = work.tasks
        reached = self._reached(work, stages)
        status = reached.documents.column("status").cast(pa.string()).to_pylist()
        undecided = reached.stage == 0
        if any(undecided[row] and each == OK for row, each in enumerate(status)):
            return None
        task = self._task(name)
        table, metadata = _unanswered(reached.documents, status, task), self._job.metadata(task)
        if task.explain is not None:
            answers, continuations = reached.answers
            if answers.null_count < len(answers):
                table = overlaid(table, answers)
            if (calibration := self._calibration(stages[0])) is not None:
                table = with_calibrated(table, calibration)
                metadata["calibration"] = canonical_json(calibration.to_json()).decode()
            explained = explanations(continuations, reached.stage == len(stages))
            table = table.append_column(EXPLANATION, explained)
        else:
            for number, answers in enumerate(reached.answers, 1):
                if (reached.stage == number).any():
                    chosen = pc.if_else(pa.array(reached.stage == number), answers, None)
                    table = overlaid(table, chosen)
            stage = pa.array(reached.stage, pa.int8(), mask=undecided)
            table = table.append_column(STAGE, stage)
        fp = self._job.fp[name]
        file = LabelFile(name, fp, table, metadata, work.retry)
        created = commit_labels(self._store, work.shard, file)
        rows = table.num_rows
        labels = Counter(table.column("label").drop_null().to_pylist())
        by_stage = Counter(str(number) for number in reached.stage[~undecided])
        return ShardCounts(
            sid=work.shard.id,
            rows=rows,
            created=int(created),
            status=Counter(table.column("status").to_pylist()),
            labels={name: dict(labels)},
            cost=_NO_COST,
            stages={} if task.explain else {name: dict(by_stage)},
            files={name: counts_of(file)} if created else {},
        )


def _unanswered(documents: pa.Table, status: Sequence[str], task: TaskSpec) -> pa.Table:
    """The rows of a label file without any answer."""
    rows = documents.num_rows
    names = [name for name in answer_columns(task) if name not in ADDED]
    columns = {
        field.name: pa.nulls(rows, field.type) for field in answers_type(names, list(task.labels))
    }
    columns |= {
        "label": columns["label"].dictionary_encode(),
        "n_tokens": pa.array(np.zeros(rows, np.int32)),
        "n_chunks": pa.array(np.zeros(rows, np.int16)),
        "status": pa.array(status, pa.string()).dictionary_encode(),
    }
    return pa.table({"doc_id": documents.column("doc_id"), **columns})


def conditions(spec: JobSpec) -> dict[str, Rule]:
    """By task, the condition of its `explain`, if it has one; SpecError unless it can be read."""
    return {
        task.name: Rule(
            task.explain.when, condition_schema(task), place=f"tasks.{place}.explain.when"
        )
        for place, task in enumerate(spec.tasks)
        if task.explain is not None and task.explain.when is not None
    }


def condition_schema(task: TaskSpec) -> pa.Schema:
    """The columns that the condition of the task's `explain` may name."""
    types = dict(zip(_CONDITION_COLUMNS, (pa.string(), pa.int64(), pa.string()), strict=True))
    return pa.schema([*types.items(), (task.name, _answer_type(task))])


def _answer_type(task: TaskSpec) -> pa.StructType:
    return answers_type(answer_columns(task.unexplained), list(task.labels))


def explanations(continuations: pa.StructArray, named: Bools) -> pa.StructArray:
    """[docs] the column `explanation`: null where there is no continuation."""
    if pa.types.is_null(continuations.type):
        return pa.nulls(len(named), EXPLANATION_TYPE)
    text = continuations.field("text")
    columns = [pc.struct_field(continuations, field.name) for field in EXPLANATION_TYPE]
    has_text = np.array(text.is_valid(), np.bool_) & np.array(continuations.is_valid(), np.bool_)
    return pa.StructArray.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, EXPLANATION_TYPE, strict=True)],
        fields=list(EXPLANATION_TYPE),
        mask=pa.array(~(has_text & named)),
    )


def flattened(answers: pa.StructArray) -> pa.Table:
    """Rows of label files as a table; null in all columns where there is no answer."""
    return pa.Table.from_arrays(answers.flatten(), names=[field.name for field in answers.type])
