"""Label documents: pack them, read each once, answer all questions in that reading.

Entry points: `LabelEngine.label`, from token ids to label log-probabilities, and `read_in_batches`,
for engines of any kind. Must not import Ray or read files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeline.inference.labels.answers import (
    OnePassQuestions,
    Readouts,
    check_readouts,
    group_questions,
    layer_of,
)
from pipeline.inference.labels.prompt_tokens import PromptTokens
from pipeline.inference.labels.searched import SearchedQuestions
from pipeline.inference.model.loaded import LoadedModel, TokenCounter
from pipeline.inference.out_of_memory import is_out_of_memory, naming_lack_of_memory
from pipeline.inference.proof import prove_layers
from pipeline.inference.schedules import read_prefix
from pipeline.inference.schedules.batching import Usage, pack

DocumentIds = Sequence[int]
Read = TypeVar("Read")

# A smaller batch is not halved further: it is not the cause if memory runs out.
_MIN_BATCH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Labelled:
    """Answers in the documents' order."""

    log_probs: tuple[NDArray[np.float32], ...]  # one [docs, labels] a question
    usage: Usage
    # documents too large even in a batch of their own: NaN in log_probs
    out_of_memory: frozenset[int] = frozenset()
    # other documents that failed, each with the reason: NaN in log_probs
    refused: Mapping[int, str] = field(default_factory=dict)


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
    ) -> None:
        self.prompt = prompt
        self.max_batch_tokens = max_batch_tokens
        self._readouts: Readouts = readouts or {}
        if readouts:
            hidden = model.network.config.get_text_config().hidden_size
            check_readouts(readouts, layers=model.layers, hidden=hidden)
            prove_layers(model, {layer_of(q, readouts, model.layers) for q in prompt.questions})
        # — a count of its own: engines may read by turns with one model
        self.model = replace(model, counter=TokenCounter())
        with naming_lack_of_memory("instruction", f"read its {len(prompt.prefix):,} tokens"):
            self._schedule = read_prefix(self.model, prompt.prefix)
        self._compiled = lru_cache(maxsize=64)(self._compile)
        self._compiled(tuple(question.name for question in prompt.questions))

    def _compile(self, tasks: tuple[str, ...]) -> list[OnePassQuestions | SearchedQuestions]:
        """The groups of these tasks' questions; those of the last 64 sets of tasks are kept."""
        asked = [question for question in self.prompt.questions if question.name in tasks]
        return group_questions(asked, self._schedule, self.model, self._readouts)

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
        may still be at work on it.
        """
        asked = [q for q in self.prompt.questions if tasks is None or q.name in tasks]
        if not asked:
            return Labelled((), Usage())
        groups = self._compiled(tuple(question.name for question in asked))
        lengths = [len(document) + groups[0].question_tokens for document in documents]
        log_probs = [np.full((len(documents), len(q.labels)), np.nan, np.float32) for q in asked]
        answered: list[tuple[list[int], dict[str, Tensor]]] = []
        usage = Usage()

        def read(batch: Sequence[int], max_tokens: int) -> tuple[dict[str, Tensor], Usage]:
            of_batch, before = [documents[i] for i in batch], self.model.counter.tokens
            rows, answers = self.model.with_images(of_batch), dict[str, Tensor]()
            for group in groups:
                answers |= group.answers(rows, max_tokens=max_tokens)
            of_documents = sum(map(len, of_batch)) * len(groups)
            return answers, Usage(of_documents, self.model.counter.tokens - before - of_documents)

        batches = read_in_batches(
            lengths,
            read,
            max_tokens=self.max_batch_tokens,
            searches=any(q.searched for q in asked),
        )
        for batch, result in batches:
            if result is not None:
                answers, of_batch = result
                answered.append((batch, answers))
                usage += of_batch
                on_batch(batch)
        # — read back after the last batch: a device works on one while the next one is prepared
        for batch, answers in answered:
            for question, of_all in zip(asked, log_probs, strict=True):
                of_all[batch] = answers[question.name].numpy(force=True)
        too_large = set(range(len(documents))).difference(*(batch for batch, _ in answered))
        return Labelled(tuple(log_probs), usage, frozenset(too_large))


def read_in_batches(
    lengths: Sequence[int],
    read: Callable[[list[int], int], Read],
    *,
    max_tokens: int,
    padded: bool = False,
    searches: bool = False,
) -> Iterator[tuple[list[int], Read | None]]:
    """Items of these lengths in batches, each with what `read` returns; None: too large even alone.

    Args:
        lengths: Tokens of each item.
        read: Takes the indices of the items in a batch, and the tokens that it may read at once.
        max_tokens: Tokens of a batch. A batch for which memory is short is read again in halves;
            other batches keep their size.
        padded: Whether each item takes as many tokens as the longest of its batch.
        searches: Whether an item may be read in smaller steps where it is alone in its batch.
    """
    batches = pack(lengths, max_tokens=max_tokens, padded=padded)
    waiting = [(batch, max_tokens) for batch in reversed(batches)]
    while waiting:
        batch, tokens = waiting.pop()
        try:
            result = read(batch, tokens)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            yield batch, result
            continue
        # — only here: the error holds the tensors of the batch
        own = [lengths[i] for i in batch]
        if len(batch) > 1:
            half = sum(own) // 2
            parts = pack(own, max_tokens=half, padded=padded)
            waiting += [([batch[i] for i in part], min(half, tokens)) for part in reversed(parts)]
        elif searches and tokens > _MIN_BATCH_TOKENS:
            waiting.append((batch, tokens // 2))
        else:
            yield batch, None
