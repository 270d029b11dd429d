"""Compares the tree's answers, or vLLM's, with those of independent prompts. Entry point: `prove`.

Both are computed in the job's dtype and in float32. In bfloat16, two correct computations of one
prompt differ by about 0.01 in probability, so half precision alone proves little about the tree.
Float32 alone proves nothing about the kernels of half precision. The same holds for activations
that are rounded to 8 bits: a difference in the last bit of a float32 sum may become a whole step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from pydantic import computed_field
from scipy.special import softmax

from pipeline.inference.alternatives import answers_alone
from pipeline.inference.engine import DocumentIds
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.memory import MemoryPlan, trim_malloc
from pipeline.inference.vllm_engine import check_vllm
from pipeline.runtime.assembly import label_engine, memory_plan, reader_engine, reader_model
from pipeline.runtime.fitted_files import load_readouts
from pipeline.runtime.job import Reader
from pipeline.runtime.limits import usable_cores
from pipeline.runtime.progress import COMPARING, Send, WorkerReport, ignore

# The difference of a probability that another order of float32 sums can cause.
FLOAT32_MAX = 1e-4
# In half precision and with 8-bit products, the tree may differ from independent prompts by this
# multiple of the difference between independent prompts and their float32 answers, for the mean and
# for the maximum. Two roundings of one size differ by a factor of 1.4; a tree whose questions read
# one another differs by a factor of 25 (SmolLM2, bfloat16).
ROUNDINGS = 3
ROUNDING_FLOOR = 1e-3  # added to both bounds, for models that round very little
# The bounds without room for float32 weights. In bfloat16: three times SmolLM2's differences. In
# float16, whose steps are eight times finer: at most an eighth of that. With 8-bit products: twice
# SmolLM2's differences from float32, which were .027 (int8) and .032 (fp8) on average, and .19 and
# .23 at most.
HALF_MEAN = {"float16": 2.5e-3, "bfloat16": 2e-2, "int8": 5e-2, "fp8": 6.3e-2}
HALF_MAX = {"float16": 1e-2, "bfloat16": 0.2, "int8": 0.4, "fp8": 0.46}

# Each label of several tokens takes a forward of its own. Of a task with more labels than
# `_ALL_LABELS`, only the likeliest `_LIKELIEST` are compared.
_ALL_LABELS = 64
_LIKELIEST = 8
_USABLE = 0.8  # of free memory, for float32 weights

Bound = Literal["max_abs_dp", "mean_abs_dp", "max_abs_dp_in_float32"]
Answer = NDArray[np.float32]  # [labels]: log-probabilities
LogProbs = Sequence[Iterable[Answer]]  # by question, by document


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two sets of answers to the same questions."""

    max_abs_dp: float
    mean_abs_dp: float  # over all labels of all answers
    argmax_flips: int
    answers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness(Difference):
    """The tree, or vLLM, against independent prompts, in the job's number format."""

    number_format: str  # a dtype, int8 or fp8
    # Of the tree; None if that is the format, without room, or of vLLM.
    in_float32: Difference | None = None
    # Independent prompts in the format against themselves in float32.
    rounding: Difference | None = None

    @computed_field
    @property
    def allowed(self) -> Mapping[Bound, float | None]:
        """What rounding explains: a mean, except in float32, and a maximum, as a mean hides one."""
        mean, most = HALF_MEAN.get(self.number_format), HALF_MAX.get(self.number_format)
        if self.rounding is not None:
            mean = ROUNDINGS * self.rounding.mean_abs_dp + ROUNDING_FLOOR
            most = ROUNDINGS * self.rounding.max_abs_dp + ROUNDING_FLOOR
        return {
            "max_abs_dp": FLOAT32_MAX if most is None else most,
            "mean_abs_dp": mean,
            "max_abs_dp_in_float32": FLOAT32_MAX,
        }

    @computed_field
    @property
    def exact(self) -> bool:
        """Whether rounding explains every difference. False for NaN."""
        pairs = [
            (self.max_abs_dp, self.allowed["max_abs_dp"]),
            (self.mean_abs_dp, self.allowed["mean_abs_dp"]),
        ]
        if self.in_float32 is not None:
            pairs.append((self.in_float32.max_abs_dp, FLOAT32_MAX))
        return all(bound is None or value <= bound for value, bound in pairs)


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of `prove`."""

    memory: MemoryPlan | None  # None: vLLM plans its own
    exactness: Exactness
    quantization: Difference | None  # against the model without quantisation; None if it has none
    answers: LogProbs  # by question, by document, in the job's dtype
    processor: Mapping[str, str]  # what computes the model, as `LoadedModel` names it


@dataclass(frozen=True, slots=True)
class ComparedDocument:
    """A document with the questions and labels whose answers are compared."""

    document: DocumentIds
    prompt: PromptTokens  # only these questions and labels
    indices: tuple[tuple[int, list[int]], ...]  # of each question and of its labels, in the spec


@dataclass(frozen=True, slots=True)
class _ModelAnswers:
    """One model's answers to the tree and to independent prompts."""

    memory: MemoryPlan
    processor: Mapping[str, str]
    tree: LogProbs
    compared: Sequence[ComparedDocument]
    independent: list[Answer]  # by document and question: [compared labels]

    @property
    def difference(self) -> Difference:
        """Tree against independent prompts, for the labels that the tree's beam reached."""
        answers = compared_answers(self.compared, self.tree)
        pairs = [
            (of_tree[reached], of_prompt[reached])
            for of_tree, of_prompt in zip(answers, self.independent, strict=True)
            # — a beam in another dtype may reach fewer labels
            if (reached := of_tree != -np.inf).any()
        ]
        return difference([[tree for tree, _ in pairs]], [[prompt for _, prompt in pairs]])


