"""Search the labels of a question whose trie is too large to be read at once, or has a beam.

    root ── Sci ── ence/ ──┬── Phys ── ics/ ──┬── Opt ── ics     one forward for each branching:
                           │                  └── Ac ── oust…    the followed paths, and what
                           └── Bio ── logy/ ── …                 continues them without a choice

Entry points: `SearchedQuestions` and `search`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.inference.labels.prompt_tokens import Question
from pipeline.inference.labels.scoring import Edges, LabelScorer, Unembed, edge_log_probs
from pipeline.inference.labels.trie import LabelTrie, Path
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules import Schedule
from pipeline.inference.schedules.forward import ReadPoint

States = Callable[[Sequence[Path]], Tensor]  # paths below a question -> [paths, hidden]


class SearchedQuestions:
    """Questions of which some are searched, below documents whose keys and values are kept."""

    def __init__(
        self, questions: Sequence[Question], schedule: Schedule, model: LoadedModel
    ) -> None:
        self._questions, self._schedule, self._unembed = questions, schedule, model.unembed
        at_once = [question for question in questions if not question.searched]
        self._suffixes = [suffix for question in at_once for suffix in question.suffixes]
        self._scorer = LabelScorer([question.trie for question in at_once], model.device)
        reader = schedule.reader([ReadPoint(model.layers, tuple(self._suffixes))])
        self.question_tokens = reader.question_tokens  # searches come after these

    @torch.inference_mode()
    def answers(
        self, documents: Sequence[Sequence[int]], *, max_tokens: int
    ) -> dict[str, Tensor]:  # by question: [docs, labels] fp32
        """Label log-probabilities; `max_tokens` limits what a search reads at once."""
        by_document = [self._answer(document, max_tokens) for document in documents]
        pairs = zip(self._questions, zip(*by_document, strict=True), strict=True)
        return {question.name: torch.cat(of_question) for question, of_question in pairs}

    def _answer(
        self, document: Sequence[int], max_tokens: int
    ) -> list[Tensor]:  # one [1, labels] a question
        text = self._schedule.with_tokens(document)
        at_once: Iterator[Tensor] = iter(())
        if self._suffixes:
            states = text.states(self._suffixes)  # [suffixes, hidden]
            at_once = iter(self._scorer.log_probs(states.unsqueeze(1), self._unembed))
        return [
            self._search(text, question, max_tokens) if question.searched else next(at_once)
            for question in self._questions
        ]

    def _search(self, text: Schedule, question: Question, max_tokens: int) -> Tensor:  # [1, labels]
        *before, last = question.token_ids
        log_probs = search(
            question.trie,
            lambda paths: text.states([(last, *p) for p in paths], below=before),
            self._unembed,
            beam=question.beam,
            max_tokens=max_tokens,
        )
        return torch.from_numpy(log_probs).unsqueeze(0)


@torch.inference_mode()
def search(
    trie: LabelTrie, states: States, unembed: Unembed, *, beam: int | None, max_tokens: int
) -> NDArray[np.float32]:  # [labels]
    """The log-probability of every label, or -inf if its path was not followed to the end.

    At each branching the search follows the `beam` likeliest nodes that have children; None
    follows all and is exact. Every label that ends at a child of a followed node has its score.
    Paths of up to `max_tokens` tokens go through the model at once.
    """
    scores = np.full(len(trie.token_ids), -np.inf)  # [nodes]
    scores[0] = 0.0
    followed = [0]
    while followed:
        read = [node for start in followed for node in trie.chain(start)]
        parts = []  # [edges] fp32: the log-probabilities of all children
        for group in _groups(trie, read, max_tokens):
            hidden = states([trie.path(node) for node in group]).unsqueeze(1)  # [nodes, 1, hidden]
            below = Edges.of([trie.tokens_after(node) for node in group], hidden.device)
            parts.append(edge_log_probs(hidden, below, unembed)[:, 0])
        edges = iter(torch.cat(parts).numpy(force=True))
        for node in read:  # from the root down
            for child in trie.children(node):
                scores[child] = scores[node] + next(edges)
        reached = {c for node in read for c in trie.children(node) if trie.children(c)}
        likeliest = sorted(reached.difference(read), key=lambda node: (-scores[node], node))
        followed = sorted(likeliest[:beam])  # nodes that share a prefix are neighbours
    # — a verbalizer that was not reached adds nothing to its label
    sums = scores[[end for end, _ in trie.ends]] / trie.length_divisors  # [verbalizers]
    by_label = [np.logaddexp.reduce(sums[own]) for own in trie.ends_by_label]
    return np.array(by_label, dtype=np.float32)


def _groups(trie: LabelTrie, nodes: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """The nodes in groups whose paths have at most `max_tokens`; a longer path is a group alone."""
    group: list[int] = []
    tokens = 0
    for node in nodes:
        path_tokens = trie.depths[node] + 1  # 1: the question's last token, read with every path
        if group and tokens + path_tokens > max_tokens:
            yield group
            group, tokens = [], 0
        group.append(node)
        tokens += path_tokens
    yield group
