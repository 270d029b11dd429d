"""Label documents: pack them, read each one once, answer all questions in that reading.

Knows token ids and label log-probabilities. Knows nothing of text, files or Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.beam import search
from pipeline.inference.model import LoadedModel
from pipeline.inference.packing import pack
from pipeline.inference.reading import TokensRead, counting_tokens
from pipeline.inference.readout import FirstTokens
from pipeline.inference.schedules import KeptText, Schedule, read_opening
from pipeline.inference.tokens import PromptTokens, Question
from pipeline.inference.whole_labels import WholeLabels, label_log_probs

DocumentIds = Sequence[int]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that went through the model, and those that reuse spared it."""

    prefix_tokens_computed: int = 0  # of documents; the instruction is read once a process
    question_tokens_computed: int = 0
    # what one prompt a question would have read more, or one for each surface form of whole labels
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

    def __init__(self, model: LoadedModel, prompt: PromptTokens, *, max_batch_tokens: int) -> None:
        self.model = model
        self.prompt = prompt
        self.max_batch_tokens = max_batch_tokens  # halved for good when memory runs out
        self._schedule = read_opening(model, prompt.opening)

    def label(
        self, documents: Sequence[DocumentIds], *, tasks: Collection[str] | None = None
    ) -> Labelled:
        """Label log-probabilities of every document (of one token at least) for each question.

        `tasks` asks only these, in the prompt's order. Answers do not depend on what else is asked.
        A document for which memory does not suffice even alone has no answer, and is named.
        """
        questions = [q for q in self.prompt.questions if tasks is None or q.name in tasks]
        answers = [
            np.full((len(documents), len(question.labels)), np.nan, dtype=np.float32)
            for question in questions
        ]
        if not questions:
            return Labelled((), Usage())
        asked = _Asked(questions, self._schedule, self.model.device)
        waiting, rounds = list(range(len(documents))), 0
        with counting_tokens(self.model.network.get_input_embeddings()) as read:
            while waiting:
                lengths = [len(documents[i]) + asked.laid_out.question_tokens for i in waiting]
                batches = pack(lengths, max_tokens=self.max_batch_tokens)
                waiting = self._label_batches(
                    documents, [[waiting[i] for i in batch] for batch in batches], asked, answers
                )
                rounds += 1
        usage = self._usage(documents, asked)
        if rounds == 1:  # a batch that ran out of memory was read twice
            _prove_reuse(usage, read)
        return Labelled(tuple(answers), usage, frozenset(asked.out_of_memory))

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
                found.append(self._label_batch([documents[i] for i in batch], asked))
            except (MemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                if len(batch) > 1:
                    self.max_batch_tokens //= 2
                elif not found:  # nothing else is held, and nothing smaller can be tried
                    asked.out_of_memory |= {*batch}
                break
        for batch, by_question in zip(batches, found, strict=False):
            for answer, log_probs in zip(answers, by_question, strict=True):
                answer[batch] = log_probs.numpy(force=True)
        left = (i for batch in batches[len(found) :] for i in batch)
        return [i for i in left if i not in asked.out_of_memory]

    def _label_batch(self, documents: Sequence[DocumentIds], asked: _Asked) -> list[Tensor]:
        """One [docs, labels] a question, of whole documents."""
        if any(question.searched for question in asked.questions):
            found = zip(*(self._search(document, asked) for document in documents), strict=True)
            return [torch.cat(of_question) for of_question in found]
        states = asked.laid_out.states(documents)  # [sequences, docs, hidden]
        return label_log_probs(states, asked.at_once, self.model.unembed)

    def _search(self, document: DocumentIds, asked: _Asked) -> list[Tensor]:
        """One [1, labels] a question; the document is kept, so that it is read once for all."""
        text = self._schedule.keep(document, asked.read_below)
        at_once: Iterator[Tensor] = iter(())
        if asked.at_once:
            states = text.states(asked.sequences).unsqueeze(1)  # [sequences, 1, hidden]
            at_once = iter(label_log_probs(states, asked.at_once, self.model.unembed))
        return [
            self._search_labels(text, question) if question.searched else next(at_once)
            for question in asked.questions
        ]

    def _search_labels(self, text: KeptText, question: Question) -> Tensor:  # [1, labels]
        assert question.trie is not None, question.name
        *opening, last = question.token_ids
        asking = text.extended(opening) if opening else text
        found = search(
            question.trie,
            lambda paths: asking.states([(last, *path) for path in paths]),
            self.model.unembed,
            beam=question.beam,
            max_tokens=self.max_batch_tokens,
        )
        return torch.from_numpy(found).unsqueeze(0)

    def _usage(self, documents: Sequence[DocumentIds], asked: _Asked) -> Usage:
        read = sum(len(document) for document in documents)
        opening = len(self.prompt.opening) * len(documents)
        alone = len(asked.alone) * (read + opening) + len(documents) * sum(asked.alone)
        prefix = read + len(documents) * asked.laid_out.opening_tokens
        questions = len(documents) * asked.laid_out.question_tokens
        if asked.read_below.tokens:
            questions = asked.read_below.tokens - prefix
        return Usage(prefix, questions, tokens_saved=alone - prefix - questions)


class _Asked:
    """The questions of one call, laid out once for all its batches."""

    def __init__(
        self, questions: Sequence[Question], schedule: Schedule, device: torch.device
    ) -> None:
        self.questions = questions
        self.sequences = [s for q in questions if not q.searched for s in q.sequences]
        self.laid_out = schedule.ask(self.sequences)
        self.at_once = [_readout(q, device) for q in questions if not q.searched]
        self.read_below = TokensRead()  # of kept documents, and below them
        self.out_of_memory: set[int] = set()  # documents, by their place
        self.alone = [tokens for question in questions for tokens in question.alone]


def _readout(question: Question, device: torch.device) -> FirstTokens | WholeLabels:
    if question.trie is None:
        return FirstTokens.of(list(question.labels.values()), device)
    return WholeLabels.of(question.trie, device)


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