def prove(
    reader: Reader,
    folder: Path,
    prompt: PromptTokens,
    documents: Sequence[DocumentIds],
    announce: Send = ignore,
) -> Proof:
    """Measures the memory of a batch, and compares the answers of the model that the job runs.

    The tree is compared with independent prompts, and a quantised model with the original. One
    model is loaded at a time. What the model keeps in 8 bits belongs to the second comparison
    alone: independent prompts keep nothing. Where the job's engine is vLLM, its answers are
    compared, and the tree's choose the labels.
    """
    if reader.spec.model.engine == "vllm":
        check_vllm(prompt)  # — before the minutes that the tree's answers take
    asked, reader = reader, by_own_engine(reader)
    rounded_to = reader.spec.model.rounded_to
    number_format = rounded_to or reader.placement.dtype
    announce(WorkerReport(f"{COMPARING}, in {number_format}"))
    answers = _answers(reader, folder, prompt, documents, None)
    in_float32 = rounding = None
    wide_bytes = (4 if rounded_to else 2) * answers.memory.weights_bytes
    if number_format != "float32" and _have_room(wide_bytes, reader.placement.device):
        announce(WorkerReport(f"{COMPARING}, in float32"))
        wide = _answers(_in_float32(reader), folder, prompt, documents, answers.compared)
        in_float32 = wide.difference
        rounding = difference([answers.independent], [wide.independent])
    if asked.spec.model.engine == "vllm":
        engine = reader_engine(asked, announce)
        by_vllm = engine.label(documents).log_probs
        chosen = compared_answers(answers.compared, by_vllm)
        differs = difference([chosen], [answers.independent])
        exactness = Exactness(**asdict(differs), number_format=number_format, rounding=rounding)
        return Proof(None, exactness, None, by_vllm, {})
    exactness = Exactness(
        **asdict(answers.difference),
        number_format=number_format,
        in_float32=in_float32,
        rounding=rounding,
    )
    memory, tree = answers.memory, answers.tree
    original = tree
    if rounded_to:
        unquantised = reader_model(reader, folder, rounds=False, kv="none")
        original = label_engine(reader, unquantised, prompt).label(documents).log_probs
        del unquantised  # one model is loaded at a time
    if reader.spec.model.kv != "none":
        model = reader_model(reader, folder)
        memory, engine = memory_plan(model, prompt), label_engine(reader, model, prompt)
        tree = engine.label(documents).log_probs
    is_plain = not rounded_to and reader.spec.model.kv == "none"
    quantization = None if is_plain else difference(tree, original)
    return Proof(memory, exactness, quantization, tree, answers.processor)


