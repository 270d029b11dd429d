"""What the Ray actors hold: `Tokenise` reads documents, `LabelDocuments` asks the model.

Imports torch. The driver must not import this module: `graph` imports it inside the actors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from pipeline.inference.continuations import Continuation, ContinuationEngine, ShardContinuations
from pipeline.inference.engine import Engine
from pipeline.inference.images import as_document
from pipeline.inference.labels.prompt_tokens import answered_suffixes
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_tokenizer
from pipeline.inference.memory import disable_malloc_trim
from pipeline.inference.shard_answers import ShardAnswers
from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.blocks import (
    LabelCost,
    LabelledDocuments,
    LabelledShard,
    Reuse,
    TokenisedShard,
    work_items_of,
)
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS, EXPLANATION_TYPE
from pipeline.ledger.failed_rows import is_failed_status
from pipeline.ledger.failpoints import failpoint, failpoints_set
from pipeline.ledger.reuse import AnswerCache, known_status, text_identities, unanswered
from pipeline.runtime.assembly import (
    DocumentReader,
    contextual_calibrations,
    continuation_engine,
    job_engine,
    labelled_documents,
    local_model,
)
from pipeline.runtime.calibration_files import CalibrationFile, stored_calibrations
from pipeline.runtime.classifier_files import TextClassifiers
from pipeline.runtime.job import Job
from pipeline.runtime.progress import READING, Send, ShardProgress, ignore, work_report
from pipeline.runtime.reading import read_slices
from pipeline.sources.documents import QUARANTINED, images_of
from pipeline.stores.store import open_store

_CONTINUED = pa.struct([("label", pa.string()), *EXPLANATION_TYPE])


class Tokenise:
    """Reads a shard's documents and turns their text into token ids, one row a document."""

    def __init__(self, job: Job, reuse: Reuse, *, send: Send = ignore) -> None:
        self.job = job
        self._reuse = reuse
        self._send = send
        self._classifiers = TextClassifiers(job.spec, job.classifiers, Path(job.cache_dir))
        self._store = open_store(job.spec.output, job.spec.storage_options)
        self._answers = AnswerCache(self._store)

    @cached_property
    def _reader(self) -> DocumentReader:
        folder = local_model(self.job, self._send)
        return DocumentReader.of_job(self.job, folder, load_tokenizer(folder))

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
        if self.job.continues:
            return self._answered_slice(work, documents, known.answers)
        reused = known_status(known.answers, documents.num_rows)
        if not work.tasks or work.classified:
            reads = documents.column("status").to_pylist()
            reused = [status or read for status, read in zip(reused, reads, strict=True)]
        chunks, status = self._chunked(documents, reused)
        images = None
        if "image" in documents.column_names:
            asked = pa.array([bool(of_row) for of_row in chunks])
            images = pc.if_else(asked, documents.column("image").combine_chunks(), None)
        return TokenisedShard(
            work=work,
            documents=documents.select(DOCUMENTS_FILE_COLUMNS),
            chunks=pa.array(chunks, pa.list_(pa.list_(pa.int32()))),
            status=status,
            images=images,
            known=known.answers,
            sources=known.sources,
            classified=self._classifiers.answers(
                work.tasks if work.classified else (),
                documents,
                unanswered(documents, known.answers),
            ),
        )

    def _chunked(
        self, documents: pa.Table, unread: Sequence[str | None]
    ) -> tuple[list[list[NDArray[np.int32]]], list[str]]:
        """The chunks and the status of each document; `unread` has that of those left out."""
        chunks: list[list[NDArray[np.int32]]] = []
        status: list[str] = []
        reads = documents.column("status").to_pylist()
        columns = documents.column("text"), reads, images_of(documents), unread
        for text, read, image, known in zip(*columns, strict=True):
            if known is not None:
                chunks.append([])
                status.append(known)
                continue
            tokens, fitted = self._reader.chunks(text.as_py(), read, image)
            # — as arrays: Python integers would take ten times the memory
            chunks.append([np.array(chunk, np.int32) for chunk in tokens])
            status.append(fitted)
        return chunks, status

    @cached_property
    def _suffixes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """By task and label, the token ids of the question and this answer."""
        tokenizer = load_tokenizer(local_model(self.job, self._send))
        return answered_suffixes(tokenizer, self.job.spec.prompt, self.job.spec.tasks)[1]

    def _answered_slice(
        self, work: WorkItem, documents: pa.Table, answers: Mapping[str, pa.StructArray]
    ) -> TokenisedShard:
        """Some documents, each followed by the question and its answer; of chunks, the first."""
        (task,) = work.tasks
        # — of the rows in memory, none may be of the item
        labels = answers[task].field("label").to_pylist() if answers else [None] * len(documents)
        reads = documents.column("status").to_pylist()
        unread = [
            read if label is None else None for label, read in zip(labels, reads, strict=True)
        ]
        chunks, status = self._chunked(documents, unread)
        texts = [
            [np.array([*chunk, *self._suffixes[task][label]], np.int32) for chunk in of_row[:1]]
            for label, of_row in zip(labels, chunks, strict=True)
        ]
        return TokenisedShard(
            work=work,
            documents=documents.select(DOCUMENTS_FILE_COLUMNS),
            chunks=pa.array(texts, pa.list_(pa.list_(pa.int32()))),
            status=status,
            known=answers,
            sources=pa.nulls(len(texts), pa.string()),
        )


