"""Diverse documents are typical ones of large clusters; uncertain ones have small margins."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics.pairwise import cosine_similarity

from pipeline.review.order import diverse, features
from pipeline.review.session import BATCH, uncertainty

TOPICS = ("court judge crime law", "paint colour brush canvas", "goal ball match team")


def texts(per_topic: int) -> list[str]:
    source = np.random.default_rng(0)
    return [
        " ".join(source.choice(topic.split(), 12)) for topic in TOPICS for _ in range(per_topic)
    ]


def test_features_of_few_words_have_the_angles_of_their_tf_idf() -> None:
    own = texts(30)
    words = TfidfVectorizer(sublinear_tf=True).fit_transform(own)
    points = features(own, seed=1)
    # — 11 of 12 dimensions of the words: what the last one adds is small
    np.testing.assert_allclose(points @ points.T, cosine_similarity(words), atol=0.15)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_has_every_topic_and_only_open_documents(seed: int) -> None:
    own = texts(40)
    open_ = np.random.default_rng(seed).random(len(own)) < 0.7
    labelled = ~open_
    chosen = diverse(own, labelled, open_, seed=seed)
    assert 0 < len(chosen) <= BATCH and len({*chosen.tolist()}) == len(chosen)
    assert open_[chosen].all() and {*(chosen // 40).tolist()} == {0, 1, 2}
    assert (chosen == diverse(own, labelled, open_, seed=seed)).all()


def test_a_cluster_without_a_label_comes_before_one_with_labels() -> None:
    own = texts(40)
    labelled = np.arange(len(own)) < 80  # — the first two topics
    chosen = diverse(own, labelled, ~labelled, seed=0)
    assert (chosen >= 80).all()


@pytest.mark.parametrize("own", [["a"], ["!"] * 3, ["same text"] * 30, ["a", "b"], ["日本語", "?"]])
def test_texts_without_words_or_differences_have_an_order_too(own: list[str]) -> None:
    every = np.ones(len(own), np.bool_)
    chosen = diverse(own, ~every, every, seed=0)
    assert 1 <= len(chosen) <= len(own)


def test_the_uncertain_documents_are_those_with_the_least_margin() -> None:
    p = np.array([[0.5, 0.5, 0.0], [0.9, 0.05, 0.05], [0.4, 0.35, 0.25], [np.nan] * 3])
    np.testing.assert_allclose(uncertainty(p, "choice")[:3], [0, -0.85, -0.05])
    np.testing.assert_allclose(uncertainty(p, "multi")[:3], [0, -0.8, -0.2])
    assert np.isnan(uncertainty(p, "choice")[3]) and np.isnan(uncertainty(p, "multi")[3])
