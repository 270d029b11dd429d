"""The labels of one shard: its documents pass from reader to reader, until every task has decided.

Entry point: `ShardLabels.labelled`. Imports torch.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.hashes import canonical_json
from pipeline.inference.schedules.batching import Usage
from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.blocks import (
    Bools,
    LabelCost,
    LabelledShard,
    ShardCounts,
    TokenisedShard,
)
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS, only, overlaid
from pipeline.ledger.failed_rows import failed_mask, is_failed_status
from pipeline.ledger.failpoints import failpoint, failpoints_set
from pipeline.ledger.keys import cell_of_part
from pipeline.ledger.label_files import TAKEN_OVER, LabelFile
from pipeline.ledger.label_rows import unanswered_rows, with_calibrated
from pipeline.runtime.cascades import StagedTask
from pipeline.runtime.job import Job
from pipeline.runtime.progress import ShardProgress
from pipeline.runtime.readers import Chunks, Reader, token_chunks
from pipeline.sources.documents import OK, QUARANTINED
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import Store


class ShardLabels:
    """Collects the answers to the missing tasks of one shard.

    Args:
        job: The whole job.
        readers: What answers, in the order in which a document passes from one to the next.
        staged: The tasks with several stages.
        shard: The shard.
    """

    def __init__(
        self,
        job: Job,
        readers: Sequence[Reader],
        staged: Mapping[str, StagedTask],
        shard: TokenisedShard,
    ) -> None:
        self._job, self._readers, self._staged, self._shard = job, readers, staged, shard
        self._documents, self._work = shard.documents, shard.work
        self._rows = self._documents.num_rows
        self._status = self._documents.column("status").cast(pa.string()).to_pylist()
        is_ok = pc.equal(self._documents.column("status").cast(pa.string()), OK)
        self._readable: Bools = shard.inside & np.array(is_ok, np.bool_)
        # By version: [docs] rows of label files, null without an answer.
        self._answers: dict[str, pa.StructArray] = dict(shard.answers)
        self._new = set(shard.new)
        self._decided_by = {task: np.zeros(self._rows, np.int8) for task in staged}
        self._costs: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._chunks: Chunks = token_chunks(shard.chunks, shard.images)

    @property
    def asked_rows(self) -> int:
        """The documents that the first model reads, if no two texts are equal."""
        return sum(1 for of_row in self._chunks if len(of_row))

    def labelled(self, store: Store, progress: ShardProgress) -> LabelledShard:
        """The shard's label files. Finds the documents that kill their worker."""
        if self.asked_rows or len(self._readers) > 1:
            doc_ids = self._documents.column("doc_id")

            def ask(start: int, end: int) -> None:
                for doc_id in doc_ids[start:end] if failpoints_set() else ():
                    failpoint(f"document {doc_id}")
                self._ask(start, end, progress)

            attempts = Attempts(store, attempt_name(self._job.fp, self._work), self._job.run_id)
            for row in attempts.run(self._rows, ask):
                self._status[row] = QUARANTINED
        else:  # — no document has tokens: what could not be tokenised still gets its status
            self._ask(0, self._rows, progress)
        files = [
            self._task_file(task) for task in self._job.spec.tasks if task.name in self._work.tasks
        ]
        counts = self._counts(files)
        progress.finish(self._rows, sum(n for s, n in counts.status.items() if is_failed_status(s)))
        documents = self._documents.select(DOCUMENTS_FILE_COLUMNS)
        # — first what a later choice of thresholds reuses: it is of no use before the shard is done
        return LabelledShard(self._work, documents, [*self._stage_files(), *files], counts)

    def _ask(self, start: int, end: int, progress: ShardProgress) -> None:
        """Answers the tasks about the rows from `start` to before `end`."""
        within = np.zeros(self._rows, np.bool_)
        within[start:end] = True
        waiting = dict.fromkeys(self._work.tasks, self._readable & within)
        stages: Counter[str] = Counter()
        for number, reader in enumerate(self._readers):
            tasks = [task for task in reader.job.spec.tasks if task.name in waiting]
            asked = {
                task.name: waiting[task.name] & ~self._answered(reader.version(task.name))
                for task in tasks
            }
            self._ask_reader(number, reader, tasks, asked, progress)
            failpoint(f"stage {number + 1} asked")
            for task in tasks:
                if task.name in self._staged:
                    stages[task.name] += 1
                    self._decide(task.name, reader, stages[task.name], waiting)

    def _ask_reader(
        self,
        number: int,
        reader: Reader,
        tasks: Sequence[TaskSpec],
        asked: Mapping[str, Bools],
        progress: ShardProgress,
    ) -> None:
        by_model = {}
        for task in tasks:
            if not asked[task.name].any():
                continue
            if task.classifier is None:
                by_model[task.name] = asked[task.name]
            elif number:  # the first ones have answered while the shard was read
                answers = reader.classify(task, self._documents, asked[task.name])
                self._add(reader.version(task.name), answers)
        if not by_model:
            return
        chunks, status = self._chunks, self._shard.status
        if number and not reader.job.continues:
            some = np.any([*by_model.values()], axis=0)
            chunks, status = reader.tokenise(self._documents, some)
        if reader.job.continues or any(map(len, chunks)):
            reader.load()
        started = time.perf_counter()
        read, usage = 0, Usage()
        if reader.job.continues:
            for task in tasks:
                if task.name in by_model:
                    first = self._readers_of(task.name)[0].version(task.name)
                    labels = self._answers[first].field("label").to_pylist()
                    answers, of_task, used = reader.continue_answers(
                        task, self._documents, labels, by_model[task.name], progress
                    )
                    self._add(reader.version(task.name), answers)
                    read, usage = read + of_task, usage + used
        else:
            by_task, read, usage = reader.label(self._documents, chunks, status, by_model, progress)
            for name, answers in by_task.items():
                self._add(reader.version(name), answers)
        seconds = time.perf_counter() - started
        self._costs[str(number)].update(asdict(LabelCost(seconds, read, **asdict(usage))))

    def _decide(self, task: str, reader: Reader, stage: int, waiting: dict[str, Bools]) -> None:
        """Notes which documents a stage decided; the others wait for the next one."""
        version = reader.version(task)
        decided = waiting[task] & self._answered(version)
        waiting[task] = decided.copy()
        if stage < len(self._readers_of(task)) and decided.any():
            decided &= self._staged[task].decides(self._documents, self._answers[version])
        self._decided_by[task][decided] = stage
        waiting[task] &= ~decided

    def _add(self, version: str, answers: pa.StructArray) -> None:
        if answers.null_count < len(answers):
            known = self._answers.get(version)
            self._answers[version] = answers if known is None else overlaid(answers, known)
            self._new.add(version)

    def _answered(self, version: str) -> Bools:
        answers = self._answers.get(version)
        if answers is None:
            return np.zeros(self._rows, np.bool_)
        return np.array(answers.is_valid(), np.bool_)

    def _readers_of(self, task: str) -> list[Reader]:
        return [reader for reader in self._readers if task in reader.job.fp]

    def _task_file(self, task: TaskSpec) -> LabelFile:
        """The task's label file."""
        readers = self._readers_of(task.name)
        answers = [self._answers.get(reader.version(task.name)) for reader in readers]
        metadata = self._job.metadata(task)
        rows = unanswered_rows(self._status, task)
        calibration = self._job.calibrations.get(task.name)
        if task.name in self._staged:
            decided_by = self._decided_by[task.name]
            rows = self._staged[task.name].rows(rows, answers, decided_by)
        else:
            rows = overlaid(answers[0], rows)
            if calibration is not None:
                rows = with_calibrated(rows, calibration.calibration)
        if calibration is not None:
            metadata["calibration"] = canonical_json(calibration.calibration.to_json()).decode()
        if reused := self._shard.reused.get(readers[0].version(task.name)):
            metadata[TAKEN_OVER] = canonical_json(dict(reused)).decode()
        rows, cell = only(rows, self._shard.inside), self._work.shard.cell
        fp = self._job.fp[task.name]
        return LabelFile(task.name, fp, cell, rows, metadata, self._work.retry)

    def _stage_files(self) -> Iterator[LabelFile]:
        """The answers of each stage, for later choices of thresholds."""
        for task in self._staged:
            for reader in self._readers_of(task) if task in self._work.tasks else ():
                version = reader.version(task)
                answers = self._answers.get(version)
                if version not in self._new or answers is None:
                    continue
                # — an answer after a failure is in a file of its own, not in the one that exists
                status = pc.if_else(answers.is_valid(), answers.field("status"), OK)
                rows = np.packbits([self._answered(version), failed_mask(status)]).tobytes()
                of_reader = next(each for each in reader.job.spec.tasks if each.name == task)
                yield LabelFile(
                    task,
                    reader.job.fp[task],
                    cell_of_part(self._work.shard.id, rows),
                    answers,
                    reader.job.metadata(of_reader),
                )

    def _counts(self, files: Sequence[LabelFile]) -> ShardCounts:
        inside = self._shard.inside
        kept = pa.array(inside)
        status = pa.array(self._status, pa.string()).filter(kept)
        labels, stages = {}, {}
        for file in files:
            own = file.rows.filter(kept)
            labels[file.task] = dict(Counter(own.field("label").drop_null().to_pylist()))
            of_task = own.field("status")
            status = of_task if file is files[0] else _worse(status, of_task)
            if file.task in self._staged and self._staged[file.task].thresholds is not None:
                decided_by = self._decided_by[file.task]
                by = Counter(map(str, decided_by[decided_by > 0].tolist()))
                stages[file.task] = dict(by)
        reused = [sum(of_version.values()) for of_version in self._shard.reused.values()]
        return ShardCounts(
            sid=self._work.shard.id,
            rows=int(inside.sum()),
            status=dict(Counter(status.to_pylist())),
            labels=labels,
            costs={stage: LabelCost(**cost) for stage, cost in self._costs.items()},
            outside=int((~inside).sum()),
            taken_over=max(reused, default=0),
            stages=stages,
            not_continued=self._not_continued,
        )

    @property
    def _not_continued(self) -> int:
        """The answers that a model should have continued and did not."""
        versions = (
            reader.version(task)
            for reader in self._readers
            for task in (reader.job.continues if self._work.tasks else ())
        )
        stored = [self._answers[version] for version in versions if version in self._new]
        return sum(
            int(is_failed_status(status))
            for answers in stored
            for status in answers.field("status").drop_null().to_pylist()
        )


def _worse(status: pa.StringArray, other: pa.StringArray) -> pa.StringArray:
    """[docs] the status, or the other one where only that says that the document failed."""
    failed = pa.array(
        [each for each in pc.unique(other).to_pylist() if is_failed_status(each)], pa.string()
    )
    return pc.if_else(pc.is_in(other, value_set=failed), other, status)