def by_own_engine(reader: Reader) -> Reader:
    """The job with assay's own engine; on the CPU, if its model is shared between GPUs."""
    model, placement = reader.spec.model, reader.placement
    if model.tensor_parallel > 1:
        placement = replace(placement, device="cpu", gpus=0, actors=1, threads=usable_cores())
    model = model.model_copy(update={"engine": "assay", "tensor_parallel": 1})
    spec = reader.spec.model_copy(update={"model": model})
    return replace(reader, spec=spec, placement=placement)


def _in_float32(reader: Reader) -> Reader:
    """The job with products of float32."""
    model = reader.spec.model.model_copy(update={"dtype": "float32"})
    spec = reader.spec.model_copy(update={"model": model})
    return replace(reader, spec=spec, placement=replace(reader.placement, dtype="float32"))


def _answers(
    reader: Reader,
    folder: Path,
    prompt: PromptTokens,
    documents: Sequence[DocumentIds],
    compared: Sequence[ComparedDocument] | None,
) -> _ModelAnswers:
    """The answers of the job's model; without `compared`, its own answers choose the labels."""
    readouts = load_readouts(reader.readouts, reader.spec, Path(reader.cache_dir))
    model = reader_model(reader, folder, kv="none")
    memory = memory_plan(model, prompt)
    engine = label_engine(reader, model, prompt)
    tree = engine.label(documents).log_probs
    compared = choose_compared(prompt, documents, tree) if compared is None else compared
    independent = [
        answer
        for item in compared
        for answer in answers_alone(model, item.prompt, item.document, readouts=readouts)
    ]
    return _ModelAnswers(memory, model.processor, tree, compared, independent)


def _have_room(weights_bytes: int, device: str) -> bool:
    trim_malloc()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    else:
        free = psutil.virtual_memory().available
    return weights_bytes <= _USABLE * free


def choose_compared(
    prompt: PromptTokens, documents: Sequence[DocumentIds], answers: LogProbs
) -> list[ComparedDocument]:
    """The questions and labels that are compared: all labels, or the likeliest of many."""
    chosen = []
    for document, *by_question in zip(documents, *answers, strict=True):
        pairs = enumerate(zip(prompt.questions, by_question, strict=True))
        indices = tuple((q, kept) for q, pair in pairs if (kept := _compared_labels(*pair)))
        questions = tuple(prompt.questions[q].only(kept) for q, kept in indices)
        chosen.append(ComparedDocument(document, replace(prompt, questions=questions), indices))
    return chosen


def compared_answers(compared: Sequence[ComparedDocument], answers: LogProbs) -> list[Answer]:
    """The tree's answers that are compared, by document and question."""
    by_question = [list(of_question) for of_question in answers]
    return [
        by_question[q][row][kept] for row, item in enumerate(compared) for q, kept in item.indices
    ]


def _compared_labels(question: Question, log_probs: Answer) -> list[int]:
    """The indices of all labels; of full labels, of those that were reached, or the likeliest.

    A beam may drop one of several verbalizers of a label, and the answer is then a partial sum. So
    with a beam, labels of several verbalizers are not compared.
    """
    if question.scores_first_tokens or np.isnan(log_probs).any():
        return list(range(len(log_probs)))
    verbalizers = question.trie.verbalizers
    known = [
        place
        for place in np.argsort(-log_probs, kind="stable").tolist()
        if log_probs[place] > -np.inf and (question.beam is None or len(verbalizers[place]) == 1)
    ]
    return sorted(known if len(log_probs) <= _ALL_LABELS else known[:_LIKELIEST])


def difference(answers: LogProbs, others: LogProbs) -> Difference:
    """The difference of label probabilities: for each label the larger of two differences.

    One is normalised over the labels, as `p` is; one over the vocabulary, as `mass` is.
    """
    pairs = [
        pair
        for of_task, of_task_others in zip(answers, others, strict=True)
        for pair in zip(of_task, of_task_others, strict=True)
    ]
    with np.errstate(invalid="ignore"):  # NaN answers show in the maximum below
        largest = [
            np.maximum(np.abs(softmax(a) - softmax(b)), np.abs(np.exp(a) - np.exp(b)))
            for a, b in pairs
        ]
        differences = np.concatenate([np.zeros(0), *largest])
    return Difference(
        max_abs_dp=float(differences.max(initial=0.0)),  # NaN where there is any
        mean_abs_dp=float(differences.mean()) if pairs else 0.0,
        argmax_flips=sum(int(a.argmax() != b.argmax()) for a, b in pairs),
        answers=len(pairs),
    )
