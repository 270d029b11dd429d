"""Each order asks about the documents that it promises first."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import entropy

from pipeline.errors import SpecError
from pipeline.review.choice import (
    BATCH,
    DIVERSE,
    Known,
    Order,
    features,
    ranked,
    typical,
    uncertainty,
)

P = np.array([[0.9, 0.1], [0.55, 0.45], [0.2, 0.8], [0.48, 0.52], [0.02, 0.98]])
ROWS = np.arange(len(P))


def known(p: NDArray[np.float64] = P, **changes: object) -> Known:
    own = {"features": np.zeros((len(p), 2)), "labelled": np.zeros(len(p), bool), "kind": "choice"}
    return Known(**{**own, "p": p, **changes})  # type: ignore[arg-type]


def blobs(sizes: list[int], seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Points around centres that are far apart, and the number of each point's centre."""
    source = np.random.default_rng(seed)
    centre = np.repeat(np.arange(len(sizes)), sizes)
    return np.eye(len(sizes))[centre] * 100 + source.normal(size=(len(centre), len(sizes))), centre


@pytest.mark.parametrize(
    ("written", "first"),
    [
        ("uncertain", [3, 1, 2]),
        ("near:0.2", [2, 4, 3]),
        ("near:1", [0, 1, 3]),
        ("random", [0, 1, 2]),
    ],
)
def test_documents_come_by_the_readouts_answer(written: str, first: list[int]) -> None:
    assert ranked(Order.parse(written), known(), ROWS, 0)[:3].tolist() == first
    odd = ROWS[[0, 2, 4]]
    assert set(ranked(Order.parse(written), known(), odd, 0)) == {0, 2, 4}


def test_of_several_labels_the_margin_of_one_and_of_a_score_the_entropy_counts() -> None:
    several = np.array([[0.9, 0.1], [0.99, 0.52], [0.3, 0.7]])
    np.testing.assert_allclose(uncertainty(several, "multi"), [-0.8, -0.04, -0.4])
    scores = np.random.default_rng(0).dirichlet(np.ones(4), 20)
    np.testing.assert_allclose(uncertainty(scores, "score"), entropy(scores, axis=1))
    three = np.array([[0.5, 0.3, 0.2], [0.45, 0.44, 0.11]])
    np.testing.assert_allclose(uncertainty(three, "choice"), [-0.2, -0.01])


def test_documents_whose_other_answer_contradicts_the_readout_come_first() -> None:
    other = np.full(P.shape, np.nan)
    other[[0, 2, 4]] = [[0.8, 0.2], [1, 0], [0.4, 0.6]]
    assert ranked(Order("disagreement"), known(other=other), ROWS, 0).tolist() == [2, 4, 0]
    assert ranked(Order("disagreement"), known(), ROWS, 0).tolist() == []


def test_diverse_documents_are_one_of_each_large_cluster_without_a_label() -> None:
    sizes = [40, 35, 30, 25, *[20] * 16, 3]
    points, centre = blobs(sizes)
    labelled = np.zeros(len(points), bool)
    labelled[centre == 1] = True  # 35 labels: more clusters than blobs, and one blob is known
    chosen = typical(points, np.zeros(len(points), bool), np.arange(len(points)), seed=0)
    assert len(chosen) == BATCH
    # — k-means may split a blob; nearly all choices are of different ones, outliers last
    assert len(set(centre[chosen])) >= 16 and len(sizes) - 1 not in centre[chosen[:16]]
    again = typical(points, labelled, np.flatnonzero(~labelled), seed=0)
    assert 1 not in centre[again] and len(set(again.tolist())) == len(again) == BATCH


def test_a_typical_document_is_near_the_middle_of_its_cluster() -> None:
    points, centre = blobs([60] * BATCH)
    chosen = typical(points, np.zeros(len(points), bool), np.arange(len(points)), seed=0)
    distance = np.linalg.norm(points - np.eye(BATCH)[centre] * 100, axis=1)
    assert distance[chosen].mean() < 0.9 * distance.mean()


def test_features_keep_the_neighbours_of_standardised_states() -> None:
    source = np.random.default_rng(0)
    states = (source.normal(size=(200, 8)) @ source.normal(size=(8, 300))).astype(np.float32)
    reduced = features(states, 0)
    scaled = (states - states.mean(axis=0)) / states.std(axis=0)
    assert reduced.shape == (200, 50)
    apart = [np.linalg.norm(each[:, None] - each, axis=2) for each in (scaled, reduced)]
    np.testing.assert_allclose(apart[1], apart[0], rtol=1e-3, atol=1e-2)


def test_mixed_is_diverse_first_and_then_takes_turns() -> None:
    order = Order("mixed")
    assert {str(order.at(n, is_fitted=True)) for n in range(DIVERSE)} == {"diverse"}
    later = [str(order.at(n, is_fitted=True)) for n in range(DIVERSE, DIVERSE + 4)]
    assert later == ["uncertain", "random"] * 2
    assert str(Order("near", 0.3).at(100, is_fitted=True)) == "near:0.3"
    for name in ("uncertain", "near", "disagreement"):
        assert str(Order.parse(name + ":.5" * (name == "near")).at(0, is_fitted=False)) == "diverse"


@pytest.mark.parametrize("written", ["", "near", "near:", "near:1.5", "near:x", "random:1", "most"])
def test_a_wrong_order_is_refused(written: str) -> None:
    with pytest.raises(SpecError, match=r"^order: write "):
        Order.parse(written)
