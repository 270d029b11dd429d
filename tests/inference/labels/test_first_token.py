"""Label log-probabilities are those of a log-softmax over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipeline.inference.labels.scoring import LabelScorer
from pipeline.inference.labels.trie import first_token_trie

VOCAB, HIDDEN = 97, 16
CPU = torch.device("cpu")
# Logits below 32 in size, summed over 97 entries: a few roundings of float32 at that size.
TOLERANCE = 8 * 32 * torch.finfo(torch.float32).eps

LABELS: list[list[tuple[int, ...]]] = [
    [(3,), (96,)],
    [(0, 5, 7), (1,), (2, 9)],
    [(4, 8), (8,)],  # a token that two labels share counts for both
    [(11,)],
]


def unembedding() -> Tensor:
    return torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1))


def states(docs: int, questions: int = len(LABELS)) -> Tensor:
    generator = torch.Generator().manual_seed(docs)
    return 2 * torch.randn(questions, docs, HIDDEN, generator=generator)


def read(hidden: Tensor, labels: Sequence[Sequence[tuple[int, ...]]]) -> list[Tensor]:
    weights = unembedding().to(hidden.dtype)
    scorer = LabelScorer([first_token_trie(question) for question in labels], CPU)
    return scorer.log_probs(hidden, lambda rows: rows @ weights)


@pytest.mark.parametrize("docs", [1, 2, 127, 128, 129, 300])
def test_a_label_has_the_probability_of_its_first_tokens(docs: int) -> None:
    hidden = states(docs)
    log_softmax = (hidden.double() @ unembedding().double()).log_softmax(dim=-1)
    for question, log_probs in enumerate(read(hidden, LABELS)):
        expected = torch.stack(
            [log_softmax[question][:, list(ids)].logsumexp(dim=-1) for ids in LABELS[question]],
            dim=-1,
        )
        assert log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=TOLERANCE)


def test_labels_that_hold_every_token_have_probability_one() -> None:
    everything = [tuple(range(0, VOCAB, 2)), tuple(range(1, VOCAB, 2))]
    (log_probs,) = read(states(5, 1), [everything])
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(5), rtol=0, atol=TOLERANCE)


def test_padding_adds_no_probability() -> None:
    alone, padded = read(torch.cat([states(4, 1)] * 2), [[(0,), (5,)], [(0,), (5,), (1, 2, 3)]])
    torch.testing.assert_close(padded[:, :2], alone, rtol=0, atol=0)


@pytest.mark.parametrize("docs, calls", [(128, [128]), (300, [128, 128, 44])])
def test_the_logits_of_at_most_128_rows_stand_in_memory_at_once(
    docs: int, calls: list[int]
) -> None:
    asked: list[int] = []
    weights = unembedding()

    def unembed(rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return rows @ weights

    LabelScorer([first_token_trie([(1,), (2,)])], CPU).log_probs(states(docs, 1), unembed)
    assert asked == calls


def test_probabilities_of_a_half_precision_model_are_normalised_in_float32() -> None:
    hidden = states(6, 1).bfloat16()
    (log_probs,) = read(hidden, LABELS[:1])
    logits = (hidden @ unembedding().bfloat16())[0].double()
    expected = logits.log_softmax(dim=-1)[:, [3, 96]]
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=TOLERANCE)


def test_no_documents_have_no_probabilities() -> None:
    shapes = [tuple(log_probs.shape) for log_probs in read(states(0), LABELS)]
    assert shapes == [(0, 2), (0, 3), (0, 2), (0, 1)]


def test_every_question_needs_its_states() -> None:
    with pytest.raises(AssertionError, match="3 states for 4 nodes"):
        read(states(2, 3), LABELS)
