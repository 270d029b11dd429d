"""The labels of one shard: its documents pass from reader to reader, until every task has decided.

Entry point: `ShardLabels.labelled`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import LoadError
from pipeline.hashes import canonical_json
from pipeline.ledger.attempts import ALONE_OR_NOT, Attempts
from pipeline.ledger.columns import Bools, labels_of, only, overlaid
from pipeline.ledger.counts import LabelCost, ShardCounts
from pipeline.ledger.failed_rows import failed_mask, is_failed_status
from pipeline.ledger.failpoints import failpoint, failpoints_set
from pipeline.ledger.keys import cell_of_part
from pipeline.ledger.label_files import TAKEN_OVER, LabelFile
from pipeline.ledger.label_rows import unanswered_rows, with_calibrated
from pipeline.runtime.cascades import StagedTask
from pipeline.runtime.job import Job
from pipeline.runtime.progress import LabelProgress
from pipeline.runtime.readers import JobReader
from pipeline.runtime.reading import ReadShard, answered, readable
from pipeline.sources.documents import OK, QUARANTINED
from pipeline.spec.tasks import TaskSpec


class ShardLabels:
    """Collects the answers to the missing tasks of one shard.

    Args:
        job: The whole job.
        readers: What answers, in the order in which a document passes from one to the next.
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
        # The version of each task that each of its readers answers, in their order.
        self._versions: dict[str, list[str]] = {
            task.name: [r.version(task.name) for r in readers if task.name in r.job.fp]
            for task in job.spec.tasks
        }
        # By version: [docs] rows of label files, null without an answer.
        self._answers: dict[str, pa.StructArray] = dict(shard.answers)
        # The versions of which some answers are in no file of the shard.
        self._new = {version for version, of_version in shard.reused.items() if of_version}
        self._decided_by = {task: np.zeros(self._rows, np.int8) for task in self._staged}
        self._costs: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def labelled(
        self, attempts: Attempts, progress: LabelProgress, turn: ALONE_OR_NOT
    ) -> tuple[list[LabelFile], ShardCounts]:
        """The shard's label files and counts. Finds the documents that kill their worker."""
        open_rows, rows_for_model = self._open_rows()
        progress.begin(self._work, rows_for_model)
        if open_rows or len(self._readers) > 1:
            doc_ids = self._documents.column("doc_id")

            def ask(start: int, end: int) -> None:
                for doc_id in doc_ids[start:end] if failpoints_set() else ():
                    failpoint(f"document {doc_id}")
                self._ask(start, end, progress)

            for row in attempts.run(self._rows, ask, turn):
                self._status[row] = QUARANTINED
        files = [
            self._task_file(task) for task in self._job.spec.tasks if task.name in self._work.tasks
        ]
        counts = self._counts(files)
        progress.finish(self._rows, sum(n for s, n in counts.status.items() if is_failed_status(s)))
        # — first what a later choice of thresholds reuses: it is of no use before the shard is done
        return [*self._stage_files(), *files], counts

    def _ask(self, start: int, end: int, progress: LabelProgress) -> None:
        """Answers the tasks about the rows from `start` to before `end`."""
        within = np.zeros(self._rows, np.bool_)
        within[start:end] = True
        rows = readable(self._documents, self._shard.inside) & within
        waiting = dict.fromkeys(self._work.tasks, rows)
        stages: Counter[str] = Counter()
        for number, reader in enumerate(self._readers):
            tasks = [task for task in reader.job.spec.tasks if task.name in waiting]
            by_model = {}
            for task in tasks:
                version = reader.version(task.name)
                asked = waiting[task.name] & ~self._answered(version)
                if task.classifier is None and asked.any():
                    by_model[task.name] = asked
                elif asked.any():
                    loaded(partial(reader.load_classifier, task))
                    more = partial(progress.advance, 0, 0.0)
                    self._add(version, reader.classify(task, self._documents, asked, more))
            if by_model:
                self._ask_model(number, reader, by_model, progress)
            failpoint(f"stage {number + 1} asked")
            for task in tasks:
                if task.name in self._staged:
                    stages[task.name] += 1
                    self._decide(task.name, stages[task.name], waiting)

    def _ask_model(
        self, number: int, reader: JobReader, by_model: Mapping[str, Bools], progress: LabelProgress
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
        self._costs[str(number)].update(asdict(LabelCost(seconds, read, **asdict(usage))))

    def _decide(self, task: str, stage: int, waiting: dict[str, Bools]) -> None:
        """Notes which documents a stage decided; the others wait for the next one."""
        version = self._versions[task][stage - 1]
        decided = waiting[task] & self._answered(version)
        waiting[task] = decided.copy()
        if stage < len(self._versions[task]) and decided.any():
            decided &= self._staged[task].decides(self._answers[version])
        self._decided_by[task][decided] = stage
        waiting[task] &= ~decided

    def _add(self, version: str, answers: pa.StructArray) -> None:
        if answers.null_count < len(answers):
            known = self._answers.get(version)
            self._answers[version] = answers if known is None else overlaid(answers, known)
            self._new.add(version)

    def _open_rows(self) -> tuple[int, int]:
        """The rows that the first reader is asked about, and those that its model is asked about.

        Equal texts count once each.
        """
        reader, rows = self._readers[0], readable(self._documents, self._shard.inside)
        asked = {True: np.zeros_like(rows), False: np.zeros_like(rows)}  # by a model, or not
        for task in reader.job.spec.tasks:
            if task.name in self._work.tasks:
                by_model = task.classifier is None
                asked[by_model] |= rows & ~self._answered(reader.version(task.name))
        return int((asked[True] | asked[False]).sum()), int(asked[True].sum())

    def _answered(self, version: str) -> Bools:
        return answered(self._answers.get(version), self._rows)

    def _task_file(self, task: TaskSpec) -> LabelFile:
        """The task's label file."""
        versions = self._versions[task.name]
        answers = [self._answers.get(version) for version in versions]
        metadata = self._job.metadata(task)
        fp = self._job.fp[task.name]
        for reader in self._readers:
            metadata |= reader.metadata if reader.job.fp.get(task.name) == fp else {}
        rows = unanswered_rows(self._status, task)
        calibrations = self._job.calibrations_of(task)
        if task.name in self._staged:
            decided_by = self._decided_by[task.name]
            rows = self._staged[task.name].rows(rows, answers, decided_by)
        else:
            rows = overlaid(answers[0], rows)
            if calibrations:
                rows = with_calibrated(rows, task, calibrations)
        if calibrations:
            content = [own.to_json() for own in calibrations]
            described = content if task.kind == "multi" else content[0]
            metadata["calibration"] = canonical_json(described).decode()
        if reused := self._shard.reused.get(versions[0]):
            metadata[TAKEN_OVER] = canonical_json(dict(reused)).decode()
        rows, cell = only(rows, self._shard.inside), self._work.shard.cell
        return LabelFile(task.name, fp, cell, rows, metadata, self._work.retry)

    def _stage_files(self) -> Iterator[LabelFile]:
        """The answers of each stage, for later choices of thresholds."""
        for reader in self._readers:
            for task in reader.job.spec.tasks:
                version = reader.version(task.name)
                answers = self._answers.get(version) if version in self._new else None
                if answers is None or task.name not in self._staged.keys() & {*self._work.tasks}:
                    continue
                # — an answer after a failure is in a file of its own, not in the one that exists
                status = pc.if_else(answers.is_valid(), answers.field("status"), OK)
                rows = np.packbits([self._answered(version), failed_mask(status)]).tobytes()
                cell, fp = cell_of_part(self._work.shard.id, rows), reader.job.fp[task.name]
                metadata = reader.job.metadata(task) | reader.metadata
                yield LabelFile(task.name, fp, cell, answers, metadata)

    def _counts(self, files: Sequence[LabelFile]) -> ShardCounts:
        inside = self._shard.inside
        kept = pa.array(inside)
        status = pa.array(self._status, pa.string()).filter(kept)
        labels, answered, stages = {}, {}, {}
        for file in files:
            own = file.rows.filter(kept)
            labels[file.task] = dict(Counter(labels_of(own).to_pylist()))
            answered[file.task] = len(own.field("margin").drop_null())
            of_task = own.field("status")
            status = of_task if file is files[0] else _worse(status, of_task)
            if file.task in self._staged:
                decided_by = self._decided_by[file.task]
                by = Counter(map(str, decided_by[decided_by > 0].tolist()))
                stages[file.task] = dict(by)
        reused = [sum(of_version.values()) for of_version in self._shard.reused.values()]
        return ShardCounts(
            sid=self._work.shard.id,
            rows=int(inside.sum()),
            status=dict(Counter(status.to_pylist())),
            labels=labels,
            answered=answered,
            costs={stage: LabelCost(**cost) for stage, cost in self._costs.items()},
            outside=int((~inside).sum()),
            undecided=self._shard.undecided,
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
    """[docs] the status, or the other one where only that says that the document failed."""
    failed = pa.array(
        [reason for reason in pc.unique(other).to_pylist() if is_failed_status(reason)], pa.string()
    )
    return pc.if_else(pc.is_in(other, value_set=failed), other, status)
