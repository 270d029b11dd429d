"""Assembles an engine from a job: model, prompt, readouts. Entry point: `job_engine`.

Also turns a text into chunks, and answers into rows (`chunk_document`, `labelled_documents`).
Imports torch, so the driver must not import it. Must not import Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from pipeline.errors import DocumentError, Problem, SpecError
from pipeline.fitted.calibration import Calibration
from pipeline.inference.chunking import chunk_text
from pipeline.inference.engine import LabelEngine, content_free_prior
from pipeline.inference.labels.prompt_tokens import PromptTokens, tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import (
    context_reason,
    context_tokens,
    convert_gguf,
    load_model,
    load_tokenizer,
)
from pipeline.inference.memory import MemoryPlan, plan_memory
from pipeline.inference.model.casting import cast_files, needs_cast
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.shard_answers import ShardAnswers
from pipeline.ledger.blocks import LabelledDocuments, TaskScores
from pipeline.runtime.calibration_files import CalibrationFile
from pipeline.runtime.fitted_files import load_readouts
from pipeline.runtime.job import Job
from pipeline.runtime.limits import available_bytes, usable_cores
from pipeline.runtime.progress import (
    CONVERTING,
    FETCHING,
    LOADING,
    Send,
    WorkerReport,
    ignore,
)
from pipeline.runtime.weights import ModelFiles, cached_model, fetch
from pipeline.sources.documents import EMPTY, OK, TRUNCATED
from pipeline.sources.streams import Options
from pipeline.spec.schema import ContextualSpec, DocumentsSpec, Quantize, TaskSpec

# Larger batches do not use two cores better, and their activations no longer fit in the cache:
# 1,000-token documents took 2.5 s each in batches of one, 2.8 s in batches of two or four.
CPU_BATCH_TOKENS = 1_280
CUDA_BATCH_TOKENS = 65_536


def memory_plan(model: LoadedModel, prompt: PromptTokens) -> MemoryPlan:
    """The largest batch in tokens, and the memory that it takes on the model's device."""
    if model.device.type == "cuda":
        free_bytes, most_tokens = torch.cuda.mem_get_info(model.device)[0], CUDA_BATCH_TOKENS
    else:
        free_bytes, most_tokens = available_bytes(), CPU_BATCH_TOKENS
    prefix = len(prompt.prefix)
    return plan_memory(model, prefix_tokens=prefix, free_bytes=free_bytes, most_tokens=most_tokens)


def local_model(job: Job, send: Send = ignore) -> Path:
    """A local folder with the model's safetensors, downloaded or converted where necessary."""
    return local_files(job.files, Path(job.cache_dir), job.spec.model.storage_options, send)


def local_files(files: ModelFiles, cache_dir: Path, options: Options, send: Send = ignore) -> Path:
    """A local folder with these files as safetensors, downloaded or converted where necessary."""
    if files.kind in ("hub", "remote"):
        send(WorkerReport(FETCHING))
    fetched = fetch(files, cache_dir, options)
    if files.kind != "gguf":
        return fetched

    def convert(folder: Path) -> None:
        send(WorkerReport(CONVERTING))
        convert_gguf(fetched, folder)

    return cached_model(files, cache_dir, convert)


def job_model(job: Job, folder: Path, *, quantize: Quantize | None = None) -> LoadedModel:
    """The job's model; `quantize` replaces the spec's setting.

    Several engines of one machine share the pages of its weights. From now on, torch uses the job's
    number of threads in this process.
    """
    # — the machine may have fewer cores than the cluster says; Ray sets 1 in an actor
    torch.set_num_threads(min(job.placement.threads, usable_cores()))
    placement = job.placement
    chosen = job.spec.model.quantize if quantize is None else quantize
    several = placement.device == "cpu" and placement.actors > 1
    if several and chosen == "none" and needs_cast(folder, placement.dtype):
        fill = partial(cast_files, folder, dtype=placement.dtype)
        folder = cached_model(job.files, Path(job.cache_dir), fill, variant=placement.dtype)
    return load_model(
        folder,
        dtype=placement.dtype,
        device=placement.device,
        quantize=chosen,
        gpus=job.spec.model.gpus,
    )


def label_engine(job: Job, model: LoadedModel, prompt: PromptTokens) -> LabelEngine:
    """The job's tasks on its model, with the batch size that fits its memory."""
    return LabelEngine(
        model,
        prompt,
        max_batch_tokens=memory_plan(model, prompt).max_batch_tokens,
        readouts=load_readouts(job.readouts, job.spec),
        exit_policy=job.spec.exit,
    )


