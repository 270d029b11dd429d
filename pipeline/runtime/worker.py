"""What a worker does with one shard: read it, answer what is missing, commit it.

Entry point: `label_shard`. Imports torch. The driver must not import this module: `graph` imports
it inside the actors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from threading import Lock

from pipeline.errors import ModelError
from pipeline.inference.memory import disable_malloc_trim
from pipeline.ledger.attempts import Attempts, Turn, attempt_name
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import ShardCounts
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.label_files import commit_shard
from pipeline.runtime.assembly import Models
from pipeline.runtime.job import Job
from pipeline.runtime.placement import processor_formats
from pipeline.runtime.progress import COMMITTING, READING, Send, ignore, work_report
from pipeline.runtime.readers import LoadedReader
from pipeline.runtime.reading import committing, read_shard, with_texts
from pipeline.runtime.shard_labels import ShardLabels
from pipeline.stores.store import Store


def load_readers(job: Job, *, asks: bool, send: Send = ignore) -> list[LoadedReader]:
    """The job's readers, in the order in which they read a document.

    With `asks` the first model and its tokenizer are loaded now. Otherwise the first document that
    needs them loads them: nothing is loaded where every answer is reused. `send` takes reports of
    the progress.
    """
    disable_malloc_trim()
    failpoint("loading")
    is_auto = job.spec.model.dtype == "auto" and job.placement.device == "cpu"
    if is_auto and job.placement.dtype == "bfloat16" and "bfloat16" not in processor_formats():
        # — a machine that came after the number format of the run was chosen
        raise ModelError(
            "this machine's processors do not multiply bfloat16 at speed, which those of the other "
            "machines do; write dtype: float32, or start machines of one kind"
        )
    working, models = Lock(), Models()
    readers = [LoadedReader(reader, send, working, models, job.run) for reader in job.readers]
    if asks and job.readers[0].spec.model_tasks:
        readers[0].load()
        readers[0].load_tokenizer()
    return readers


def label_shard(
    job: Job,
    readers: Sequence[LoadedReader],
    store: Store,
    work: WorkItem,
    *,
    send: Send = ignore,
    turn: Turn = nullcontext,
) -> ShardCounts:
    """Reads a shard, answers its missing tasks, and commits its files; what was done, in numbers.

    Several shards may be labelled at once with the readers of `load_readers`. `send` takes reports
    of the progress, and `turn` is that of `Attempts.run`.
    """
    send(work_report(READING, work))
    attempts = Attempts(store, attempt_name(job.fp, work), job.run.id)
    shard = read_shard(job, store, work, attempts)
    for reader in readers:
        reader.begin_shard()
    labels = ShardLabels(job, readers, shard)
    if labels.asks and "text" not in shard.documents.column_names:
        labels = ShardLabels(job, readers, with_texts(job, store, shard, attempts))
    labels.answer(attempts, send, turn)
    send(work_report(COMMITTING, work))
    with committing(attempts):
        files, counts = labels.files()
        made = commit_shard(
            store,
            work.shard,
            shard.documents,
            files,
            # — the documents were compared with those of the documents file when they were read
            has_documents=not work.documents,
            since=job.run.since,
        )
    for reader in readers:
        reader.end_shard()
    if work.tasks:
        attempts.forget()
    return ShardCounts(work.shard.id, work.tasks, counts, tuple(made))
