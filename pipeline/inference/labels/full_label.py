"""Read whole labels' log-probabilities from the hidden states along their token trie.

    question  ──  创 ──┬── 新 ── 设 ── 计        a state at each node that goes on;
              ──  军    └── 意                   a label's sum is over the edges down to its end

Knows hidden states, the unembedding and tries. Knows nothing of text, of forwards or of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.inference.labels.first_token import ROWS, FirstTokens, Unembed, first_token_log_probs
from pipeline.inference.labels.prompt_tokens import Question
from pipeline.inference.labels.trie import LabelTrie


@dataclass(frozen=True, slots=True)
class Edges:
    """What may follow each of some nodes, in the nodes' order."""

    rows: Tensor  # [edges] int64: the number of its node among them; never falling
    token_ids: Tensor  # [edges] int64
    firsts: tuple[int, ...]  # [nodes + 1]: where a node's edges begin

    @classmethod
    def below(cls, trie: LabelTrie, nodes: Sequence[int], device: torch.device) -> Edges:
        """The edges to all children of these nodes."""
        counts = [len(trie.children(node)) for node in nodes]
        rows = np.repeat(np.arange(len(nodes)), counts)
        ids = [trie.token_ids[child] for node in nodes for child in trie.children(node)]
        firsts = (0, *np.cumsum(counts, dtype=np.int64).tolist())
        return cls(
            torch.from_numpy(rows).to(device), torch.tensor(ids, device=device), tuple(firsts)
        )


def edge_log_probs(
    hidden: Tensor,  # [nodes, docs, hidden]
    edges: Edges,
    unembed: Unembed,
) -> Tensor:  # [edges, docs] fp32
    """Each edge's token's log-probability behind its node, out of the whole vocabulary."""
    nodes, docs, _ = hidden.shape
    assert nodes == len(edges.firsts) - 1, f"{nodes} states for {len(edges.firsts) - 1} nodes"
    step = max(1, ROWS // max(1, docs))
    found = [torch.empty((0, docs), dtype=torch.float32, device=hidden.device)]
    for start in range(0, nodes, step):
        stop = min(start + step, nodes)
        logits = unembed(hidden[start:stop].flatten(0, 1)).float()  # [nodes * docs, vocab]
        by_node = logits.view(stop - start, docs, -1)
        everything = by_node.logsumexp(dim=-1)  # [nodes, docs]
        of_part = slice(edges.firsts[start], edges.firsts[stop])
        rows = edges.rows[of_part] - start
        found.append(by_node[rows, :, edges.token_ids[of_part]] - everything[rows])
    return torch.cat(found)


@dataclass(frozen=True, slots=True)
class WholeLabels:
    """One question's trie as tensors; paths and verbalizers are padded to rectangles."""

    edges: Edges
    paths: Tensor  # [verbalizers, tokens] int64: edges from the root; the one behind the last pads
    lengths: Tensor  # [verbalizers, 1] fp32: what a sum is divided by
    verbalizers: Tensor  # [labels, verbalizers] int64; the one behind the last pads

    @classmethod
    def of(cls, trie: LabelTrie, device: torch.device) -> WholeLabels:
        # — node n is the end of edge n - 1: both are numbered breadth first
        padding = len(trie.token_ids) - 1
        paths = [[node - 1 for node in trie.above(end)] for end, _ in trie.ends]
        return cls(
            Edges.below(trie, trie.inner, device),
            torch.tensor(_rectangle(paths, padding), device=device),
            torch.from_numpy(divisors(trie)).to(device).unsqueeze(1),
            torch.tensor(_rectangle(verbalizers_by_label(trie), len(trie.ends)), device=device),
        )

    def log_probs(
        self,
        hidden: Tensor,  # [nodes, docs, hidden]
        unembed: Unembed,
    ) -> Tensor:  # [docs, labels] fp32
        """Each label's log-probability: the sum along a verbalizer, over all of its verbalizers.

        It is that of an answer which begins with the label: where one label's tokens are the
        beginning of another's, the short one's counts the long one's. With a length penalty sums
        are divided by a power of their length first, and are scores.
        """
        _, docs, _ = hidden.shape
        edges = edge_log_probs(hidden, self.edges, unembed)
        nothing = edges.new_zeros((1, docs))
        sums = (
            torch.cat([edges, nothing])[self.paths].sum(dim=1) / self.lengths
        )  # [verbalizers, docs]
        impossible = edges.new_full((1, docs), -torch.inf)
        return torch.cat([sums, impossible])[self.verbalizers].logsumexp(dim=1).T


LabelScorer = FirstTokens | WholeLabels


def label_scorer(question: Question, device: torch.device) -> LabelScorer:
    """What turns the states at a question's suffixes into the log-probabilities of its labels."""
    if question.trie is None:
        return FirstTokens.of(list(question.labels.values()), device)
    return WholeLabels.of(question.trie, device)


def label_log_probs(
    hidden: Tensor,  # [suffixes, docs, hidden]: one of a first-token question, all of a trie's
    scorers: Sequence[LabelScorer],
    unembed: Unembed,
) -> list[Tensor]:  # one [docs, labels] fp32 a question
    """The labels' log-probabilities of several questions."""
    suffixes, _docs, _hidden = hidden.shape
    counts = [1 if isinstance(s, FirstTokens) else len(s.edges.firsts) - 1 for s in scorers]
    assert sum(counts) == suffixes, f"{suffixes} states for {counts}"
    parts = torch.split(hidden, counts)
    first = [i for i, s in enumerate(scorers) if isinstance(s, FirstTokens)]
    of_first: Iterator[Tensor] = iter(())
    if first:  # together, so that the unembedding is read once for all of them
        alike = hidden if len(first) == len(scorers) else torch.cat([parts[i] for i in first])
        first_tokens = [s for s in scorers if isinstance(s, FirstTokens)]
        of_first = iter(first_token_log_probs(alike, first_tokens, unembed))
    return [
        s.log_probs(part, unembed) if isinstance(s, WholeLabels) else next(of_first)
        for s, part in zip(scorers, parts, strict=True)
    ]


def divisors(trie: LabelTrie) -> NDArray[np.float32]:  # [verbalizers]
    """What each verbalizer's sum is divided by: 1 without a length penalty."""
    tokens = np.array([trie.depths[end] for end, _ in trie.ends], dtype=np.float64)
    return np.asarray(tokens**trie.length_penalty, dtype=np.float32)


def verbalizers_by_label(trie: LabelTrie) -> list[list[int]]:
    """By label, which of the trie's ends are its own."""
    found: list[list[int]] = [[] for _ in range(trie.labels)]
    for verbalizer, (_, label) in enumerate(trie.ends):
        found[label].append(verbalizer)
    return found


def _rectangle(rows: Sequence[Sequence[int]], padding: int) -> list[list[int]]:
    longest = max(map(len, rows))
    return [[*row, *[padding] * (longest - len(row))] for row in rows]
