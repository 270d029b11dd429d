"""Which documents people are asked about next. Entry point: `diverse`.

`diverse` is TypiClust (Hacohen, Dekel and Weinshall, "Active Learning on a Budget: Opposite
Strategies Suit High and Low Budgets", ICML 2022), on the words of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from pipeline.evaluation.resampling import Bools, Floats, Ints
from pipeline.review.session import BATCH

_NEAREST = 20  # neighbours of the density
_SMALL = 5  # a cluster with fewer documents has outliers
_MOST_CLUSTERS = 500
_DIMS = 50
_MOST_WORDS = 20_000
_CHARS = 2_000  # of a text, whose start shows its topic
_WORD = r"(?u)\w+|[^\w\s]"  # — any text has one


def diverse(texts: Sequence[str], labelled: Bools, open_: Bools, *, seed: int) -> Ints:
    """Up to BATCH rows of `open_`: the most typical text of each large cluster without a label.

    There are as many clusters as labels and a batch. A text is typical if its mean distance to the
    nearest neighbours of its cluster is small.
    """
    points = features(texts, seed)
    count = min(int(labelled.sum()) + BATCH, _MOST_CLUSTERS)
    count = min(count, len(np.unique(points.round(6), axis=0)))
    cluster = KMeans(count, n_init=1, random_state=seed).fit_predict(points)
    sizes = np.bincount(cluster, minlength=count)
    labels = np.bincount(cluster[labelled], minlength=count)
    chosen: list[int] = []
    for number in np.lexsort((-sizes, labels, sizes < _SMALL)):
        members = np.flatnonzero(cluster == number)
        if len(chosen) < BATCH and open_[members].any():
            distance = np.where(open_[members], _distances(points[members]), np.inf)
            chosen.append(int(members[distance.argmin()]))
    return np.array(chosen, np.int64)


def features(texts: Sequence[str], seed: int) -> Floats:  # [rows] -> [rows, dims]
    """Directions in the main dimensions of the texts' weighted words."""
    vectorizer = TfidfVectorizer(
        token_pattern=_WORD, max_features=_MOST_WORDS, sublinear_tf=True, dtype=np.float64
    )
    words = vectorizer.fit_transform([text[:_CHARS] for text in texts])
    dims = min(_DIMS, min(words.shape) - 1)
    if dims < 1 or len(set(texts)) < 2:
        return np.ones((len(texts), 1))
    reduced = TruncatedSVD(dims, random_state=seed).fit_transform(words)
    return np.asarray(normalize(reduced), np.float64)


def _distances(points: Floats) -> Floats:  # [rows, dims] -> [rows]
    """The mean distance of each row to its nearest ones."""
    nearest = min(_NEAREST, len(points) - 1)
    if nearest == 0:
        return np.zeros(len(points))
    distances, _ = NearestNeighbors(n_neighbors=nearest).fit(points).kneighbors()
    return np.asarray(distances.mean(axis=1), np.float64)
