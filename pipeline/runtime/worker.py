"""The workers of the graph: one tokenises documents, one holds a model and labels them.

The one place where the data side meets the model side. Both import torch, so both are built on
the worker; the driver imports this file only by name. Knows nothing of the order of stages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_tokenizer
from pipeline.inference.memory import disable_malloc_trim
from pipeline.inference.shard_answers import ShardAnswers, TaskAnswers
from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.cells import ReusableShard, WorkItem
from pipeline.ledger.failpoints import failpoint, failpoints_set
from pipeline.ledger.reuse import AnswerCache, known_status
from pipeline.runtime.assembly import (
    chunk_document,
    contextual_calibrations,
    job_model,
    job_prompt,
    job_readouts,
    label_engine,
    local_model,
)
from pipeline.runtime.job import Job, work_item_from_json
from pipeline.sources.documents import QUARANTINED
from pipeline.sources.source import check_content, read_documents
from pipeline.spec.schema import ContextualSpec
from pipeline.stores.store import open_store


class Tokenise:
    """Reads a shard's documents and turns their text into token ids, one row a document."""

    def __init__(self, job: Job, earlier: Sequence[Sequence[ReusableShard]]) -> None:
        self.job = job
        self._known = earlier  # where a work's answers may be known, by its place here
        self._tokenizer = DocumentTokenizer(load_tokenizer(local_model(job)))
        self._store = open_store(job.spec.output, job.spec.storage_options)
        self._earlier = AnswerCache(self._store)

    def __call__(self, block: pa.Table) -> Iterable[pa.Table]:
        for row in block.to_pylist():
            work = replace(work_item_from_json(row["work"]), reuse=tuple(self._known[row["reuse"]]))
            yield self._tokenised(row["work"], work)

    def _tokenised(self, written: str, work: WorkItem) -> pa.Table:
        path, piece = work.shard.path, work.shard.piece
        attempts = Attempts(self._store, attempt_name(self.job.fp, work), self.job.run_id)
        tables: list[pa.Table] = []
        rows = 0
        with attempts.reading(f"{path}: rows {piece.start_row} to {piece.end_row}"):
            failpoint(f"reading {path}")
            for read in read_documents(work.shard, self.job.spec.input.storage_options):
                tables.append(self._fitted(read, work, rows))
                rows += read.num_rows
                del read  # no text of one slice is held when the next is read
        check_content(work.shard, Path(self.job.cache_dir), self.job.began)
        # — a slice of which nothing is known has no column for it
        documents = pa.concat_tables(tables, promote_options="default")
        return documents.append_column("work", _constant(written, documents.num_rows))

    def _fitted(self, documents: pa.Table, work: WorkItem, start: int) -> pa.Table:
        """Documents with their pieces for their text, and with what is known of them already.

        They are the shard's from row `start` on.
        """
        known = self._earlier.find(work, documents, start)
        rows = zip(
            documents.column("text"),
            documents.column("status").to_pylist(),
            known_status(known, documents.num_rows),
            strict=True,
        )
        fitted = [
            ([], answered) if answered else self._fit(text.as_py(), status, work)
            for text, status, answered in rows
        ]
        pieces = pa.array([p for p, _ in fitted], pa.list_(pa.list_(pa.int32())))
        table = (
            documents.drop_columns(["text"])
            .append_column("pieces", pieces)
            .append_column("label_status", pa.array([s for _, s in fitted], pa.string()))
        )
        for task, answers in known.items():
            table = table.append_column(f"known:{task}", answers)
        return table

    def _fit(self, text: str, status: str, work: WorkItem) -> tuple[list[NDArray[np.int32]], str]:
        """A document's pieces, and its status as far as labelling goes."""
        if not work.tasks:
            return [], status
        pieces, status = chunk_document(self._tokenizer, text, status, self.job.spec.documents)
        # — as arrays: a slice's tokens as Python's integers would take ten times the memory
        return [np.array(piece, np.int32) for piece in pieces], status


