"""Prove a spec before it costs anything: storage, model, prompts, labels, exactness.

Knows how to put the parts together on one document at a time, in this process. Knows nothing of
Ray or of how findings are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from pipeline.data.actor import (
    job_model,
    job_prompt,
    job_readouts,
    label_engine,
    memory_plan,
)
from pipeline.data.devices import place, this_machine
from pipeline.data.job import Job, describe, plan
from pipeline.data.storage import check_create_only, open_store
from pipeline.errors import Problem, SpecError
from pipeline.inference.engine import DocumentIds
from pipeline.inference.independent import answers_alone
from pipeline.inference.loading import context_tokens
from pipeline.inference.memory import MemoryPlan
from pipeline.inference.tokens import PromptTokens, Question
from pipeline.samples import Sample, take_samples
from pipeline.spec import JobSpec

DEFAULT_DOCUMENTS = 4
# A probability's difference that float32 sums in another order can make, and bfloat16's 8 bits.
_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

# Each label of several tokens is a forward of its own; of more than this, the likeliest are one.
_ALL_LABELS = 64
_LIKELIEST = 8

LogProbs = Sequence[Iterable[NDArray[np.float32]]]  # by question, by document: [labels]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task's canonical prompt of one document."""

    doc_id: str
    task: str
    text: str
    token_ids: tuple[int, ...]
    labels: dict[str, list[int]]  # first tokens
    surfaces: dict[str, list[list[int]]] | None  # all tokens, where whole labels are scored

    @property
    def scoring(self) -> str:
        """What is read of the labels: their tokens, or nothing where a map knows them."""
        if not any(self.labels.values()):
            return "readout"
        return "first_token" if self.surfaces is None else "full"


@dataclass(frozen=True, slots=True)
class Change:
    """How far two sets of answers to the same questions lie apart."""

    max_abs_dp: float
    mean_abs_dp: float  # over all labels of all answers
    argmax_flips: int
    answers: int


@dataclass(frozen=True, slots=True)
class Exactness:
    """The tree against independent prompts."""

    max_abs_dp: float
    argmax_flips: int
    answers: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class ReadoutFacts:
    """A trained readout that fits its task."""

    path: str
    sha256: str
    kind: str
    pooling: str
    layer: int  # where it is read unless `exit` says otherwise
    layers: tuple[int, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """What a check found."""

    output: str
    documents: int
    model_folder: str
    device: str
    dtype: str
    quantize: str
    context_tokens: int
    has_chat_template: bool
    label_tokens: dict[str, dict[str, list[str]]]  # task -> label -> first tokens as text
    readouts: dict[str, ReadoutFacts]  # by task, of those that are read off fitted maps
    prompts: tuple[Prompt, ...]
    memory: MemoryPlan
    exactness: Exactness
    quantization: Change | None  # None where the weights are not quantised

    @property
    def exact(self) -> bool:
        return self.exactness.max_abs_dp <= self.exactness.tolerance


def check(spec: JobSpec, *, cache_dir: Path, documents: int | None) -> Findings:
    """Every part of the spec tried once; AssayError names the first that cannot work."""
    if documents is not None and documents < 0:
        raise SpecError([Problem("--documents", "write how many, or 0 for none", documents)])
    store = open_store(spec.output, spec.storage_options)
    check_create_only(store)
    placement = place(spec.model, this_machine())
    job = describe(spec, placement, cache_dir)
    planned = plan(job, store, keep=False)
    folder, tokenizer, prompt = job_prompt(job)
    wanted = DEFAULT_DOCUMENTS if documents is None else documents
    samples = take_samples(planned.shards, tokenizer, spec, wanted)
    memory, exactness, quantization = prove(job, folder, prompt, [s.token_ids for s in samples])
    return Findings(
        output=store.url,
        documents=planned.rows,
        model_folder=str(folder),
        device=placement.device,
        dtype=placement.dtype,
        quantize=spec.model.quantize,
        context_tokens=context_tokens(folder),
        has_chat_template=bool(tokenizer.chat_template),
        label_tokens=_label_tokens(tokenizer, prompt),
        readouts=_readout_facts(job),
        prompts=_prompts(tokenizer, prompt, samples[:1]),
        memory=memory,
        exactness=exactness,
        quantization=quantization,
    )


def prove(
    job: Job, folder: Path, prompt: PromptTokens, documents: Sequence[DocumentIds]
) -> tuple[MemoryPlan, Exactness, Change | None]:
    """What a batch takes, the tree against independent prompts, quantised weights against none.

    Both with the model as the job runs it; one model is held at a time.
    """
    model, readouts = job_model(job, folder), job_readouts(job)
    memory = memory_plan(model, prompt)
    answers = label_engine(job, model, prompt, readouts).label(documents).log_probs
    alone = partial(answers_alone, model, readouts=readouts, way=job.spec.exit)
    apart = change(*_compared(prompt, documents, answers, alone))
    exactness = Exactness(
        apart.max_abs_dp, apart.argmax_flips, apart.answers, _TOLERANCE[job.placement.dtype]
    )
    if job.spec.model.quantize == "none":
        return memory, exactness, None
    del model, alone
    unquantised = job_model(job, folder, quantize="none")
    engine = label_engine(job, unquantised, prompt, readouts)
    return memory, exactness, change(answers, engine.label(documents).log_probs)


def _readout_facts(job: Job) -> dict[str, ReadoutFacts]:
    return {
        task: ReadoutFacts(
            path=job.readouts[task].path,
            sha256=job.readouts[task].sha256,
            kind=readout.card.kind,
            pooling=readout.card.pooling,
            layer=readout.card.layer,
            layers=tuple(readout.layers),
            labels=readout.card.labels,
        )
        for task, readout in job_readouts(job).items()
    }


def _compared(
    prompt: PromptTokens,
    documents: Sequence[DocumentIds],
    answers: LogProbs,
    alone: Callable[[PromptTokens, DocumentIds], list[NDArray[np.float32]]],
) -> tuple[LogProbs, LogProbs]:
    """The tree's answers and those of independent prompts; of many labels, of the likeliest."""
    found: tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]] = ([], [])
    for document, *by_question in zip(documents, *answers, strict=True):
        pairs = list(zip(prompt.questions, by_question, strict=True))
        kept = [(q, a, places) for q, a in pairs if (places := _compared_labels(q, a))]
        asked = tuple(question.only(places) for question, _, places in kept)
        found[0].extend(answer[places] for _, answer, places in kept)
        found[1].extend(alone(replace(prompt, questions=asked), document))
    return [found[0]], [found[1]]


