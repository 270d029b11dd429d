"""Score labels by their first tokens, or by all of their tokens, from hidden states.

    question  ──  创 ──┬── 新 ── 设 ── 计        a state at each node with children; a label's
              ──  军    └── 意                   score is the sum over the edges to its end

Entry points: `label_scorer` and `label_log_probs`, which score questions of both kinds. Reads
hidden states and the unembedding; must not import tokenizers or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.inference.labels.prompt_tokens import Question
from pipeline.inference.labels.trie import LabelTrie
from pipeline.inference.memory import LOGIT_ROWS

Unembed = Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, vocab]


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of the verbalizers of one question's labels, padded to a rectangle."""

    token_ids: Tensor  # [labels, verbalizers] int64
    padding: Tensor  # [labels, verbalizers] bool

    @classmethod
    def of(cls, labels: Sequence[Sequence[int]], device: torch.device) -> FirstTokens:
        padded = torch.tensor(_rectangle(labels, -1))
        return cls(padded.clamp(min=0).to(device), (padded < 0).to(device))

    def log_probs(self, logits: Tensor) -> Tensor:  # [docs, vocab] -> [docs, labels], both fp32
        docs, _vocab = logits.shape
        normaliser = logits.logsumexp(dim=-1).view(-1, 1)  # [docs, 1]
        own = logits[:, self.token_ids.flatten()].view(docs, *self.token_ids.shape)
        return own.masked_fill(self.padding, -torch.inf).logsumexp(dim=-1) - normaliser


