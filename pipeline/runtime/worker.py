"""What the Ray actors hold: `ReadShards` reads documents, `LabelDocuments` asks the models.

Imports torch. The driver must not import this module: `graph` imports it inside the actors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from pipeline.errors import StorageError
from pipeline.inference.memory import disable_malloc_trim
from pipeline.ledger.blocks import ReadShard, work_items_of
from pipeline.ledger.cells import WorkItem, version_name
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import read_file
from pipeline.ledger.reuse import StoredAnswers
from pipeline.runtime.cascades import StagedTask
from pipeline.runtime.job import Job
from pipeline.runtime.progress import READING, LabelProgress, Send, ignore, work_report
from pipeline.runtime.readers import JobReader, answered, readable
from pipeline.runtime.reading import output_of, read_slices
from pipeline.runtime.shard_labels import ShardLabels
from pipeline.sources.slices import SliceMask


class ReadShards:
    """Reads the documents of shards, and finds the answers that the output has."""

    def __init__(self, job: Job, *, send: Send = ignore) -> None:
        self.job = job
        self._send = send
        self._store = output_of(job)
        self._stored = StoredAnswers(self._store)

    def __call__(self, block: pa.Table) -> Iterable[pa.Table]:
        for work in work_items_of(block):
            if self.job.is_over:
                return
            yield self.shard(work).to_table()

    def shard(self, work: WorkItem) -> ReadShard:
        """The shard of a work item."""
        self._send(work_report(READING, work))
        known = None
        stored: dict[str, pa.StructArray] = {}
        reused: dict[str, dict[str, int]] = {}
        if not work.documents:
            key = documents_key(work.shard.id)
            known = read_file(self._store, key, list(DOCUMENTS_FILE_COLUMNS))
        for version, sources in work.sources.items() if known is not None else ():
            answers, counts = self._stored.find(work.shard, known, sources, is_retry=work.retry > 0)
            if answers is not None:
                stored[version], reused[version] = answers, dict(counts)
        mask = SliceMask(work.shard, self.job.spec.input.storage_options)
        read: Iterable[tuple[int, pa.Table]] = [(0, known)]
        if known is None or self._has_open_rows(work, known, mask, stored):
            read = read_slices(self.job, self._store, work)
        parts, inside = [], []
        for start, part in read:
            parts.append(part)
            inside.append(mask.inside(part, start))
        documents = pa.concat_tables(parts)
        if known is not None and not documents["doc_id"].equals(known["doc_id"]):
            raise StorageError(
                f"{self._store.url}/{documents_key(work.shard.id)}: its doc_id are not those of "
                f"{work.shard.path}; nothing was committed; `assay verify` reports more"
            )
        return ReadShard(work, documents, np.concatenate(inside), stored, reused, mask.failed)

    def _has_open_rows(
        self, work: WorkItem, known: pa.Table, mask: SliceMask, stored: Mapping[str, pa.StructArray]
    ) -> bool:
        """Whether a document may need an answer that the output does not have."""
        if len(self.job.readers) > 1:
            return bool(work.tasks)
        rows, fp = readable(known, mask.inside(known, 0)), self.job.readers[0].fp
        answers = [stored.get(version_name(task, fp[task])) for task in work.tasks if task in fp]
        return any((rows & ~answered(of_task, known.num_rows)).any() for of_task in answers)


class LabelDocuments:
    """Holds the models and answers a shard's missing tasks.

    With `asks` the constructor loads the first model. Otherwise the first document that needs it
    does: no model is loaded where every answer is reused. `send` takes reports of the progress.
    """

    def __init__(self, job: Job, *, asks: bool, send: Send = ignore) -> None:
        disable_malloc_trim()
        failpoint("loading")
        self.job = job
        self._progress = LabelProgress(send)
        self._store = output_of(job)
        self._readers = [JobReader(reader, send) for reader in job.readers]
        if asks and job.readers[0].spec.model_tasks:
            self._readers[0].load()
        self._staged = {
            task.name: StagedTask(task, job.thresholds[task.name]) for task in job.spec.cascades
        }

    def __call__(self, block: pa.Table) -> Iterable[pa.Table]:
        """The labelled shard; none if the time of the run is over."""
        if not self.job.is_over:
            shard = ReadShard.from_table(block)
            labels = ShardLabels(self.job, self._readers, self._staged, shard)
            yield labels.labelled(self._store, self._progress).to_table()