def job_engine(job: Job, send: Send = ignore) -> tuple[LabelEngine, PreTrainedTokenizerBase]:
    """The job's engine, loaded, and the model's tokenizer; `send` takes the phases."""
    folder, tokenizer, prompt = job_prompt(job, send=send)
    send(WorkerReport(LOADING))
    return label_engine(job, job_model(job, folder), prompt), tokenizer


def job_prompt(
    job: Job, tasks: Sequence[TaskSpec] | None = None, *, send: Send = ignore
) -> tuple[Path, PreTrainedTokenizerBase, PromptTokens]:
    """The model's local folder, its tokenizer, and the prompt of the job's tasks or of `tasks`.

    SpecError unless the longest document and each question fit together into the model's context.
    """
    folder = local_model(job, send)
    tokenizer = load_tokenizer(folder)
    prompt = tokenise_prompt(tokenizer, job.spec.prompt, job.spec.tasks if tasks is None else tasks)
    context = context_tokens(folder)
    max_tokens, room = job.spec.documents.max_tokens, prompt.room(context)
    if max_tokens > room:
        fix = (
            f"the model's context of {context} tokens{context_reason(folder)} leaves "
            f"{max(room, 0)} for a document beside the instruction and the longest question; "
            "write at most that"
        )
        raise SpecError([Problem("documents.max_tokens", fix, max_tokens)])
    return folder, tokenizer, prompt


def content_free_ids(job: Job, tokenizer: DocumentTokenizer) -> dict[str, list[list[int]]]:
    """The token ids of each task's content-free documents; SpecError if one cannot be read."""
    by_task: dict[str, list[list[int]]] = {}
    for index, task in enumerate(job.spec.tasks):
        if not isinstance(task.calibration, ContextualSpec):
            continue
        texts = task.calibration.documents
        try:
            ids = [tokenizer.encode(text) for text in texts]
        except DocumentError as error:
            place = f"tasks.{index}.calibration.documents"
            raise SpecError([Problem(place, f"{error}; write others", texts)]) from error
        by_task[task.name] = [each[: job.spec.documents.max_tokens] for each in ids]
    return by_task


def contextual_calibrations(
    job: Job, engine: LabelEngine, tokenizer: DocumentTokenizer, tasks: Collection[str]
) -> dict[str, CalibrationFile]:
    """The contextual calibrations of these tasks, measured on documents without content."""
    ids = content_free_ids(job, tokenizer)
    files = {}
    for task in job.spec.tasks:
        if task.name not in tasks or not isinstance(task.calibration, ContextualSpec):
            continue
        prior = content_free_prior(engine, ids[task.name], task.name)
        files[task.name] = CalibrationFile(
            task=task.name,
            calibration=Calibration("contextual", tuple(task.labels), prior),
            fingerprint=job.fingerprints[task.name].raw.id,
            source={"documents": list(task.calibration.documents)},
            rows=len(task.calibration.documents),
        )
    return files


def chunk_document(
    tokenizer: DocumentTokenizer, text: str | None, status: str, rules: DocumentsSpec
) -> tuple[Sequence[tuple[int, ...]], str]:
    """A document's chunks, and its status for labelling.

    `status` is that of reading it. A document that cannot be labelled has no chunks; its status
    has the reason.
    """
    if status != OK or text is None:
        return (), status
    try:
        chunks = chunk_text(tokenizer, text, rules)
    except DocumentError as error:
        return (), f"error:{error}"
    if not chunks.tokens:
        return (), EMPTY
    return chunks.token_ids, TRUNCATED if chunks.truncated else OK


def labelled_documents(
    documents: pa.Table, answers: ShardAnswers, read: Sequence[str]
) -> LabelledDocuments:
    """The documents with their answers; `read` is the status of each after tokenising."""
    answers.copy_to_repeats()
    return LabelledDocuments(
        documents=documents,
        n_tokens=np.array([sum(map(len, chunks)) for chunks in answers.chunks], np.int32),
        n_chunks=np.array([len(chunks) for chunks in answers.chunks], np.int16),
        status=answers.statuses(read),
        scores={
            each.task.name: TaskScores(each.log_probs, each.log_mass, each.labels, each.levels)
            for each in answers.by_task
        },
    )