def first_token_log_probs(
    hidden: Tensor,  # [questions, docs, hidden]
    questions: Sequence[FirstTokens],
    unembed: Unembed,
) -> list[Tensor]:  # one [docs, labels] fp32 a question
    """Each label's log-probability out of the whole vocabulary: the sum over its first tokens.

    The rest, 1 - sum of exp, is the probability of every other token.
    """
    states, _docs, _hidden = hidden.shape
    assert states == len(questions), f"{states} states for {len(questions)} questions"
    # — all questions together, so that the unembedding is read once a part
    parts = torch.split(hidden, max(1, LOGIT_ROWS // states), dim=1)
    answers: list[list[Tensor]] = [[] for _ in questions]
    for part in parts:  # [questions, docs of the part, hidden]
        logits = unembed(part.flatten(0, 1)).float()  # [questions * docs, vocab]
        by_question = logits.view(states, part.shape[1], logits.shape[-1])
        for of_question, first, own in zip(by_question, questions, answers, strict=True):
            own.append(first.log_probs(of_question))
    return [torch.cat(own) for own in answers]


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges from some nodes to all of their children, in the nodes' order."""

    rows: Tensor  # [edges] int64: the index of each edge's node; never falling
    token_ids: Tensor  # [edges] int64
    firsts: tuple[int, ...]  # [nodes + 1]: where a node's edges begin

    @classmethod
    def below(cls, trie: LabelTrie, nodes: Sequence[int], device: torch.device) -> Edges:
        counts = [len(trie.children(node)) for node in nodes]
        rows = torch.from_numpy(np.repeat(np.arange(len(nodes)), counts))
        ids = [trie.token_ids[child] for node in nodes for child in trie.children(node)]
        firsts = (0, *np.cumsum(counts, dtype=np.int64).tolist())
        return cls(rows.to(device), torch.tensor(ids, device=device), tuple(firsts))


def edge_log_probs(
    hidden: Tensor,  # [nodes, docs, hidden]
    edges: Edges,
    unembed: Unembed,
) -> Tensor:  # [edges, docs] fp32
    """The log-probability of each edge's token after its node, out of the whole vocabulary."""
    nodes, docs, _hidden = hidden.shape
    assert nodes == len(edges.firsts) - 1, f"{nodes} states for {len(edges.firsts) - 1} nodes"
    step = max(1, LOGIT_ROWS // max(1, docs))
    parts = [torch.empty((0, docs), dtype=torch.float32, device=hidden.device)]
    for start in range(0, nodes, step):
        stop = min(start + step, nodes)
        logits = unembed(hidden[start:stop].flatten(0, 1)).float()  # [nodes * docs, vocab]
        by_node = logits.view(stop - start, docs, -1)
        normaliser = by_node.logsumexp(dim=-1)  # [nodes, docs]
        own = slice(edges.firsts[start], edges.firsts[stop])
        rows = edges.rows[own] - start
        parts.append(by_node[rows, :, edges.token_ids[own]] - normaliser[rows])
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class FullLabels:
    """One question's trie as tensors; paths and verbalizers are padded to rectangles."""

    edges: Edges
    paths: Tensor  # [verbalizers, tokens] int64: edges from the root; padding: number of edges
    divisors: Tensor  # [verbalizers, 1] fp32: by which sums are divided
    own: Tensor  # [labels, own verbalizers] int64; padding: number of verbalizers

    @classmethod
    def of(cls, trie: LabelTrie, device: torch.device) -> FullLabels:
        # — node n is the end of edge n - 1: both are numbered breadth first
        number_of_edges = len(trie.token_ids) - 1
        paths = [[node - 1 for node in trie.nodes_to(end)] for end, _ in trie.ends]
        return cls(
            Edges.below(trie, trie.inner, device),
            torch.tensor(_rectangle(paths, number_of_edges), device=device),
            torch.from_numpy(trie.length_divisors).to(device).unsqueeze(1),
            torch.tensor(_rectangle(trie.ends_by_label, len(trie.ends)), device=device),
        )

    @property
    def nodes(self) -> int:
        """How many hidden states are needed."""
        return len(self.edges.firsts) - 1

    def log_probs(
        self,
        hidden: Tensor,  # [nodes, docs, hidden]
        unembed: Unembed,
    ) -> Tensor:  # [docs, labels] fp32
        """Each label's log-probability: the sum along a verbalizer, over all of its verbalizers.

        It is the probability of an answer that begins with the label. If one label's tokens begin
        another's, the shorter label includes the longer one. With a length penalty the results are
        scores: sums are divided by a power of their length first.
        """
        _nodes, docs, _hidden = hidden.shape
        edges = edge_log_probs(hidden, self.edges, unembed)
        padded = torch.cat([edges, edges.new_zeros((1, docs))])
        sums = padded[self.paths].sum(dim=1) / self.divisors  # [verbalizers, docs]
        padded = torch.cat([sums, sums.new_full((1, docs), -torch.inf)])
        return padded[self.own].logsumexp(dim=1).T


LabelScorer = FirstTokens | FullLabels


def label_scorer(question: Question, device: torch.device) -> LabelScorer:
    """What turns the states at a question's suffixes into log-probabilities of its labels."""
    if question.trie is None:
        return FirstTokens.of(list(question.labels.values()), device)
    return FullLabels.of(question.trie, device)


def label_log_probs(
    hidden: Tensor,  # [suffixes, docs, hidden]: one for first tokens, one a node for full labels
    scorers: Sequence[LabelScorer],
    unembed: Unembed,
) -> list[Tensor]:  # one [docs, labels] fp32 a question
    """The labels' log-probabilities of several questions of both kinds."""
    suffixes, _docs, _hidden = hidden.shape
    counts = [s.nodes if isinstance(s, FullLabels) else 1 for s in scorers]
    assert sum(counts) == suffixes, f"{suffixes} states for {counts}"
    parts = torch.split(hidden, counts)
    firsts = [s for s in scorers if isinstance(s, FirstTokens)]
    of_firsts: Iterator[Tensor] = iter(())
    if firsts:  # together, so that the unembedding is read once for all of them
        own = [part for part, s in zip(parts, scorers, strict=True) if isinstance(s, FirstTokens)]
        together = hidden if len(firsts) == len(scorers) else torch.cat(own)
        of_firsts = iter(first_token_log_probs(together, firsts, unembed))
    return [
        s.log_probs(part, unembed) if isinstance(s, FullLabels) else next(of_firsts)
        for s, part in zip(scorers, parts, strict=True)
    ]


def _rectangle(rows: Sequence[Sequence[int]], padding: int) -> list[list[int]]:
    width = max(map(len, rows))
    return [[*row, *[padding] * (width - len(row))] for row in rows]
