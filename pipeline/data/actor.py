"""The workers of the graph: one tokenises documents, one holds a model and labels them.

The one place where the data side meets the model side. Both import torch, so both are built on
the worker; the driver imports this file only by name. Knows nothing of the order of stages.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from pipeline.data.attempts import Attempts, attempt_name
from pipeline.data.documents import EMPTY, OK, QUARANTINED, TRUNCATED
from pipeline.data.earlier import EarlierAnswers, known_status
from pipeline.data.faults import are_planned, reach
from pipeline.data.job import Job, work_from_json
from pipeline.data.ledger import Earlier, Work
from pipeline.data.readouts import load_readouts
from pipeline.data.source import check_content, read_documents
from pipeline.data.storage import open_store
from pipeline.data.weights import fetch, settle
from pipeline.errors import DocumentError, Problem, SpecError
from pipeline.evaluation.calibration import Calibration
from pipeline.inference.answers import Answers
from pipeline.inference.content_free import content_free_prior
from pipeline.inference.engine import LabelEngine
from pipeline.inference.fitting import fit_text
from pipeline.inference.gguf import convert
from pipeline.inference.heap import keep_freed_memory
from pipeline.inference.loading import (
    context_reason,
    context_tokens,
    load_model,
    load_tokenizer,
)
from pipeline.inference.memory import MemoryPlan, plan_memory
from pipeline.inference.model import LoadedModel
from pipeline.inference.quantisation import require_torchao
from pipeline.inference.task_answers import TaskAnswers
from pipeline.inference.tokens import DocumentTokenizer, PromptTokens, tokenise_prompt
from pipeline.inference.trained import Readouts
from pipeline.spec import ContextualSpec, DocumentsSpec, Quantize, TaskSpec

# More tokens do not fill two cores better, and their activations no longer lie in the cache:
# 1,000-token documents took 2.5 s each in batches of one, 2.8 s in batches of two or four.
CPU_BATCH_TOKENS = 1_280
CUDA_BATCH_TOKENS = 65_536


def memory_plan(model: LoadedModel, prompt: PromptTokens) -> MemoryPlan:
    """How many tokens go through the model at once, and the memory that takes on its device."""
    if model.device.type == "cuda":
        free_bytes, most_tokens = torch.cuda.mem_get_info(model.device)[0], CUDA_BATCH_TOKENS
    else:
        free_bytes, most_tokens = psutil.virtual_memory().available, CPU_BATCH_TOKENS
    return plan_memory(
        model,
        opening_tokens=len(prompt.opening),
        free_bytes=free_bytes,
        most_tokens=most_tokens,
    )


def local_model(job: Job) -> Path:
    """The folder with the model's safetensors on this machine, brought or converted if need be."""
    cache_dir = Path(job.cache_dir)
    found = fetch(job.files, cache_dir, job.spec.model.storage_options)
    if job.files.kind != "gguf":
        return found
    folder = cache_dir / "models" / job.files.id
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    convert(found, partial)
    return settle(partial, folder)


def job_model(job: Job, folder: Path, *, quantize: Quantize | None = None) -> LoadedModel:
    """The model that gives the job's answers, with its weights as the spec says or as asked."""
    return load_model(
        folder,
        dtype=job.placement.dtype,
        device=job.placement.device,
        quantize=job.spec.model.quantize if quantize is None else quantize,
        gpus=job.spec.model.gpus,
    )


def label_engine(
    job: Job, model: LoadedModel, prompt: PromptTokens, readouts: Readouts
) -> LabelEngine:
    """The job's tasks on its model, with as many tokens at once as there is memory for."""
    planned = memory_plan(model, prompt)
    return LabelEngine(
        model,
        prompt,
        max_batch_tokens=planned.max_batch_tokens,
        readouts=readouts,
        exit_at=job.spec.exit,
    )


def job_readouts(job: Job) -> Readouts:
    """The readouts of the job's tasks, by task."""
    return load_readouts(job.readouts, job.spec)


def job_prompt(
    job: Job, tasks: Sequence[TaskSpec] | None = None
) -> tuple[Path, PreTrainedTokenizerBase, PromptTokens]:
    """The model's folder here, its tokenizer, and the prompt of the job's tasks, or of others.

    SpecError unless a longest document and each question fit the model's context together.
    """
    folder = local_model(job)
    tokenizer = load_tokenizer(folder)
    prompt = tokenise_prompt(tokenizer, job.spec.prompt, job.spec.tasks if tasks is None else tasks)
    context = context_tokens(folder)
    wanted, room = job.spec.documents.max_tokens, prompt.room(context)
    if wanted > room:
        fix = (
            f"the model's context of {context} tokens{context_reason(folder)} leaves "
            f"{max(room, 0)} for a document beside the instruction and the longest question; "
            "write at most that"
        )
        raise SpecError([Problem("documents.max_tokens", fix, wanted)])
    return folder, tokenizer, prompt


def preflight(job: Job) -> None:
    """What can be wrong with the model and the prompt, found before any document is read."""
    require_torchao(job.spec.model.quantize)
    job_readouts(job)
    _, tokenizer, _ = job_prompt(job)
    content_free_ids(job, DocumentTokenizer(tokenizer))