class LabelDocuments:
    """Holds a model and answers a shard's missing tasks, or continues answers, one row a document.

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
            _ = self._continuer if job.continues else self._loaded
        stored_calibrations(self._store, job.contextual, self._measure)

    @cached_property
    def _loaded(self) -> tuple[Engine, PreTrainedTokenizerBase]:
        return job_engine(self.job, self._send)

    @cached_property
    def _continuer(self) -> tuple[ContinuationEngine, PreTrainedTokenizerBase]:
        return continuation_engine(self.job, self._send)

    def _measure(self, tasks: Sequence[str]) -> dict[str, CalibrationFile]:
        engine, tokenizer = self._loaded
        return contextual_calibrations(self.job, engine, DocumentTokenizer(tokenizer), tasks)

    def __call__(self, block: pa.Table) -> Iterable[pa.Table]:
        """The labelled shard; none if the time of the run is over."""
        if self.job.is_over:
            return
        shard = TokenisedShard.from_table(block)
        if self.job.continues:
            yield self._continued(shard).to_table()
            return
        tasks = [task for task in self.job.spec.tasks if task.name in shard.work.tasks]
        chunks = shard.chunks.to_pylist()
        if shard.images is not None:
            pairs = zip(chunks, shard.images, strict=True)
            chunks = [[as_document(each, image.as_py()) for each in row] for row, image in pairs]
        answers = ShardAnswers(chunks, tasks, text_identities(shard.documents))
        progress = ShardProgress(
            self._send, shard.work, rows=answers.asked_rows, slowest_s=self._slowest_s
        )
        seconds = self._ask(shard, answers, progress) if answers.asked_rows else 0.0
        answers.add_classified(shard.classified, unanswered(shard.documents, shard.known))
        self._slowest_s = progress.slowest_s
        labelled = labelled_documents(shard.documents, answers, shard.status)
        progress.finish(shard.work.rows, sum(map(is_failed_status, labelled.status)))
        cost = LabelCost(seconds, answers.asked_rows, **asdict(answers.usage))
        yield LabelledShard(shard.work, labelled, shard.known, shard.sources, cost).to_table()

    def _ask(self, shard: TokenisedShard, answers: ShardAnswers, progress: ShardProgress) -> float:
        """Asks the model about every row; the seconds that it took, without loading the model."""
        engine, _ = self._loaded

        def ask(start: int, end: int) -> None:
            answers.label_rows(engine, start, end, progress.advance)

        return self._attempt(shard, ask, answers.fail_rows)

    def _continued(self, shard: TokenisedShard) -> LabelledShard:
        """The shard with the continuations of its answers."""
        (task,) = shard.work.tasks
        texts = [text[0] if text else [] for text in shard.chunks.to_pylist()]
        rows = ShardContinuations(texts, text_identities(shard.documents), self.job.continues[task])
        progress = ShardProgress(
            self._send, shard.work, rows=rows.asked_rows, slowest_s=self._slowest_s
        )
        seconds, columns = 0.0, pa.nulls(rows.rows, _CONTINUED)
        if rows.asked_rows:
            engine, tokenizer = self._continuer

            def decode(start: int, end: int) -> None:
                rows.decode_rows(engine, start, end, progress.advance)

            seconds = self._attempt(shard, decode, rows.fail_rows)
            labels = shard.known[task].field("label").to_pylist()
            pairs = zip(labels, rows.continuations(), strict=True)
            columns = pa.array([_row(tokenizer, *pair) for pair in pairs], _CONTINUED)
        self._slowest_s = progress.slowest_s
        status = rows.statuses(shard.status)
        progress.finish(shard.work.rows, sum(map(is_failed_status, status)))
        labelled = LabelledDocuments(
            documents=shard.documents,
            n_tokens=np.array([len(text) for text in texts], np.int32),
            n_chunks=np.array([len(text) for text in shard.chunks.to_pylist()], np.int16),
            status=status,
            scores={},
        )
        cost = LabelCost(seconds, rows.asked_rows, **asdict(rows.usage))
        return LabelledShard(shard.work, labelled, {}, shard.sources, cost, {task: columns})

    def _attempt(
        self,
        shard: TokenisedShard,
        ask: Callable[[int, int], None],
        fail_rows: Callable[[Iterable[int], str], None],
    ) -> float:
        """Asks about the rows, and finds those that kill their worker; the seconds it took."""
        doc_ids = shard.documents.column("doc_id")

        def ask_marked(start: int, end: int) -> None:
            for doc_id in doc_ids[start:end] if failpoints_set() else ():
                failpoint(f"document {doc_id}")
            ask(start, end)

        started = time.perf_counter()
        attempts = Attempts(self._store, attempt_name(self.job.fp, shard.work), self.job.run_id)
        fail_rows(attempts.run(len(shard.chunks), ask_marked), QUARANTINED)
        return time.perf_counter() - started


def _row(
    tokenizer: PreTrainedTokenizerBase, label: str | None, continuation: Continuation | None
) -> dict[str, object] | None:
    """An answer and what follows it; None without a continuation."""
    if continuation is None:
        return None
    ids = list(continuation.token_ids)
    tokens = [
        {"token": tokenizer.decode([token]), "p": p}
        for token, p in zip(ids, continuation.p, strict=True)
    ]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return {"label": label, "text": text, "tokens": tokens}
