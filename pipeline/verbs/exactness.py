"""Proves the tree on a few documents: its answers against those of independent prompts.

In bfloat16 two right ways to compute one prompt differ by hundredths, so that answers in half
precision prove little of the tree, and float32 ones nothing of the kernels that half precision
takes: both are compared. Knows a job and documents' token ids. Knows nothing of how findings
are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from pipeline.inference.baselines.alternatives import answers_alone
from pipeline.inference.engine import DocumentIds
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.memory import MemoryPlan, trim_malloc
from pipeline.runtime.assembly import job_model, job_readouts, label_engine, memory_plan
from pipeline.runtime.job import Job

# A probability's difference that float32 sums in another order can make.
FLOAT32_MAX = 1e-4
# How many times as far from independent prompts as those lie from their own float32 answers the
# tree may lie in half precision, on average and at most. Two roundings of one size lie 1.4 times
# that apart; the answers of questions that read one another 25 times (SmolLM2, bfloat16).
ROUNDINGS = 3
ROUNDING_FLOOR = 1e-3  # where next to nothing is rounded away
# What is allowed where float32 weights have no room: in bfloat16 thrice SmolLM2's differences, in
# float16, whose steps are eight times finer, at most an eighth of them.
HALF_MEAN = {"float16": 2.5e-3, "bfloat16": 2e-2}
HALF_MAX = {"float16": 1e-2, "bfloat16": 0.2}

# Each label of several tokens is a forward of its own; of more than this, the likeliest are one.
_ALL_LABELS = 64
_LIKELIEST = 8
_USABLE = 0.8  # of free memory, for float32 weights

LogProbs = Sequence[Iterable[NDArray[np.float32]]]  # by question, by document: [labels]


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

    dtype: str
    change: Change  # in the job's dtype
    in_float32: Change | None  # the same in float32; None where that is the dtype, or has no room
    rounding: Change | None  # independent prompts in the dtype against themselves in float32

    @property
    def allowed_in_float32(self) -> float:
        """The largest difference that is allowed in float32."""
        return FLOAT32_MAX

    @property
    def allowed_mean(self) -> float | None:
        """The mean difference that rounding explains in half precision; None in float32."""
        if self.dtype == "float32":
            return None
        if self.rounding is None:
            return HALF_MEAN[self.dtype]
        return ROUNDINGS * self.rounding.mean_abs_dp + ROUNDING_FLOOR

    @property
    def allowed_max(self) -> float:
        """The largest difference that is allowed: a mean hides one wrong answer among many."""
        if self.dtype == "float32":
            return FLOAT32_MAX
        if self.rounding is None:
            return HALF_MAX[self.dtype]
        return ROUNDINGS * self.rounding.max_abs_dp + ROUNDING_FLOOR

    @property
    def exact(self) -> bool:
        """Whether rounding explains every difference. False for NaN."""
        if not self.change.max_abs_dp <= self.allowed_max:
            return False
        if self.allowed_mean is None:
            return True
        same_tree = self.in_float32 is None or self.in_float32.max_abs_dp <= FLOAT32_MAX
        return same_tree and self.change.mean_abs_dp <= self.allowed_mean


@dataclass(frozen=True, slots=True)
class Proof:
    """What the model's answers to a few documents showed."""

    memory: MemoryPlan
    exactness: Exactness
    quantization: Change | None  # None where the weights are not quantised


@dataclass(frozen=True, slots=True)
class Asked:
    """A document, and the questions and labels about it that are compared."""

    document: DocumentIds
    prompt: PromptTokens  # of these questions and labels alone
    places: tuple[tuple[int, list[int]], ...]  # of each question, and of its labels, in the whole