class LabelDocuments:
    """Holds a model and answers a shard's missing tasks, one row a document.

    The model is loaded at once where `asks`; else when it is needed: not at all, where all answers
    are there and are but to be calibrated.
    """

    def __init__(self, job: Job, *, asks: bool) -> None:
        torch.set_num_threads(job.placement.threads)  # Ray gives an actor one
        disable_malloc_trim()
        self.job = job
        self._store = open_store(job.spec.output, job.spec.storage_options)
        if asks:
            _ = self._engine, self._measured

    @cached_property
    def _engine(self) -> LabelEngine:
        folder, _, prompt = job_prompt(self.job)
        model = job_model(self.job, folder)
        return label_engine(self.job, model, prompt, job_readouts(self.job))

    @cached_property
    def _measured(self) -> dict[str, str]:
        """By task, its contextual calibration as JSON."""
        tokenizer = DocumentTokenizer(load_tokenizer(local_model(self.job)))
        found = contextual_calibrations(self.job, self._engine, tokenizer)
        return {task: json.dumps(calibration.to_json()) for task, calibration in found.items()}

    def __call__(self, block: pa.Table) -> pa.Table:
        work = work_item_from_json(block.column("work")[0].as_py())
        pieces = block.column("pieces").to_pylist()
        asked = [task for task in self.job.spec.tasks if task.name in work.tasks]
        answers = ShardAnswers(pieces, asked)
        engine = self._engine if answers.asked_rows else None  # loading it is no part of labelling
        started = time.perf_counter()
        if engine:  # a shard of which everything is known makes no attempt
            attempts = Attempts(self._store, attempt_name(self.job.fp, work), self.job.run_id)
            label = partial(_label, engine, answers, block.column("doc_id"))
            answers.set_aside(attempts.run(len(pieces), label), QUARANTINED)
        seconds = time.perf_counter() - started
        read = block.column("label_status").to_pylist()
        table = with_answers(block.drop_columns(["pieces", "label_status"]), answers, read)
        measured = _constant(_measured(seconds, answers), len(pieces))
        table = table.append_column("measured", measured)
        for task in asked:
            if isinstance(task.calibration, ContextualSpec):
                measured = _constant(self._measured[task.name], len(pieces))
                table = table.append_column(f"calibration:{task.name}", measured)
        return table


def with_answers(rows: pa.Table, answers: ShardAnswers, read: Sequence[str]) -> pa.Table:
    """The rows with what is known of each; `read` is its status as it was read."""
    status, pieces = answers.status(read), answers.pieces
    n_tokens = [sum(len(piece) for piece in document) for document in pieces]
    table = (
        rows.append_column("label_status", pa.array(status, pa.string()))
        .append_column("n_tokens", pa.array(n_tokens, pa.int32()))
        .append_column("n_chunks", pa.array([len(document) for document in pieces], pa.int16()))
    )
    for of_task in answers.by_task:
        for name, column in _columns(of_task):
            table = table.append_column(f"{name}:{of_task.task.name}", column)
    return table


def _label(
    engine: LabelEngine, answers: ShardAnswers, doc_ids: pa.ChunkedArray, start: int, end: int
) -> None:
    """Asks the model about the rows from `start` to before `end`."""
    for doc_id in doc_ids[start:end] if failpoints_set() else ():
        failpoint(f"document {doc_id}")
    answers.ask(engine, start, end)


def _measured(seconds: float, answers: ShardAnswers) -> str:
    """What labelling one shard took, as `graph.ShardCounts` reads it."""
    asked = {"seconds": seconds, "asked_rows": answers.asked_rows}
    return json.dumps({**asked, **asdict(answers.usage)})


def _columns(of_task: TaskAnswers) -> Iterator[tuple[str, pa.Array]]:
    """A task's answers as `answers_table` reads them."""
    yield "log_probs", _lists(of_task.log_probs)
    yield "log_mass", pa.array(of_task.log_mass)
    if of_task.labels is not None:
        yield "places", _lists(of_task.labels)
    if of_task.levels is not None:
        yield "levels", _lists(of_task.levels)


def _lists(values: NDArray[Any]) -> pa.Array:
    """[docs, width] as one fixed-size list a document."""
    _, width = values.shape
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), width)


def _constant(value: str, rows: int) -> pa.Array:
    """The same string in every row, stored once."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), [value])
