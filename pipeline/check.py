"""Prove a spec before it costs anything: storage, model, prompts, labels, exactness.

Knows how to put the parts together on one document at a time, in this process. Knows nothing of
Ray or of how findings are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from pipeline.data.actor import batch_tokens, check_room, local_model
from pipeline.data.devices import place, this_machine
from pipeline.data.job import Job, describe, plan
from pipeline.data.storage import check_create_only, open_store
from pipeline.inference.baselines import per_question
from pipeline.inference.engine import LabelEngine
from pipeline.inference.loading import context_tokens, load_model, load_tokenizer
from pipeline.inference.tokens import PromptTokens, tokenise_prompt
from pipeline.samples import Sample, take_samples
from pipeline.spec import JobSpec

DEFAULT_DOCUMENTS = 4
# A probability's difference that float32 sums in another order can make, and bfloat16's 8 bits.
_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task's canonical prompt of one document."""

    doc_id: str
    task: str
    text: str
    token_ids: tuple[int, ...]
    labels: dict[str, list[int]]  # first tokens


@dataclass(frozen=True, slots=True)
class Exactness:
    """The tree against independent prompts."""

    max_abs_dp: float
    argmax_flips: int
    answers: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class Findings:
    """What a check found."""

    output: str
    documents: int
    model_folder: str
    device: str
    dtype: str
    context_tokens: int
    has_chat_template: bool
    label_tokens: dict[str, dict[str, list[str]]]  # task -> label -> first tokens as text
    prompts: tuple[Prompt, ...]
    exactness: Exactness

    @property
    def exact(self) -> bool:
        return self.exactness.max_abs_dp <= self.exactness.tolerance


def check(spec: JobSpec, *, cache_dir: Path, documents: int | None) -> Findings:
    """Every part of the spec tried once; AssayError names the first that cannot work."""
    store = open_store(spec.output, spec.storage_options)
    check_create_only(store)
    placement = place(spec.model, this_machine())
    job = describe(spec, placement, cache_dir)
    planned = plan(job, store)
    folder = local_model(job)
    tokenizer = load_tokenizer(folder)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    check_room(job, prompt, context_tokens(folder))
    wanted = DEFAULT_DOCUMENTS if documents is None else documents
    samples = take_samples(planned.shards, tokenizer, spec, wanted)
    return Findings(
        output=store.url,
        documents=planned.rows,
        model_folder=str(folder),
        device=placement.device,
        dtype=placement.dtype,
        context_tokens=context_tokens(folder),
        has_chat_template=bool(tokenizer.chat_template),
        label_tokens=_label_tokens(tokenizer, prompt),
        prompts=_prompts(tokenizer, prompt, samples[:1]),
        exactness=prove_exactness(job, folder, prompt, samples),
    )


def prove_exactness(
    job: Job, folder: Path, prompt: PromptTokens, samples: Sequence[Sample]
) -> Exactness:
    """Label the samples by the tree, all at once, and by one full forward for each question."""
    model = load_model(folder, dtype=job.placement.dtype, device=job.placement.device)
    documents = [sample.token_ids for sample in samples]
    engine = LabelEngine(model, prompt, max_batch_tokens=batch_tokens(job.placement.device))
    tree = engine.label(documents).log_probs
    alone = per_question(model, prompt, documents)
    differences, flips = [0.0], 0
    for question, answers in enumerate(tree):
        for row, log_probs in enumerate(answers):
            oracle = alone[row][question].numpy(force=True)
            differences.append(_difference(log_probs, oracle))
            flips += int(log_probs.argmax() != oracle.argmax())
    answered = len(samples) * len(prompt.questions)
    return Exactness(max(differences), flips, answered, _TOLERANCE[job.placement.dtype])


def _difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The largest difference of a label's probability, among the labels or of all tokens."""
    among = np.abs(_among_labels(a) - _among_labels(b)).max()
    return float(max(among, np.abs(np.exp(a) - np.exp(b)).max()))


def _among_labels(log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
    """[labels] summing to 1."""
    p: NDArray[np.float32] = np.exp(log_probs - np.logaddexp.reduce(log_probs))
    return p


def _label_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: PromptTokens
) -> dict[str, dict[str, list[str]]]:
    return {
        question.name: {
            label: [str(tokenizer.decode([token_id])) for token_id in token_ids]
            for label, token_ids in question.labels.items()
        }
        for question in prompt.questions
    }


def _prompts(
    tokenizer: PreTrainedTokenizerBase, prompt: PromptTokens, samples: Sequence[Sample]
) -> tuple[Prompt, ...]:
    found = []
    for sample in samples:
        for question in prompt.questions:
            token_ids = (*prompt.opening, *sample.token_ids, *question.token_ids)
            labels = {label: list(first) for label, first in question.labels.items()}
            text = str(tokenizer.decode(list(token_ids)))
            found.append(Prompt(sample.doc_id, question.name, text, token_ids, labels))
    return tuple(found)
