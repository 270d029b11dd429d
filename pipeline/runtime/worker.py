"""What the Ray actors hold: `Tokenise` reads documents, `LabelDocuments` asks the models.

Imports torch. The driver must not import this module: `graph` imports it inside the actors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import StorageError
from pipeline.inference.memory import disable_malloc_trim
from pipeline.ledger.blocks import Bools, TokenisedShard, work_items_of
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS, overlaid
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import read_file
from pipeline.ledger.reuse import StoredAnswers
from pipeline.runtime.cascades import StagedTask, conditions
from pipeline.runtime.job import Job
from pipeline.runtime.progress import READING, LabelProgress, Send, ignore, work_report
from pipeline.runtime.readers import JobReader, answered, readable
from pipeline.runtime.reading import read_slices
from pipeline.runtime.shard_labels import ShardLabels
from pipeline.sources.slices import SliceMask
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import open_store

_Parts = list[TokenisedShard]


class Tokenise:
    """Reads a shard's documents and tokenises the texts that the first model is asked about.

    It also finds the answers that the output has, and asks the first classifiers.
    """

    def __init__(self, job: Job, *, send: Send = ignore) -> None:
        self.job = job
        self._send = send
        self._store = open_store(job.spec.output, job.spec.storage_options)
        self._stored = StoredAnswers(self._store)
        self._reader = JobReader(job.readers[0], send)

    def __call__(self, block: pa.Table) -> Iterable[pa.Table]:
        for work in work_items_of(block):
            if self.job.is_over:
                return
            yield self.shard(work).to_table()

    def shard(self, work: WorkItem) -> TokenisedShard:
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
        parts: _Parts = []
        for start, documents in read:
            inside = mask.inside(documents, start)
            parts.append(self._part(work, documents, inside, start, stored))
            del documents  # the text of one part is freed before the next is read
        shard = replace(_joined(parts, stored, reused), undecided=mask.failed)
        if known is not None and not shard.documents["doc_id"].equals(known["doc_id"]):
            raise StorageError(
                f"{self._store.url}/{documents_key(work.shard.id)}: its doc_id are not those of "
                f"{work.shard.path}; nothing was committed; `assay verify` reports more"
            )
        return shard

    def _has_open_rows(
        self, work: WorkItem, known: pa.Table, mask: SliceMask, stored: Mapping[str, pa.StructArray]
    ) -> bool:
        """Whether a document may need an answer that the output does not have."""
        if len(self.job.readers) > 1:
            return bool(work.tasks)
        inside = mask.inside(known, 0)
        return any(rows.any() for _, rows in self._waiting(work, known, inside, 0, stored))

    def _waiting(
        self,
        work: WorkItem,
        documents: pa.Table,
        inside: Bools,
        start: int,
        stored: Mapping[str, pa.StructArray],
    ) -> Iterator[tuple[TaskSpec, Bools]]:
        """The missing tasks of the first reader, and [docs] the documents without an answer."""
        rows = readable(documents, inside)
        for task in self._reader.job.spec.tasks:
            if task.name in work.tasks:
                answers = stored.get(self._reader.version(task.name))
                yield task, rows & ~answered(answers, documents.num_rows, start)

    def _part(
        self,
        work: WorkItem,
        documents: pa.Table,
        inside: Bools,
        start: int,
        stored: Mapping[str, pa.StructArray],
    ) -> TokenisedShard:
        """What the shard has of some documents, from its row `start` on."""
        reader, asked = self._reader, np.zeros(documents.num_rows, np.bool_)
        classified = {}
        for task, waiting in self._waiting(work, documents, inside, start, stored):
            if task.classifier is None:
                asked |= waiting
            else:
                classified[reader.version(task.name)] = reader.classify(task, documents, waiting)
        chunks, status = reader.tokenise(documents, asked)
        images = None
        if "image" in documents.column_names:
            has_chunks = pa.array([bool(of_row) for of_row in chunks])
            images = pc.if_else(has_chunks, documents.column("image").combine_chunks(), None)
        # — later readers tokenise the text for themselves
        columns = [*DOCUMENTS_FILE_COLUMNS, *(["text"] if len(self.job.readers) > 1 else [])]
        return TokenisedShard(
            work=work,
            documents=documents.select(columns),
            inside=inside,
            chunks=pa.array(chunks, pa.list_(pa.list_(pa.int32()))),
            status=status,
            answers=classified,
            images=images,
        )


def _joined(
    parts: _Parts, stored: dict[str, pa.StructArray], reused: dict[str, dict[str, int]]
) -> TokenisedShard:
    """The shard of these parts, with the stored answers."""
    first = parts[0]
    classified = {
        version: pa.concat_arrays([part.answers[version] for part in parts])
        for version in first.answers
    }
    new = {version for version, rows in classified.items() if rows.null_count < len(rows)}
    new |= {version for version, of_version in reused.items() if of_version}
    return TokenisedShard(
        work=first.work,
        documents=pa.concat_tables([part.documents for part in parts]),
        inside=np.concatenate([part.inside for part in parts]),
        chunks=pa.concat_arrays([part.chunks for part in parts]),
        status=[status for part in parts for status in part.status],
        answers=stored
        | {version: overlaid(stored.get(version), rows) for version, rows in classified.items()},
        new=tuple(new),
        reused=reused,
        images=None if first.images is None else pa.concat_arrays([p.images for p in parts]),
    )


class LabelDocuments:
    """Holds the models and answers a shard's missing tasks.

    With `asks` the constructor loads the first model. Otherwise the first document that needs it
    does: no model is loaded where every answer is reused. `send` takes reports of the progress.
    """

    def __init__(self, job: Job, *, asks: bool, send: Send = ignore) -> None:
        disable_malloc_trim()
        self.job = job
        self._progress = LabelProgress(send)
        self._store = open_store(job.spec.output, job.spec.storage_options)
        self._readers = [JobReader(reader, send) for reader in job.readers]
        if asks and job.readers[0].spec.model_tasks:
            self._readers[0].load()
        calibrations = {task: file.calibration for task, file in job.calibrations.items()}
        rules = conditions(job.spec)
        self._staged = {
            task.name: StagedTask(
                task,
                job.thresholds.get(task.name),
                rules.get(task.name),
                calibrations.get(task.name),
            )
            for task in job.spec.in_stages
        }

    def __call__(self, block: pa.Table) -> Iterable[pa.Table]:
        """The labelled shard; none if the time of the run is over."""
        if not self.job.is_over:
            shard = TokenisedShard.from_table(block)
            labels = ShardLabels(self.job, self._readers, self._staged, shard)
            yield labels.labelled(self._store, self._progress).to_table()
