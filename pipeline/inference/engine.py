"""Label documents: pack them, read each once, answer all questions in that reading.

Entry point: `LabelEngine.label`, from token ids to label log-probabilities. Must not import Ray or
read files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.images import ImageDocument
from pipeline.inference.labels.early_exit import Readouts, check_readouts, layers_read
from pipeline.inference.labels.prompt_tokens import PromptTokens
from pipeline.inference.labels.questions import QuestionBatch, compile_questions
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.proof import proved_at
from pipeline.inference.schedules import read_prefix
from pipeline.inference.schedules.batching import Usage, count_tokens, pack
from pipeline.spec.model import ExitSpec

DocumentIds = Sequence[int]

# Memory is not short because of a batch smaller than this.
_MIN_BATCH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Labelled:
    """Answers in the documents' order."""

    log_probs: tuple[NDArray[np.float32], ...]  # one [docs, labels] a question
    usage: Usage
    # documents too large even in a batch of their own: NaN in log_probs
    out_of_memory: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents that are read together."""

    documents: tuple[int, ...]  # indices
    max_tokens: int  # that a search below one of them reads at once

    def halves(self, lengths: Sequence[int]) -> list[Batch]:
        """The same documents in batches of half the tokens; one above that is a batch alone."""
        own = [lengths[i] for i in self.documents]
        half = sum(own) // 2
        return [
            Batch(tuple(self.documents[i] for i in part), min(half, self.max_tokens))
            for part in pack(own, max_tokens=half)
        ]


class Engine(Protocol):
    """What labels documents that are token ids: `LabelEngine`, or an encoder."""

    def label(
        self,
        documents: Sequence[DocumentIds],
        *,
        tasks: Collection[str] | None = None,
        on_batch: Callable[[Sequence[int]], None] = ...,
    ) -> Labelled:
        """The answers to these tasks, as `LabelEngine.label` has them."""
        ...


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
        self.max_batch_tokens = max_batch_tokens
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
        self,
        documents: Sequence[DocumentIds],
        *,
        tasks: Collection[str] | None = None,
        on_batch: Callable[[Sequence[int]], None] = lambda _documents: None,
    ) -> Labelled:
        """Label log-probabilities of every document for each question.

        A document has at least one token, and may be an `ImageDocument`. With `tasks`, only these
        questions are answered, in the prompt's order; answers do not depend on which others are
        asked. A document that does not fit into memory even alone has no answer: its index is in
        `out_of_memory`. `on_batch` is called with the indices of each batch that was read; a GPU
        may still be at work on it. ModelError if the model read more tokens than the documents and
        questions have.
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
            labels = [len(q.labels) for q in to_read]
            log_probs, too_large, again = self._answer(documents, questions, labels, on_batch)
        usage = questions.tokens_read(documents)
        # — to compute the rows of an image, the model embeds its document's token ids, too
        embedded = sum(len(each) for each in documents if isinstance(each, ImageDocument))
        needed = usage.prefix_tokens_computed + usage.question_tokens_computed + embedded
        if not again and counter.tokens != needed:
            raise ModelError(
                f"reuse was lost: the model read {counter.tokens:,} tokens, {needed:,} are needed; "
                "this is a defect of assay, please report the model and the versions"
            )
        by_name = {q.name: of_task for q, of_task in zip(to_read, log_probs, strict=True)}
        return Labelled(tuple(by_name[q.name] for q in asked), usage, frozenset(too_large))

    def _answer(
        self,
        documents: Sequence[DocumentIds],
        questions: QuestionBatch,
        labels: Sequence[int],
        on_batch: Callable[[Sequence[int]], None],
    ) -> tuple[list[NDArray[np.float32]], set[int], bool]:  # one [docs, labels] a question
        """Packs the documents and answers them; a batch for which memory is short is halved.

        Other batches keep their size. Also returns the documents too large even alone, and whether
        a batch was read again.
        """
        log_probs = [np.full((len(documents), n), np.nan, dtype=np.float32) for n in labels]
        lengths = [len(document) + questions.question_tokens for document in documents]
        packed = pack(lengths, max_tokens=self.max_batch_tokens)
        waiting = deque(Batch(tuple(indices), self.max_batch_tokens) for indices in packed)
        too_large: set[int] = set()
        again = False
        while waiting:
            answers = self._answer_batches(documents, waiting, questions, on_batch)
            for by_question in answers:
                batch = waiting.popleft()
                for of_all, of_batch in zip(log_probs, by_question, strict=True):
                    of_all[list(batch.documents)] = of_batch
            if not waiting:
                break
            again, short = True, waiting.popleft()  # memory was short for this batch
            if len(short.documents) > 1:
                waiting.extendleft(reversed(short.halves(lengths)))
            elif questions.has_searches and short.max_tokens > _MIN_BATCH_TOKENS:
                waiting.appendleft(Batch(short.documents, short.max_tokens // 2))
            elif answers:  # — it was beside the answers of other batches, which are gone now
                waiting.appendleft(short)
            else:
                too_large.update(short.documents)
        return log_probs, too_large, again

    def _answer_batches(
        self,
        documents: Sequence[DocumentIds],
        batches: Iterable[Batch],
        questions: QuestionBatch,
        on_batch: Callable[[Sequence[int]], None],
    ) -> list[list[NDArray[np.float32]]]:  # by batch and question: [docs, labels]
        """The answers of each batch, up to the first for which memory is short.

        They are read back after the last batch: a device works on one batch while the next one is
        prepared. So preparing a batch can run out of the device's memory too.
        """
        answers: list[list[Tensor]] = []
        for batch in batches:
            try:
                of_batch = self.model.with_images([documents[i] for i in batch.documents])
                answers.append(questions.answers(of_batch, max_tokens=batch.max_tokens))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                break
            on_batch(batch.documents)
        return [[tensor.numpy(force=True) for tensor in by_question] for by_question in answers]


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator failed: CUDA has an exception for it, the CPU only a message."""
    of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return of_memory or "can't allocate memory" in str(error)
