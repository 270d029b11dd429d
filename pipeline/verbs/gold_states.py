"""The hidden states of gold documents, read as a run would read them.

Knows how to put gold, the spec's prompt and the model together in this process. Knows nothing of
what is fitted to the states, or of Ray.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError
from pipeline.gold.labels import Gold
from pipeline.gold.texts import gold_texts
from pipeline.hashes import short_hash
from pipeline.inference.hidden_states import document_states
from pipeline.inference.labels.prompt_tokens import PromptTokens
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.memory import disable_malloc_trim
from pipeline.inference.model.loaded import LoadedModel
from pipeline.runtime.assembly import chunk_document, job_model, job_prompt, memory_plan
from pipeline.runtime.job import Job, plan
from pipeline.spec.schema import DocumentsSpec, TaskSpec
from pipeline.stores.store import open_store

CHUNKED = "read in several chunks, whose labels the gold does not tell"
OVERFLOWN = "error:its hidden states are not numbers"
POOLINGS = ("last", "mean")
# Where no layers are asked for: shares of the decoder's depth.
_SHARES = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
_TIMED_DOCUMENTS = 16


@dataclass(frozen=True, slots=True)
class ReadGold:
    """The states of gold rows that can be read, and why others cannot."""

    rows: NDArray[np.int64]  # [docs]: of the gold
    groups: NDArray[np.int64]  # [docs]: equal for equal tokens
    states: NDArray[np.float32]  # [docs, layers, kinds, hidden]
    kinds: Mapping[str, tuple[int, ...]]  # task -> its poolings among the kinds
    layers: tuple[int, ...]
    all_layers: int  # of the decoder
    seconds: tuple[float, ...]  # a document, read up to each of the layers
    left_out: Mapping[str, int]  # gold rows, by reason


def read_gold_states(
    job: Job,
    gold: Gold,
    questions: Mapping[str, str | None],  # task -> its question, None: it reads the document
    *,
    layers: str | None,
    start: Callable[[int], Callable[[int], None]],
) -> ReadGold:
    """The states of every gold document for all tasks, each document read once.

    `start` hears how many documents there are, and gives what hears of those that are done.
    """
    folder, prompt, tokenizer = _prompt(job, questions)
    texts = _texts(job, gold)
    fitted = [_tokens(tokenizer, text, status, job.spec.documents) for text, status in texts]
    left_out = Counter(reason for _, reason in fitted if reason)
    rows = np.array([row for row, (ids, _) in enumerate(fitted) if ids], np.int64)
    if not len(rows):
        fix = f"no document of the gold can be read: {dict(left_out)}"
        raise SpecError([Problem("--gold", fix, gold.source)])
    documents = [fitted[row][0] for row in rows]
    torch.set_num_threads(job.placement.threads)
    disable_malloc_trim()
    model = job_model(job, folder)
    wanted = chosen_layers(layers, model.layers)
    suffixes = list(dict.fromkeys(question.token_ids for question in prompt.questions))
    read = _Reading(model, prompt, suffixes, documents)
    states = read.states(wanted, documents, start(len(documents)))
    sound = np.isfinite(states).all(axis=(1, 2, 3))
    if not sound.all():
        left_out[OVERFLOWN] = int((~sound).sum())
        rows, states = rows[sound], states[sound]
    # — by what is read: long texts that part where they are cut have the same states
    hashes = [short_hash(np.array(fitted[row][0], np.int64).tobytes()) for row in rows]
    return ReadGold(
        rows=rows,
        groups=np.unique(hashes, return_inverse=True)[1].astype(np.int64),
        states=states,
        kinds={
            question.name: (
                suffixes.index(question.token_ids),
                *([len(suffixes)] if questions[question.name] is None else []),
            )
            for question in prompt.questions
        },
        layers=wanted,
        all_layers=model.layers,
        seconds=tuple(read.seconds(layer) for layer in wanted),
        left_out=dict(left_out),
    )


def chosen_layers(written: str | None, there: int) -> tuple[int, ...]:
    """The layers that `--layers` names, rising; without it a few, spread over the decoder."""
    if written is None:
        return tuple(sorted({max(1, round(there * share)) for share in _SHARES}))
    if written == "all":
        return tuple(range(1, there + 1))
    numbers = [part.strip() for part in written.split(",")]
    known = {str(layer): layer for layer in range(1, there + 1)}
    if wrong := [number for number in numbers if number not in known]:
        fix = f"write all, or numbers from 1 to {there} as in 1,{there}; not {', '.join(wrong)}"
        raise SpecError([Problem("--layers", fix, written)])
    return tuple(sorted({known[number] for number in numbers}))


def _prompt(
    job: Job, questions: Mapping[str, str | None]
) -> tuple[Path, PromptTokens, DocumentTokenizer]:
    """The tasks' suffixes. Their labels are not looked for: a readout needs no first tokens."""
    tasks: list[TaskSpec] = [
        task.model_copy(update={"question": questions[task.name] or "", "labels": {}})
        for task in job.spec.tasks
        if task.name in questions
    ]
    folder, tokenizer, prompt = job_prompt(job, tasks)
    return folder, prompt, DocumentTokenizer(tokenizer)


def _texts(job: Job, gold: Gold) -> list[tuple[str, str]]:
    spec = job.spec

    def shards() -> Sequence[object]:
        return plan(job, open_store(spec.output, spec.storage_options), keep=False).shards

    return gold_texts(gold, shards, spec.input.storage_options)  # type: ignore[arg-type]


def _tokens(
    tokenizer: DocumentTokenizer, text: str, status: str, rules: DocumentsSpec
) -> tuple[tuple[int, ...], str | None]:
    """A document as the model reads it; or none, and why."""
    pieces, told = chunk_document(tokenizer, text, status, rules)
    if not pieces:
        return (), told
    return ((), CHUNKED) if len(pieces) > 1 else (pieces[0], None)


@dataclass(frozen=True, slots=True)
class _Reading:
    model: LoadedModel
    prompt: PromptTokens
    suffixes: Sequence[Sequence[int]]
    documents: Sequence[Sequence[int]]

    def states(
        self,
        layers: Sequence[int],
        documents: Sequence[Sequence[int]],
        advance: Callable[[int], None],
    ) -> NDArray[np.float32]:  # [docs, layers, kinds, hidden]
        return document_states(
            self.model,
            self.prompt.prefix,
            self.suffixes,
            documents,
            layers=layers,
            max_batch_tokens=memory_plan(self.model, self.prompt).max_batch_tokens,
            on_documents=advance,
        )

    def seconds(self, layer: int) -> float:
        """What a document takes that is read up to this layer, on a few spread over all."""
        by_length = sorted(self.documents, key=len)
        some = by_length[:: max(1, len(by_length) // _TIMED_DOCUMENTS)]
        started = time.perf_counter()
        self.states([layer], some, lambda documents: None)
        return (time.perf_counter() - started) / len(some)
