"""Score labels by the tokens of their tries, from hidden states.

    question  ──  创 ──┬── 新 ── 设 ── 计        a state at each node with children; a label's
              ──  军    └── 意                   score is the sum over the edges to its end

The trie of first tokens has one inner node, the root. Entry point: `LabelScorer`, which scores all
questions together. Reads hidden states and the unembedding; must not import tokenizers or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.inference.labels.trie import LabelTrie
from pipeline.inference.memory import GPU_LOGIT_ROWS, LOGIT_ROWS


class Unembed(Protocol):
    """The logits of states [rows, hidden]."""

    def __call__(self, states: Tensor, tokens: Tensor | None = None) -> Tensor:
        """[rows, vocab]; with a token for each row, [rows] fp32: the logits of these tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges from some nodes to all of their children, in the nodes' order."""

    rows: Tensor  # [edges] int64: the index of each edge's node; never falling
    token_ids: Tensor  # [edges] int64
    firsts: tuple[int, ...]  # [nodes + 1]: where a node's edges begin

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], device: torch.device) -> Edges:
        """The edges of nodes that these tokens follow."""
        counts = [len(of_node) for of_node in tokens]
        rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        ids = torch.tensor([token for of_node in tokens for token in of_node], dtype=torch.int64)
        firsts = (0, *np.cumsum(counts, dtype=np.int64).tolist())
        return cls(rows.to(device), ids.to(device), firsts)


def edge_log_probs(
    hidden: Tensor,  # [nodes, docs, hidden]
    edges: Edges,
    unembed: Unembed,
) -> Tensor:  # [edges, docs] fp32
    """The log-probability of each edge's token after its node, out of the whole vocabulary."""
    nodes, docs, _hidden = hidden.shape
    assert nodes == len(edges.firsts) - 1, f"{nodes} states for {len(edges.firsts) - 1} nodes"
    log_probs = hidden.new_empty((len(edges.rows), docs), dtype=torch.float32)
    # — all nodes of some documents together, so that the unembedding is read once a part
    most = LOGIT_ROWS if hidden.device.type == "cpu" else GPU_LOGIT_ROWS
    docs_at_once = max(1, most // max(1, nodes))
    nodes_at_once = max(1, most // docs_at_once)
    for first_doc in range(0, docs, docs_at_once):
        part = slice(first_doc, first_doc + docs_at_once)
        for first in range(0, nodes, nodes_at_once):
            stop = min(first + nodes_at_once, nodes)
            states = hidden[first:stop, part]
            logits = unembed(states.flatten(0, 1)).float()  # [nodes * docs, vocab]
            by_node = logits.view(*states.shape[:2], -1)
            own = slice(edges.firsts[first], edges.firsts[stop])
            rows, tokens = edges.rows[own] - first, edges.token_ids[own]
            if states.dtype != torch.float32:
                # — between 16 and 32 logits of bfloat16 are 1/8 apart: two labels often tie
                of_edges = states[rows]  # [edges, docs, hidden]
                of_tokens = unembed(
                    of_edges.flatten(0, 1), tokens.repeat_interleave(of_edges.shape[1])
                )
                by_node[rows, :, tokens] = of_tokens.view(of_edges.shape[:2])
            log_probs[own, part] = by_node[rows, :, tokens]
            log_probs[own, part] -= by_node.logsumexp(dim=-1)[rows]
    return log_probs


@dataclass(frozen=True, slots=True)
class _TrieSums:
    """One question's trie as tensors; paths and verbalizers are padded to rectangles."""

    edges: int
    paths: Tensor  # [verbalizers, tokens] int64: edges from the root; padding: number of edges
    divisors: Tensor  # [verbalizers, 1] fp32: by which sums are divided
    own: Tensor  # [labels, own verbalizers] int64; padding: number of verbalizers

    @classmethod
    def of(cls, trie: LabelTrie, device: torch.device) -> _TrieSums:
        # — node n is the end of edge n - 1: both are numbered breadth first
        edges = len(trie.token_ids) - 1
        paths = [[node - 1 for node in trie.nodes_to(end)] for end, _ in trie.ends]
        return cls(
            edges,
            torch.tensor(_rectangle(paths, edges), device=device),
            torch.from_numpy(trie.length_divisors).to(device).unsqueeze(1),
            torch.tensor(_rectangle(trie.ends_by_label, len(trie.ends)), device=device),
        )

    def log_probs(self, edges: Tensor) -> Tensor:  # [edges, docs] -> [docs, labels], both fp32
        _edges, docs = edges.shape
        padded = torch.cat([edges, edges.new_zeros((1, docs))])
        sums = padded[self.paths].sum(dim=1) / self.divisors  # [verbalizers, docs]
        padded = torch.cat([sums, sums.new_full((1, docs), -torch.inf)])
        return padded[self.own].logsumexp(dim=1).T


class LabelScorer:
    """Turns the states at the inner nodes of tries into log-probabilities of their labels."""

    def __init__(self, tries: Sequence[LabelTrie], device: torch.device) -> None:
        tokens = [trie.tokens_after(node) for trie in tries for node in trie.inner]
        self._edges = Edges.of(tokens, device)
        self._tries = [_TrieSums.of(trie, device) for trie in tries]

    def log_probs(
        self,
        hidden: Tensor,  # [nodes, docs, hidden]: the inner nodes of one trie after the other
        unembed: Unembed,
    ) -> list[Tensor]:  # one [docs, labels] fp32 a trie
        """Each label's log-probability: the sum along a verbalizer, over all of its verbalizers.

        It is the probability of an answer that begins with the label, out of the whole vocabulary.
        If one label's tokens begin another's, the shorter label includes the longer one. With a
        length penalty the results are scores: sums are divided by a power of their length first.
        """
        return self.of_edges(edge_log_probs(hidden, self._edges, unembed))

    def of_edges(
        self,
        edges: Tensor,  # [edges, docs] fp32: of all inner nodes, in their order
    ) -> list[Tensor]:  # one [docs, labels] fp32 a trie
        """`log_probs`, where the log-probability of each edge is known."""
        by_trie = torch.split(edges, [trie.edges for trie in self._tries])
        return [trie.log_probs(own) for trie, own in zip(self._tries, by_trie, strict=True)]


def _rectangle(rows: Sequence[Sequence[int]], padding: int) -> list[list[int]]:
    width = max(map(len, rows))
    return [[*row, *[padding] * (width - len(row))] for row in rows]
