"""What the Ray actors hold: `Tokenise` reads documents, `LabelDocuments` asks the model.

Imports torch. The driver must not import this module: `graph` imports it inside the actors.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_tokenizer
from pipeline.inference.memory import disable_malloc_trim
from pipeline.inference.shard_answers import ShardAnswers
from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.blocks import LabelCost, LabelledShard, Reuse, TokenisedShard, work_items_of
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.failpoints import failpoint, failpoints_set
from pipeline.ledger.reuse import AnswerCache, known_status, text_identities
from pipeline.runtime.assembly import (
    chunk_document,
    contextual_calibrations,
    job_engine,
    labelled_documents,
    local_model,
)
from pipeline.runtime.calibration_files import CalibrationFile, stored_calibrations
from pipeline.runtime.job import Job
from pipeline.runtime.outcome import is_failed_status
from pipeline.runtime.progress import READING, Send, ShardProgress, ignore, work_report
from pipeline.runtime.reading import read_slices
from pipeline.sources.documents import QUARANTINED
from pipeline.stores.store import open_store


class Tokenise:
    """Reads a shard's documents and turns their text into token ids, one row a document."""

    def __init__(self, job: Job, reuse: Reuse, *, send: Send = ignore) -> None:
        self.job = job
        self._reuse = reuse
        self._send = send
        self._tokenizer = DocumentTokenizer(load_tokenizer(local_model(job, send)))
        self._store = open_store(job.spec.output, job.spec.storage_options)
        self._answers = AnswerCache(self._store)

    def __call__(self, block: pa.Table) -> Iterable[pa.Table]:
        for work in work_items_of(block, self._reuse):
            if self.job.is_over:
                return
            report = work_report(READING, work)
            self._send(report)
            yield self._tokenised(work)
            self._send(replace(report, finished=True))

    def _tokenised(self, work: WorkItem) -> pa.Table:
        slices = []
        for start, documents in read_slices(self.job, self._store, work):
            slices.append(self._slice(work, documents, start).to_table())
            del documents  # the text of one slice is freed before the next slice is read
        # — a slice without any reused answer has no column for them
        return pa.concat_tables(slices, promote_options="default")

    def _slice(self, work: WorkItem, documents: pa.Table, start: int) -> TokenisedShard:
        """Some documents of the shard, from its row `start` on."""
        known = self._answers.find(work, documents, start)
        chunks: list[list[NDArray[np.int32]]] = []
        status: list[str] = []
        for text, read, reused in zip(
            documents.column("text"),
            documents.column("status").to_pylist(),
            known_status(known.answers, documents.num_rows),
            strict=True,
        ):
            if reused or not work.tasks:
                chunks.append([])
                status.append(reused or read)
                continue
            rules = self.job.spec.documents
            tokens, fitted = chunk_document(self._tokenizer, text.as_py(), read, rules)
            # — as arrays: Python integers would take ten times the memory
            chunks.append([np.array(chunk, np.int32) for chunk in tokens])
            status.append(fitted)
        return TokenisedShard(
            work=work,
            documents=documents.drop_columns(["text"]),
            chunks=pa.array(chunks, pa.list_(pa.list_(pa.int32()))),
            status=status,
            known=known.answers,
            sources=known.sources,
        )


class LabelDocuments:
    """Holds a model and answers a shard's missing tasks, one row a document.

    With `asks` the constructor loads the model. Otherwise the first document that needs it does:
    no model is loaded where every answer is reused. The constructor also measures the contextual
    calibrations that the output lacks. `send` takes reports of the progress.
    """

    def __init__(self, job: Job, *, asks: bool, send: Send = ignore) -> None:
        disable_malloc_trim()
        self.job = job
        self._store = open_store(job.spec.output, job.spec.storage_options)
        self._send = send
        self._slowest_s: float | None = None  # the longest time between two batches
        if asks:
            _ = self._loaded
        stored_calibrations(self._store, job.contextual, self._measure)

    @cached_property
    def _loaded(self) -> tuple[LabelEngine, PreTrainedTokenizerBase]:
        return job_engine(self.job, self._send)

    def _measure(self, tasks: Sequence[str]) -> dict[str, CalibrationFile]:
        engine, tokenizer = self._loaded
        return contextual_calibrations(self.job, engine, DocumentTokenizer(tokenizer), tasks)

    def __call__(self, block: pa.Table) -> Iterable[pa.Table]:
        """The labelled shard; none if the time of the run is over."""
        if self.job.is_over:
            return
        shard = TokenisedShard.from_table(block)
        tasks = [task for task in self.job.spec.tasks if task.name in shard.work.tasks]
        answers = ShardAnswers(shard.chunks.to_pylist(), tasks, text_identities(shard.documents))
        progress = ShardProgress(
            self._send, shard.work, rows=answers.asked_rows, slowest_s=self._slowest_s
        )
        seconds = self._ask(shard, answers, progress) if answers.asked_rows else 0.0
        self._slowest_s = progress.slowest_s
        labelled = labelled_documents(shard.documents, answers, shard.status)
        progress.finish(shard.work.rows, sum(map(is_failed_status, labelled.status)))
        cost = LabelCost(seconds, answers.asked_rows, **asdict(answers.usage))
        yield LabelledShard(shard.work, labelled, shard.known, shard.sources, cost).to_table()

    def _ask(self, shard: TokenisedShard, answers: ShardAnswers, progress: ShardProgress) -> float:
        """Asks the model about every row; the seconds that it took, without loading the model."""
        engine, _ = self._loaded
        doc_ids = shard.documents.column("doc_id")

        def ask(start: int, end: int) -> None:
            for doc_id in doc_ids[start:end] if failpoints_set() else ():
                failpoint(f"document {doc_id}")
            answers.label_rows(engine, start, end, progress.advance)

        started = time.perf_counter()
        attempts = Attempts(self._store, attempt_name(self.job.fp, shard.work), self.job.run_id)
        answers.fail_rows(attempts.run(len(answers.chunks), ask), QUARANTINED)
        return time.perf_counter() - started