@dataclass(frozen=True, slots=True)
class _Answers:
    """What one model answers, below the tree and alone."""

    memory: MemoryPlan
    tree: LogProbs
    asked: Sequence[Asked]
    alone: list[NDArray[np.float32]]  # by document and question: [labels that are compared]

    @property
    def apart(self) -> Change:
        """Of the labels that the tree's beam reached."""
        pairs = list(zip(compared(self.asked, self.tree), self.alone, strict=True))
        reached = [tree != -np.inf for tree, _ in pairs]  # of a beam in another dtype, fewer
        kept = [(pair, places) for pair, places in zip(pairs, reached, strict=True) if places.any()]
        return change(
            [[tree[places] for (tree, _), places in kept]],
            [[alone[places] for (_, alone), places in kept]],
        )


def prove(job: Job, folder: Path, prompt: PromptTokens, documents: Sequence[DocumentIds]) -> Proof:
    """What a batch takes, the tree against independent prompts, quantised weights against none.

    All with the model as the job runs it; one model is held at a time.
    """
    dtype = job.placement.dtype
    found = _answers(job, folder, prompt, documents, None)
    in_float32 = rounding = None
    if dtype != "float32" and _have_room(2 * found.memory.weights_bytes, job.placement.device):
        wide_job = replace(job, placement=replace(job.placement, dtype="float32"))
        wide = _answers(wide_job, folder, prompt, documents, found.asked)
        in_float32, rounding = wide.apart, change([found.alone], [wide.alone])
    exactness = Exactness(dtype, found.apart, in_float32, rounding)
    if job.spec.model.quantize == "none":
        return Proof(found.memory, exactness, None)
    unquantised = job_model(job, folder, quantize="none")
    own = label_engine(job, unquantised, prompt, job_readouts(job)).label(documents).log_probs
    return Proof(found.memory, exactness, change(found.tree, own))


def _answers(
    job: Job,
    folder: Path,
    prompt: PromptTokens,
    documents: Sequence[DocumentIds],
    asked: Sequence[Asked] | None,
) -> _Answers:
    """The job's model's, to what is asked or to what its own answers choose."""
    model, readouts = job_model(job, folder), job_readouts(job)
    memory = memory_plan(model, prompt)
    tree = label_engine(job, model, prompt, readouts).label(documents).log_probs
    asked = choose(prompt, documents, tree) if asked is None else asked
    alone = [
        answer
        for each in asked
        for answer in answers_alone(
            model, each.prompt, each.document, readouts=readouts, exit_policy=job.spec.exit
        )
    ]
    return _Answers(memory, tree, asked, alone)


def _have_room(weights_bytes: int, device: str) -> bool:
    trim_malloc()
    if device == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    else:
        free = psutil.virtual_memory().available
    return weights_bytes <= _USABLE * free


def choose(
    prompt: PromptTokens, documents: Sequence[DocumentIds], answers: LogProbs
) -> list[Asked]:
    """What of the tree's answers is compared: all labels, or of many the likeliest."""
    found = []
    for document, *by_question in zip(documents, *answers, strict=True):
        pairs = enumerate(zip(prompt.questions, by_question, strict=True))
        places = tuple((q, kept) for q, pair in pairs if (kept := _compared_labels(*pair)))
        questions = tuple(prompt.questions[q].only(kept) for q, kept in places)
        found.append(Asked(document, replace(prompt, questions=questions), places))
    return found


def compared(asked: Sequence[Asked], answers: LogProbs) -> list[NDArray[np.float32]]:
    """Of the tree's answers those that are compared, by document and question."""
    by_question = [list(of_question) for of_question in answers]
    return [by_question[q][row][kept] for row, each in enumerate(asked) for q, kept in each.places]


def _compared_labels(question: Question, log_probs: NDArray[np.float32]) -> list[int]:
    """The places of all labels; of whole ones those that were reached, the likeliest of many.

    A beam may have left a form of a label, whose answer is then that of the others alone: such
    labels, of several verbalizers below a beam, are not compared.
    """
    if question.trie is None or np.isnan(log_probs).any():
        return list(range(len(log_probs)))
    verbalizers = question.trie.verbalizers
    known = [
        place
        for place in np.argsort(-log_probs, kind="stable").tolist()
        if log_probs[place] > -np.inf and (question.beam is None or len(verbalizers[place]) == 1)
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