def _compared_labels(question: Question, log_probs: NDArray[np.float32]) -> list[int]:
    """The places of all labels; of whole ones those that were reached, the likeliest of many.

    A beam may have left a form of a label, whose answer is then that of the others alone: such
    labels, of several forms below a beam, are not compared.
    """
    if question.trie is None or np.isnan(log_probs).any():
        return list(range(len(log_probs)))
    forms = question.trie.forms
    known = [
        place
        for place in np.argsort(-log_probs, kind="stable").tolist()
        if log_probs[place] > -np.inf and (question.beam is None or len(forms[place]) == 1)
    ]
    return sorted(known if len(log_probs) <= _ALL_LABELS else known[:_LIKELIEST])


def change(answers: LogProbs, others: LogProbs) -> Change:
    """How far label probabilities lie apart: of each label the larger of two differences.

    One is among the labels, as `p` has it; one is out of all tokens, which `mass` comes from.
    """
    pairs = [
        pair
        for of_task, of_task_others in zip(answers, others, strict=True)
        for pair in zip(of_task, of_task_others, strict=True)
    ]
    with np.errstate(invalid="ignore"):  # answers that are no numbers are found below
        differences = np.concatenate([np.zeros(0), *(_differences(a, b) for a, b in pairs)])
    return Change(
        max_abs_dp=float(differences.max(initial=0.0)),  # NaN where there is any
        mean_abs_dp=float(differences.mean()) if pairs else 0.0,
        argmax_flips=sum(int(a.argmax() != b.argmax()) for a, b in pairs),
        answers=len(pairs),
    )


def _differences(
    a: NDArray[np.float32],  # [labels]
    b: NDArray[np.float32],  # [labels]
) -> NDArray[np.float32]:  # [labels]
    among = np.abs(_among_labels(a) - _among_labels(b))
    larger: NDArray[np.float32] = np.maximum(among, np.abs(np.exp(a) - np.exp(b)))
    return larger


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
        if any(question.labels.values())  # a trained readout's have none
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
            surfaces = _surfaces(question)
            found.append(Prompt(sample.doc_id, question.name, text, token_ids, labels, surfaces))
    return tuple(found)


def _surfaces(question: Question) -> dict[str, list[list[int]]] | None:
    if question.trie is None:
        return None
    forms = zip(question.labels, question.trie.forms, strict=True)
    return {label: [list(path) for path in paths] for label, paths in forms}
