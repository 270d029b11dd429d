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
from torch.nn.functional import pad

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
    firsts: NDArray[np.int64]  # [nodes + 1]: where a node's edges begin

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], device: torch.device) -> Edges:
        """The edges of nodes that these tokens follow."""
        counts = np.array([*map(len, tokens)], np.int64)
        rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        ids = torch.tensor([token for of_node in tokens for token in of_node], dtype=torch.int64)
        return cls(rows.to(device), ids.to(device), np.append(0, counts.cumsum()))


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
    tokens = edges.token_ids.repeat(docs)  # [docs * edges]
    log_probs = hidden.new_empty(len(rows), dtype=torch.float32)
    most = LOGIT_ROWS if hidden.device.type == "cpu" else GPU_LOGIT_ROWS
    for start in range(0, len(states), most):
        part = states[start : start + most]
        own = slice(begins[start], begins[start + len(part)])
        at = rows[own] - start, tokens[own]
        logits = unembed(part).float()  # [rows, vocab]
        if part.dtype != torch.float32:
            # — between 16 and 32 logits of bfloat16 are 1/8 apart: two labels often tie
            logits[at] = unembed(part[at[0]], at[1])
        log_probs[own] = logits[at] - logits.logsumexp(dim=-1)[at[0]]
    return log_probs.view(docs, count).T


class LabelScorer:
    """Turns the states at the inner nodes of tries into log-probabilities of their labels."""

    def __init__(self, tries: Sequence[LabelTrie], device: torch.device) -> None:
        self._edges = Edges.of([trie.tokens_after(n) for trie in tries for n in trie.inner], device)
        self._labels = [trie.labels for trie in tries]
        paths: list[list[int]] = []  # the edges of each verbalizer, from the root
        verbalizers: list[list[int]] = []  # of each label
        edges = 0
        for trie in tries:
            verbalizers += [[len(paths) + i for i in own] for own in trie.ends_by_label]
            # — node n is the end of edge n - 1: both are numbered breadth first
            paths += [[edges + node - 1 for node in trie.nodes_to(end)] for end, _ in trie.ends]
            edges += len(trie.token_ids) - 1
        # Rectangles: [verbalizers, tokens] int64 and [labels, own verbalizers] int64.
        self._paths = _rectangle(paths, edges, device)
        self._verbalizers = _rectangle(verbalizers, len(paths), device)
        divisors = [divisor for trie in tries for divisor in trie.length_divisors]
        self._divisors = torch.tensor(divisors, device=device).unsqueeze(1)  # [verbalizers, 1]

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
        # — what fills a rectangle adds 0 to a sum, and -inf to a label
        sums = pad(edges, (0, 0, 0, 1))[self._paths].sum(dim=1) / self._divisors
        of_labels = pad(sums, (0, 0, 0, 1), value=-torch.inf)[self._verbalizers].logsumexp(dim=1)
        return [own.T for own in torch.split(of_labels, self._labels)]  # of [labels, docs]


def _rectangle(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> Tensor:
    width = max(map(len, rows), default=0)
    filled = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=device)
