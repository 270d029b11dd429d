"""Find the likeliest of many labels: their trie, followed from the root by the best paths at once.

    root ── Sci ── ence/ ──┬── Phys ── ics/ ──┬── Opt ── ics     one forward a parting:
                           │                  └── Ac ── oust…    all that is followed, with what
                           └── Bio ── logy/ ── …                 goes on for certain behind it

Knows tries, and how to ask for the states at paths of tokens. Knows nothing of what is above the
paths, of text or of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.inference.labels.first_token import Unembed
from pipeline.inference.labels.full_label import (
    Edges,
    divisors,
    edge_log_probs,
    verbalizers_by_label,
)
from pipeline.inference.labels.trie import LabelTrie, Path

States = Callable[[Sequence[Path]], Tensor]  # paths below a question -> [paths, hidden]


@torch.inference_mode()
def search(
    trie: LabelTrie, states: States, unembed: Unembed, *, beam: int | None, max_tokens: int
) -> NDArray[np.float32]:  # [labels]
    """Every label's log-probability, or -inf where its path was not followed to the end.

    At each parting the `beam` likeliest nodes that go on are followed; None follows all, which is
    exact. Whatever ends at a node that was reached is scored, however unlikely. `max_tokens` of
    paths go through the model at once.
    """
    scores = np.full(len(trie.token_ids), -np.inf)
    scores[0] = 0.0
    followed = [0]
    while followed:
        asked = [node for start in followed for node in trie.chain(start)]
        parts = [_below(trie, group, states, unembed) for group in _groups(trie, asked, max_tokens)]
        edges = iter(torch.cat(parts).numpy(force=True))
        for node in asked:  # from the root down
            for child in trie.children(node):
                scores[child] = scores[node] + next(edges)
        behind = {c for node in asked for c in trie.children(node) if trie.children(c)}
        followed = _likeliest(behind.difference(asked), scores, beam)
    return _of_labels(trie, scores)


def _below(
    trie: LabelTrie, nodes: Sequence[int], states: States, unembed: Unembed
) -> Tensor:  # [edges] fp32
    """The log-probabilities of all children of the nodes."""
    hidden = states([trie.path(node) for node in nodes])  # [nodes, hidden]
    edges = Edges.below(trie, nodes, hidden.device)
    return edge_log_probs(hidden.unsqueeze(1), edges, unembed)[:, 0]


def _groups(trie: LabelTrie, nodes: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """The nodes in runs whose paths have so many tokens at most; a longer one goes alone."""
    group: list[int] = []
    tokens = 0
    for node in nodes:
        more = trie.depths[node] + 1  # with the token that every path hangs below
        if group and tokens + more > max_tokens:
            yield group
            group, tokens = [], 0
        group.append(node)
        tokens += more
    yield group


def _likeliest(nodes: set[int], scores: NDArray[np.float64], beam: int | None) -> list[int]:
    """In the trie's order, where what shares a prefix stands together."""
    if beam is None or len(nodes) <= beam:
        return sorted(nodes)
    return sorted(sorted(nodes, key=lambda node: (-scores[node], node))[:beam])


def _of_labels(trie: LabelTrie, scores: NDArray[np.float64]) -> NDArray[np.float32]:
    """A label's verbalizers together; one that was not reached adds nothing."""
    sums = scores[[end for end, _ in trie.ends]] / divisors(trie)
    found = [np.logaddexp.reduce(sums[verbalizers]) for verbalizers in verbalizers_by_label(trie)]
    return np.array(found, dtype=np.float32)
