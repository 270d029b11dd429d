"""Label documents: pack them, read each one once, answer all questions in that reading.

Knows token ids and label log-probabilities. Knows nothing of text, files or Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.labels.answers import LaidOut, Readouts, check_maps, lay_out, layers_read
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import proved_at
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import TokensRead, counting_tokens, pack
from pipeline.inference.schedules.select import read_prefix
from pipeline.spec.schema import ExitSpec

DocumentIds = Sequence[int]

_LEAST_TOKENS = 64  # of a batch: below it, memory is not what is short


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that went through the model, and those that reuse spared it."""

    prefix_tokens_computed: int = 0  # of documents; the instruction is read once a process
    question_tokens_computed: int = 0
    # what one prompt a question would have read more, or one for each verbalizer of whole labels
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
    out_of_memory: frozenset[int] = frozenset()  # documents too large even alone: NaN in log_probs


class LabelEngine:
    """A model with its instruction prefilled, ready to answer its questions on any documents."""

    def __init__(
        self,
        model: LoadedModel,
        prompt: PromptTokens,
        *,
        max_batch_tokens: int,
        readouts: Readouts | None = None,
        exit_at: ExitSpec | None = None,
    ) -> None:
        self.prompt = prompt
        self.max_batch_tokens = max_batch_tokens  # halved for good when memory runs out
        self._readouts: Readouts = readouts or {}
        self._exit_at = exit_at
        deepest = None
        if readouts:
            hidden = model.network.config.get_text_config().hidden_size
            check_maps(readouts, layers=model.layers, hidden=hidden)
            layers = layers_read(prompt.questions, readouts, exit_at, model.layers)
            model, deepest = proved_at(model, layers), layers[-1]
        self.model = model
        self._schedule = read_prefix(model, prompt.prefix, layers=deepest)

    def label(
        self, documents: Sequence[DocumentIds], *, tasks: Collection[str] | None = None
    ) -> Labelled:
        """Label log-probabilities of every document (of one token at least) for each question.

        `tasks` asks only these, in the prompt's order. Answers do not depend on what else is asked;
        where documents leave once all their answers are sure, all are asked, and these are given.
        A document for which memory does not suffice even alone has no answer, and is named.
        """
        wanted = [tasks is None or q.name in tasks for q in self.prompt.questions]
        if self._exit_at and self._exit_at.layers and any(wanted):
            questions = list(self.prompt.questions)
        else:
            questions, wanted = list(compress(self.prompt.questions, wanted)), []
        answers = [
            np.full((len(documents), len(question.labels)), np.nan, dtype=np.float32)
            for question in questions
        ]
        if not questions:
            return Labelled((), Usage())
        asked = self._ask(questions)
        waiting, rounds = list(range(len(documents))), 0
        with counting_tokens(self.model.network.get_input_embeddings()) as read:
            while waiting:
                lengths = [len(documents[i]) + asked.laid_out.question_tokens for i in waiting]
                batches = pack(lengths, max_tokens=self.max_batch_tokens)
                waiting = self._label_batches(
                    documents, [[waiting[i] for i in batch] for batch in batches], asked, answers
                )
                rounds += 1
        usage = self._usage(documents, asked.laid_out)
        if (
            rounds == 1 and not asked.out_of_memory
        ):  # what ran out was read twice, or not to the end
            _prove_reuse(usage, read)
        given = tuple(compress(answers, wanted) if wanted else answers)
        return Labelled(given, usage, frozenset(asked.out_of_memory))

    def with_prompt(self, prompt: PromptTokens) -> LabelEngine:
        """The same model and readouts, asked other questions or below another prefix."""
        return LabelEngine(
            self.model,
            prompt,
            max_batch_tokens=self.max_batch_tokens,
            readouts={q.name: r for q in prompt.questions if (r := self._readouts.get(q.name))},
            exit_at=self._exit_at,
        )

    def _ask(self, questions: Sequence[Question]) -> _Asked:
        laid_out = lay_out(
            questions,
            self._schedule,
            self.model,
            self._readouts,
            self._exit_at,
            max_tokens=lambda: self.max_batch_tokens,
        )
        return _Asked(laid_out, searches=any(question.searched for question in questions))

    def _label_batches(
        self,
        documents: Sequence[DocumentIds],
        batches: Sequence[list[int]],
        asked: _Asked,
        answers: list[NDArray[np.float32]],
    ) -> list[int]:
        """Fills in the answers; what is left when memory ran out, to be packed smaller.

        Nothing is read back before the last batch: a device works on one while the next is laid
        out, and its memory runs out where a batch is laid out too.
        """
        found: list[list[Tensor]] = []
        for batch in batches:
            try:
                found.append(asked.laid_out.answers([documents[i] for i in batch]))
            except (MemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                if len(batch) > 1 or (asked.searches and self.max_batch_tokens > _LEAST_TOKENS):
                    self.max_batch_tokens //= 2
                elif not found:  # nothing else is held, and nothing smaller can be tried
                    asked.out_of_memory.update(batch)
                break
        for batch, by_question in zip(batches, found, strict=False):
            for answer, log_probs in zip(answers, by_question, strict=True):
                answer[batch] = log_probs.numpy(force=True)
        left = (i for batch in batches[len(found) :] for i in batch)
        return [i for i in left if i not in asked.out_of_memory]

    def _usage(self, documents: Sequence[DocumentIds], laid_out: LaidOut) -> Usage:
        read = sum(len(document) for document in documents)
        prefix = len(self.prompt.prefix) * len(documents)
        alone = len(laid_out.alone) * (read + prefix) + len(documents) * sum(laid_out.alone)
        prefix, questions = laid_out.tokens_read(documents)
        return Usage(prefix, questions, tokens_saved=alone - prefix - questions)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The questions of one call, laid out once for all its batches."""

    laid_out: LaidOut
    searches: bool  # below a document, by parts that can be made smaller than the document
    out_of_memory: set[int] = field(default_factory=set)  # documents, by their place


def _prove_reuse(usage: Usage, read: TokensRead) -> None:
    """ModelError if the model read more than each document and question once."""
    needed = usage.prefix_tokens_computed + usage.question_tokens_computed
    if read.tokens != needed:
        raise ModelError(
            f"reuse was lost: the model read {read.tokens:,} tokens where {needed:,} are needed; "
            "this is a defect of assay, please report the model and the versions"
        )


def _out_of_memory(error: BaseException) -> bool:
    """Whether the allocator gave up: CUDA has a class for it, the CPU a sentence."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        "can't allocate memory" in str(error)
    )
