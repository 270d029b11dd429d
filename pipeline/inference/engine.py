"""Label documents: pack them, read each once, answer all questions in that reading.

Entry point: `LabelEngine.label`, from token ids to label log-probabilities. Must not import Ray or
read files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.labels.answers import (
    QuestionBatch,
    Readouts,
    check_readouts,
    compile_questions,
    layers_read,
)
from pipeline.inference.labels.prompt_tokens import PromptTokens
from pipeline.inference.loading import proved_at
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import TokenCounter, count_tokens, pack
from pipeline.inference.schedules.select import read_prefix
from pipeline.spec.schema import ExitSpec

DocumentIds = Sequence[int]

# Memory is not short because of a batch smaller than this.
_MIN_BATCH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that went through the model, and those that reuse saved."""

    prefix_tokens_computed: int = 0  # of documents; the prompt's prefix is read once a process
    question_tokens_computed: int = 0
    # what independent prompts would have read in addition: one for each question, or one for each
    # verbalizer of a question whose labels are scored in full
    tokens_saved: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prefix_tokens_computed + other.prefix_tokens_computed,
            self.question_tokens_computed + other.question_tokens_computed,
            self.tokens_saved + other.tokens_saved,
        )


@dataclass(frozen=True, slots=True)
class Labelled:
    """Answers in the documents' order."""

    log_probs: tuple[NDArray[np.float32], ...]  # one [docs, labels] a question
    usage: Usage
    # documents too large even in a batch of their own: NaN in log_probs
    out_of_memory: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Answered:
    """The answers of all documents to compiled questions."""

    log_probs: list[NDArray[np.float32]]  # one [docs, labels] a question
    out_of_memory: frozenset[int]
    read_once: bool  # no document was read again because memory was short


