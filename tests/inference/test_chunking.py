"""Cutting a document and joining its answers: what is kept, what is covered, what is combined."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.inference.chunking import Chunks, Combine, TooLong, chunk_tokens, combine

CUTS: list[TooLong] = ["head", "tail", "middle", "chunk"]
# One rounding to float32 of log-probabilities below 16 in size, and of the sum they came from.
TOLERANCE = 4 * 16 * np.finfo(np.float32).eps


def chunks(tokens: int, max_tokens: int, overlap: int) -> tuple[tuple[int, ...], ...]:
    cut = chunk_tokens(
        range(tokens), max_tokens=max_tokens, too_long="chunk", overlap_tokens=overlap
    )
    assert not cut.truncated
    return cut.token_ids


@pytest.mark.parametrize("too_long", CUTS)
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_document_that_fits_is_whole(too_long: TooLong, tokens: int) -> None:
    ids = tuple(range(tokens))
    cut = chunk_tokens(list(ids), max_tokens=4, too_long=too_long, overlap_tokens=1)
    assert cut == Chunks((ids,), truncated=False)
    assert cut.tokens == tokens


@pytest.mark.parametrize(
    "too_long, kept",
    [("head", (0, 1, 2, 3)), ("tail", (5, 6, 7, 8)), ("middle", (2, 3, 4, 5))],
)
def test_a_long_document_keeps_what_the_spec_names(
    too_long: TooLong, kept: tuple[int, ...]
) -> None:
    cut = chunk_tokens(range(9), max_tokens=4, too_long=too_long, overlap_tokens=1)
    assert cut == Chunks((kept,), truncated=True)
    assert cut.tokens == 4


@pytest.mark.parametrize("tokens", range(5, 12))
def test_the_middle_leaves_as_much_before_as_behind(tokens: int) -> None:
    (kept,) = chunk_tokens(
        range(tokens), max_tokens=4, too_long="middle", overlap_tokens=0
    ).token_ids
    before, behind = kept[0], tokens - 1 - kept[-1]
    assert kept == tuple(range(before, before + 4))
    assert behind - before in (0, 1)


def test_the_example_of_the_docstring() -> None:
    assert chunks(9, 4, 1) == ((0, 1, 2, 3), (3, 4, 5, 6), (5, 6, 7, 8))


@pytest.mark.parametrize("max_tokens, overlap", [(1, 0), (4, 0), (4, 1), (4, 3), (7, 2), (30, 29)])
@pytest.mark.parametrize("tokens", [5, 8, 9, 10, 31, 100])
def test_chunks_cover_the_document_overlap_and_are_as_few_as_possible(
    tokens: int, max_tokens: int, overlap: int
) -> None:
    pieces = chunks(tokens, max_tokens, overlap)
    if tokens > max_tokens:
        assert len(pieces) == math.ceil((tokens - overlap) / (max_tokens - overlap))
    assert {token for piece in pieces for token in piece} == set(range(tokens))
    for piece in pieces:
        assert piece == tuple(range(piece[0], piece[0] + min(tokens, max_tokens)))
    for left, right in pairwise(pieces):
        assert left[0] < right[0]
        assert len(set(left) & set(right)) >= overlap


def some_log_probs(seed: int, pieces: int, labels: int) -> NDArray[np.float32]:
    """Labels that leave some of the probability to other tokens."""
    source = np.random.default_rng(seed)
    logits = source.normal(scale=3.0, size=(pieces, labels + 5))
    whole = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return whole[:, :labels].astype(np.float32)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pieces", [1, 2, 9])
def test_the_mean_is_the_mean_probability(seed: int, pieces: int) -> None:
    log_probs = some_log_probs(seed, pieces, 3)
    mean = combine(log_probs, "mean")
    expected = np.log(np.exp(log_probs.astype(np.float64)).mean(axis=0))
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pieces", [1, 2, 9])
def test_the_maximum_is_the_piece_surest_of_the_first_label(seed: int, pieces: int) -> None:
    log_probs = some_log_probs(seed, pieces, 3)
    probs = np.exp(log_probs.astype(np.float64))
    surest = (probs[:, 0] / probs.sum(axis=1)).argmax()
    np.testing.assert_array_equal(combine(log_probs, "max"), log_probs[surest])


def test_the_maximum_looks_at_shares_and_not_at_the_mass_of_the_labels() -> None:
    probs = np.array([[0.4, 0.5], [0.02, 0.001]], dtype=np.float32)
    np.testing.assert_array_equal(combine(np.log(probs), "max"), np.log(probs[1]))


@pytest.mark.parametrize("how", ["max", "mean"])
def test_one_piece_is_its_own_answer(how: Combine) -> None:
    log_probs = some_log_probs(0, 1, 4)
    np.testing.assert_allclose(combine(log_probs, how), log_probs[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("how", ["max", "mean"])
def test_the_order_of_the_pieces_does_not_matter(how: Combine) -> None:
    log_probs = some_log_probs(1, 7, 3)
    again = combine(log_probs[::-1], how)
    np.testing.assert_allclose(again, combine(log_probs, how), rtol=0, atol=TOLERANCE)
