"""Label log-probabilities are sums along paths of a log-softmax over the whole vocabulary."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.inference.labels.scoring import LabelScorer, Unembed
from pipeline.inference.labels.trie import LabelTrie, Path

VOCAB, HIDDEN = 97, 16
CPU = torch.device("cpu")
# Logits below 32 in size, summed over 97 entries, for each token of a label: a few roundings of
# float32 at that size.
TOLERANCE = 8 * 32 * torch.finfo(torch.float32).eps

FIRST = [
    LabelTrie.of([[(token,) for token in tokens] for tokens in labels])
    for labels in (
        [(3,), (96,)],
        [(0, 5, 7), (1,), (2, 9)],
        [(4, 8), (8,)],  # a token that two labels share counts for both
        [(11,)],
    )
]


def some_labels(source: random.Random, labels: int) -> list[set[Path]]:
    """Labels of one to three verbalizers of one to five tokens, which begin alike."""
    paths: set[Path] = set()
    while len(paths) < 2 * labels:
        paths.add(tuple(source.choices(range(4), k=source.randint(1, 5))))
    forms: list[set[Path]] = [set() for _ in range(labels)]
    for i, path in enumerate(sorted(paths, key=lambda path: source.random())):
        forms[i % labels].add(path)
    return forms


def unembedding() -> Tensor:
    return torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1))


def states(docs: int, tries: Sequence[LabelTrie]) -> Tensor:  # [nodes, docs, hidden]
    nodes = sum(len(trie.inner) for trie in tries)
    return 2 * torch.randn(nodes, docs, HIDDEN, generator=torch.Generator().manual_seed(docs))


def defined(trie: LabelTrie, log_softmax: Tensor) -> np.ndarray:  # [labels, docs]
    """The sums of [inner nodes, docs, vocab] along each verbalizer, over those of a label."""
    number = {node: i for i, node in enumerate(trie.inner)}
    by_label = []
    for paths in trie.verbalizers:
        sums = []
        for path in paths:
            node, total = 0, np.zeros(log_softmax.shape[1])
            for token in path:
                total = total + log_softmax[number[node], :, token].numpy()
                node = next(c for c in trie.children(node) if trie.token_ids[c] == token)
            sums.append(total / len(path) ** trie.length_penalty)
        by_label.append(np.logaddexp.reduce(sums))
    return np.stack(by_label)


@pytest.mark.parametrize("docs", [0, 1, 3, 127, 128, 129, 300])
def test_a_label_has_the_sum_of_its_verbalizers_beside_any_other_labels(docs: int) -> None:
    source = random.Random(docs)
    large = LabelTrie.of(some_labels(source, 90))
    tries = [*FIRST, large, LabelTrie.of(some_labels(source, 6), length_penalty=0.7)]
    hidden, weights, rows = states(docs, tries), unembedding(), []

    def unembed(part: Tensor, tokens: Tensor | None = None) -> Tensor:
        rows.append(len(part))
        return part @ weights

    answers = LabelScorer(tries, CPU).log_probs(hidden, unembed)
    assert max(rows, default=0) <= 128
    log_softmax = (hidden.double() @ weights.double()).log_softmax(dim=-1)
    by_trie = torch.split(log_softmax, [len(trie.inner) for trie in tries])
    for trie, log_probs, of_trie in zip(tries, answers, by_trie, strict=True):
        assert log_probs.dtype == torch.float32 and log_probs.shape == (docs, trie.labels)
        expected = torch.from_numpy(defined(trie, of_trie)).T
        atol = max(trie.depths) * TOLERANCE
        torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=atol)


# — torch's device without memory represents a GPU
@pytest.mark.parametrize(
    "device, docs, calls",
    [("cpu", 128, [128]), ("cpu", 300, [128, 128, 44]), ("meta", 3_000, [2_048, 952])],
)
def test_as_many_rows_are_read_at_once_as_the_limit_of_the_device_allows(
    device: str, docs: int, calls: list[int]
) -> None:
    rows: list[int] = []

    def unembed(part: Tensor, tokens: Tensor | None = None) -> Tensor:
        rows.append(len(part))
        return part @ unembedding().to(device)

    scorer = LabelScorer(FIRST[:1], torch.device(device))
    scorer.log_probs(states(docs, FIRST[:1]).to(device), unembed)
    assert rows == calls


def of_half_precision(weights: Tensor) -> Unembed:  # weights [hidden, vocab] bf16
    def unembed(rows: Tensor, tokens: Tensor | None = None) -> Tensor:
        if tokens is None:
            return rows @ weights
        return rows.float() @ weights[:, tokens].float()

    return unembed


def test_labels_of_a_half_precision_model_have_logits_of_float32() -> None:
    hidden, weights = states(6, FIRST[:1]).bfloat16(), unembedding().bfloat16()
    (log_probs,) = LabelScorer(FIRST[:1], CPU).log_probs(hidden, of_half_precision(weights))
    logits = (hidden @ weights)[0].double()
    logits[:, [3, 96]] = (hidden.double() @ weights.double())[0][:, [3, 96]]
    expected = logits.log_softmax(dim=-1)[:, [3, 96]]
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=TOLERANCE)


def test_the_weights_of_label_tokens_are_read_once_for_all_documents() -> None:
    large, asked = LabelTrie.of(some_labels(random.Random(0), 90)), list[int]()
    weights = unembedding().bfloat16()

    def unembed(rows: Tensor, tokens: Tensor | None = None) -> Tensor:
        asked.append(0 if tokens is None else len(tokens))
        return of_half_precision(weights)(rows, tokens)

    LabelScorer([large, large], CPU).log_probs(states(100, [large, large]).bfloat16(), unembed)
    different = len({token for node in large.inner for token in large.tokens_after(node)})
    assert set(asked) == {0, different}


@pytest.mark.parametrize("seed", range(20))
def test_a_trie_holds_every_verbalizer_once(seed: int) -> None:
    labels = some_labels(random.Random(seed), 9)
    trie = LabelTrie.of(labels)
    for forms, paths in zip(labels, trie.verbalizers, strict=True):
        kept = set(paths)
        assert kept <= forms and len(kept) == len(paths)
        # what is left out goes on from what is kept
        assert all(any(path[: len(k)] == k for k in kept) for path in forms)
        assert not any(a != b and a[: len(b)] == b for a in kept for b in kept)
    paths = [path for of_label in trie.verbalizers for path in of_label]
    prefixes = {path[:n] for path in paths for n in range(len(path) + 1)}
    nodes = [trie.path(node) for node in range(len(trie.token_ids))]
    assert set(nodes) == prefixes and len(nodes) == len(prefixes)
    for node, path in enumerate(nodes):
        below = {nodes[child] for child in trie.children(node)}
        assert below == {p for p in prefixes if p and p[:-1] == path}
        assert (node in trie.inner) == bool(below)