class LabelEngine:
    """A model that has read its prompt's prefix, ready to answer its questions on any documents."""

    def __init__(
        self,
        model: LoadedModel,
        prompt: PromptTokens,
        *,
        max_batch_tokens: int,
        readouts: Readouts | None = None,
        exit_policy: ExitSpec | None = None,
    ) -> None:
        self.prompt = prompt
        self.max_batch_tokens = max_batch_tokens  # halved for good when memory is short
        self._readouts: Readouts = readouts or {}
        self._exit_policy = exit_policy
        deepest = None
        if readouts:
            hidden = model.network.config.get_text_config().hidden_size
            check_readouts(readouts, layers=model.layers, hidden=hidden)
            layers = layers_read(prompt.questions, readouts, exit_policy, model.layers)
            model, deepest = proved_at(model, layers), layers[-1]
        self.model = model
        self._schedule = read_prefix(model, prompt.prefix, layers=deepest)

    def label(
        self, documents: Sequence[DocumentIds], *, tasks: Collection[str] | None = None
    ) -> Labelled:
        """Label log-probabilities of every document for each question.

        A document has at least one token. With `tasks`, only these questions are answered, in the
        prompt's order; answers do not depend on which others are asked. A document that does not
        fit into memory even alone has no answer: its index is in `out_of_memory`. ModelError if
        the model read more tokens than the documents and questions have.
        """
        asked = [q for q in self.prompt.questions if tasks is None or q.name in tasks]
        if not asked:
            return Labelled((), Usage())
        # — a document exits once its answers to all questions are confident: all must be read
        by_confidence = self._exit_policy is not None and self._exit_policy.layers
        to_read = list(self.prompt.questions) if by_confidence else asked
        questions = compile_questions(
            to_read, self._schedule, self.model, self._readouts, self._exit_policy
        )
        with count_tokens(self.model.network.get_input_embeddings()) as counter:
            answered = self._answer(documents, questions, [len(q.labels) for q in to_read])
        usage = self._usage(documents, questions)
        if answered.read_once:
            _check_reuse(usage, counter)
        by_name = {
            q.name: log_probs for q, log_probs in zip(to_read, answered.log_probs, strict=True)
        }
        log_probs = tuple(by_name[question.name] for question in asked)
        return Labelled(log_probs, usage, answered.out_of_memory)

    def with_prompt(self, prompt: PromptTokens) -> LabelEngine:
        """The same model and readouts with other questions or another prefix."""
        return LabelEngine(
            self.model,
            prompt,
            max_batch_tokens=self.max_batch_tokens,
            readouts={q.name: r for q in prompt.questions if (r := self._readouts.get(q.name))},
            exit_policy=self._exit_policy,
        )

    def _answer(
        self, documents: Sequence[DocumentIds], questions: QuestionBatch, labels: Sequence[int]
    ) -> _Answered:
        """Packs the documents and answers them, in smaller batches each time memory is short."""
        log_probs = [np.full((len(documents), n), np.nan, dtype=np.float32) for n in labels]
        too_large: set[int] = set()
        waiting, rounds = list(range(len(documents))), 0
        while waiting:
            lengths = [len(documents[i]) + questions.question_tokens for i in waiting]
            packed = pack(lengths, max_tokens=self.max_batch_tokens)
            batches = [[waiting[i] for i in batch] for batch in packed]
            answers = self._answer_batches(documents, batches, questions)
            for batch, by_question in zip(batches, answers, strict=False):
                for of_all, of_batch in zip(log_probs, by_question, strict=True):
                    of_all[batch] = of_batch
            left = batches[len(answers) :]  # memory was short for the first of these
            if left and self._can_shrink(left[0], questions):
                self.max_batch_tokens //= 2
            elif left and not answers:  # it was alone in memory, and no smaller batch is possible
                too_large.update(left.pop(0))
            waiting = [i for batch in left for i in batch]
            rounds += 1
        return _Answered(log_probs, frozenset(too_large), rounds <= 1 and not too_large)

    def _answer_batches(
        self,
        documents: Sequence[DocumentIds],
        batches: Sequence[Sequence[int]],
        questions: QuestionBatch,
    ) -> list[list[NDArray[np.float32]]]:  # by batch and question: [docs, labels]
        """The answers of each batch, up to the first for which memory is short.

        They are read back after the last batch: a device works on one batch while the next one is
        prepared. So preparing a batch can run out of the device's memory too.
        """
        answers: list[list[Tensor]] = []
        for batch in batches:
            try:
                of_batch = [documents[i] for i in batch]
                answers.append(questions.answers(of_batch, max_tokens=self.max_batch_tokens))
            except (MemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                break
        return [[tensor.numpy(force=True) for tensor in by_question] for by_question in answers]

    def _can_shrink(self, batch: Sequence[int], questions: QuestionBatch) -> bool:
        """Whether a smaller budget makes the batch, or what a search reads at once, smaller."""
        return len(batch) > 1 or (
            questions.has_searches and self.max_batch_tokens > _MIN_BATCH_TOKENS
        )

    def _usage(self, documents: Sequence[DocumentIds], questions: QuestionBatch) -> Usage:
        suffixes = questions.suffix_lengths
        above = sum(len(document) + len(self.prompt.prefix) for document in documents)
        independent = len(suffixes) * above + len(documents) * sum(suffixes)
        read = questions.tokens_read(documents)
        return Usage(
            read.document_tokens,
            read.question_tokens,
            tokens_saved=independent - read.document_tokens - read.question_tokens,
        )


def _check_reuse(usage: Usage, counter: TokenCounter) -> None:
    """ModelError if the model read more than each document and question once."""
    needed = usage.prefix_tokens_computed + usage.question_tokens_computed
    if counter.tokens != needed:
        raise ModelError(
            f"reuse was lost: the model read {counter.tokens:,} tokens, {needed:,} are needed; "
            "this is a defect of assay, please report the model and the versions"
        )


def _out_of_memory(error: BaseException) -> bool:
    """Whether an allocator failed: CUDA has an exception for it, the CPU only a message."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        "can't allocate memory" in str(error)
    )
