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
from numpy.typing import NDArray
from torch import Tensor

from pipeline.inference.labels.trie import LabelTrie
from pipeline.inference.memory import GPU_LOGIT_ROWS, LOGIT_ROWS


class Unembed(Protocol):
    """The logits of states [rows, hidden]."""

    def __call__(self, states: Tensor, tokens: Tensor | None = None) -> Tensor:
        """[rows, vocab]; with tokens, [rows, tokens] fp32: the logits of these alone."""
        ...


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges from some nodes to all of their children, in the nodes' order."""

    rows: Tensor  # [edges] int64: the index of each edge's node; never falling
    token_ids: Tensor  # [edges] int64
    different: Tensor  # [tokens] int64: of these, each once
    columns: Tensor  # [edges] int64: the place of each edge's token among them
    firsts: NDArray[np.int64]  # [nodes + 1]: where a node's edges begin

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], device: torch.device) -> Edges:
        """The edges of nodes that these tokens follow."""
        counts = np.array([*map(len, tokens)], np.int64)
        rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        ids = torch.tensor([token for of_node in tokens for token in of_node], dtype=torch.int64)
        different, columns = torch.unique(ids, return_inverse=True)
        firsts = np.append(0, counts.cumsum())
        return cls(
            rows.to(device), ids.to(device), different.to(device), columns.to(device), firsts
        )


def edge_log_probs(
    hidden: Tensor,  # [nodes, docs, hidden]
    edges: Edges,
    unembed: Unembed,
) -> Tensor:  # [edges, docs] fp32
    """The log-probability of each edge's token after its node, out of the whole vocabulary."""
    nodes, docs, _hidden = hidden.shape
    *firsts, count = edges.firsts.tolist()
    assert nodes == len(firsts), f"{nodes} states for {len(firsts)} nodes"
    states = hidden.transpose(0, 1).flatten(0, 1)  # [docs * nodes, hidden]
    # [docs * nodes + 1]: where a state's edges begin
    begins = np.append(np.add.outer(count * np.arange(docs), firsts), docs * count)
    rows_of_docs = nodes * torch.arange(docs, device=hidden.device)
    rows = torch.add(rows_of_docs[:, None], edges.rows).flatten()  # [docs * edges]
    tokens, columns = edges.token_ids.repeat(docs), edges.columns.repeat(docs)  # [docs * edges]
    log_probs = hidden.new_empty(len(rows), dtype=torch.float32)
    most = LOGIT_ROWS if hidden.device.type == "cpu" else GPU_LOGIT_ROWS
    for start in range(0, len(states), most):
        part = states[start : start + most]
        own = slice(begins[start], begins[start + len(part)])
        at = rows[own] - start, tokens[own]
        logits = unembed(part).float()  # [rows, vocab]
        if part.dtype != torch.float32:
            # — between 16 and 32 logits of bfloat16 are 1/8 apart: two labels often tie
            logits[at] = unembed(part, edges.different)[at[0], columns[own]]
        log_probs[own] = logits[at] - logits.logsumexp(dim=-1)[at[0]]
    return log_probs.view(docs, count).T


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
        self._edges = Edges.of([trie.tokens_after(n) for trie in tries for n in trie.inner], device)
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