def content_free_ids(job: Job, tokenizer: DocumentTokenizer) -> dict[str, list[list[int]]]:
    """By task, its content-free documents as the model reads them; SpecError if it cannot."""
    found: dict[str, list[list[int]]] = {}
    for index, task in enumerate(job.spec.tasks):
        if not isinstance(task.calibration, ContextualSpec):
            continue
        texts = task.calibration.documents
        try:
            ids = [tokenizer.encode(text) for text in texts]
        except DocumentError as error:
            place = f"tasks.{index}.calibration.documents"
            raise SpecError([Problem(place, f"{error}; write others", texts)]) from error
        found[task.name] = [each[: job.spec.documents.max_tokens] for each in ids]
    return found


def contextual_calibrations(
    job: Job, engine: LabelEngine, tokenizer: DocumentTokenizer
) -> dict[str, Calibration]:
    """Measures the calibrations that come of documents without content, by task."""
    labels = {task.name: tuple(task.labels) for task in job.spec.tasks}
    return {
        name: Calibration("contextual", labels[name], content_free_prior(engine, documents, name))
        for name, documents in content_free_ids(job, tokenizer).items()
    }


class Tokenise:
    """Reads a shard's documents and turns their text into token ids, one row a document."""

    def __init__(self, job: Job, earlier: Sequence[Sequence[Earlier]]) -> None:
        self.job = job
        self._known = earlier  # where a work's answers may be known, by its place here
        self._tokenizer = DocumentTokenizer(load_tokenizer(local_model(job)))
        self._store = open_store(job.spec.output, job.spec.storage_options)
        self._earlier = EarlierAnswers(self._store)

    def __call__(self, block: pa.Table) -> Iterable[pa.Table]:
        for row in block.to_pylist():
            work = replace(work_from_json(row["work"]), earlier=tuple(self._known[row["earlier"]]))
            yield self._tokenised(row["work"], work)

    def _tokenised(self, written: str, work: Work) -> pa.Table:
        path, piece = work.shard.path, work.shard.piece
        attempts = Attempts(self._store, attempt_name(self.job.fp, work), self.job.run_id)
        tables: list[pa.Table] = []
        rows = 0
        with attempts.reading(f"{path}: rows {piece.start_row} to {piece.end_row}"):
            reach(f"reading {path}")
            for read in read_documents(work.shard, self.job.spec.input.storage_options):
                tables.append(self._fitted(read, work, rows))
                rows += read.num_rows
                del read  # no text of one slice is held when the next is read
        check_content(work.shard, Path(self.job.cache_dir), self.job.began)
        # — a slice of which nothing is known has no column for it
        documents = pa.concat_tables(tables, promote_options="default")
        return documents.append_column("work", _constant(written, documents.num_rows))

    def _fitted(self, documents: pa.Table, work: Work, start: int) -> pa.Table:
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

    def _fit(self, text: str, status: str, work: Work) -> tuple[list[NDArray[np.int32]], str]:
        """A document's pieces, and its status as far as labelling goes."""
        if not work.tasks:
            return [], status
        pieces, status = fit_document(self._tokenizer, text, status, self.job.spec.documents)
        # — as arrays: a slice's tokens as Python's integers would take ten times the memory
        return [np.array(piece, np.int32) for piece in pieces], status


def fit_document(
    tokenizer: DocumentTokenizer, text: str | None, status: str, rules: DocumentsSpec
) -> tuple[Sequence[tuple[int, ...]], str]:
    """A document's pieces, and its status as far as labelling goes.

    `status` is of its reading. One that cannot be labelled has no pieces, and the reason.
    """
    if status != OK or text is None:
        return (), status
    try:
        fitted = fit_text(tokenizer, text, rules)
    except DocumentError as error:
        return (), f"error:{error}"
    if not fitted.tokens:
        return (), EMPTY
    return fitted.token_ids, TRUNCATED if fitted.truncated else OK


class LabelDocuments:
    """Holds a model and answers a shard's missing tasks, one row a document.

    The model is loaded at once where `asks`; else when it is needed: not at all, where all answers
    are there and are but to be calibrated.
    """

    def __init__(self, job: Job, *, asks: bool) -> None:
        torch.set_num_threads(job.placement.threads)  # Ray gives an actor one
        keep_freed_memory()
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
        work = work_from_json(block.column("work")[0].as_py())
        pieces = block.column("pieces").to_pylist()
        asked = [task for task in self.job.spec.tasks if task.name in work.tasks]
        answers = Answers(pieces, asked)
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


def with_answers(rows: pa.Table, answers: Answers, read: Sequence[str]) -> pa.Table:
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
    engine: LabelEngine, answers: Answers, doc_ids: pa.ChunkedArray, start: int, end: int
) -> None:
    """Asks the model about the rows from `start` to before `end`."""
    for doc_id in doc_ids[start:end] if are_planned() else ():
        reach(f"document {doc_id}")
    answers.ask(engine, start, end)


def _measured(seconds: float, answers: Answers) -> str:
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
