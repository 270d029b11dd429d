"""Which documents people are asked about next. Entry points: `Order` and `ranked`.

`diverse` is TypiClust (Hacohen, Dekel and Weinshall, "Active Learning on a Budget: Opposite
Strategies Suit High and Low Budgets", ICML 2022). With few labels, a readout is so uncertain about
everything that uncertainty says little. Typical documents of large clusters teach more. Documents
that are far from all others (k-centre) are mostly outliers: they taught less than random ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler

from pipeline.errors import option_error

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Kind = Literal["choice", "multi", "score"]
Name = Literal["mixed", "uncertain", "diverse", "random", "near", "disagreement", "audit"]

BATCH = 20  # documents that are chosen together, between two fits
DIVERSE = 40  # the first labels of `mixed`
_NEAREST = 20  # neighbours of the density
_SMALL = 5  # a cluster with fewer documents has outliers
_MOST_CLUSTERS = 500
_DIMS = 50  # of clustered states: distances of 576 stay nearly the same, and k-means takes a tenth
_FORM = "write mixed, uncertain, diverse, random, near:THRESHOLD, disagreement or audit"


@dataclass(frozen=True, slots=True)
class Order:
    """The value of `--by`: what decides which document comes next."""

    name: Name
    threshold: float = 0.5  # of `near`

    @classmethod
    def parse(cls, written: str) -> Order:
        """`near:0.8` and the names without a threshold; SpecError for others."""
        name, colon, threshold = written.partition(":")
        if name not in get_args(Name) or bool(colon) != (name == "near"):
            raise option_error("order", _FORM, written)
        try:
            number = float(threshold) if colon else 0.5
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1:
            raise option_error("order", "write a threshold from 0 to 1, as in near:0.5", written)
        return cls(name, number)  # type: ignore[arg-type] # one of the names

    def __str__(self) -> str:
        return f"near:{self.threshold:g}" if self.name == "near" else self.name

    def at(self, asked: int, *, is_fitted: bool) -> Order:
        """What decides after this number of documents; without a fit, documents are diverse."""
        order = self
        if self.name == "mixed":
            alternating: Name = "random" if asked % 2 else "uncertain"
            order = Order("diverse" if asked < DIVERSE else alternating)
        needs_fit = order.name in ("uncertain", "near", "disagreement")
        return order if is_fitted or not needs_fit else Order("diverse")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the pool's documents, which are in random order."""

    features: Floats  # [rows, dims]
    labelled: Bools  # [rows]: by anybody
    kind: Kind  # of the task
    p: Floats | None = None  # [rows, labels] of the fitted readout; of `multi` each of yes
    # [rows, labels]: what contradicts the readout (a person, or the ledger); NaN: nothing
    other: Floats | None = None


def features(states: NDArray[np.floating], seed: int) -> Floats:  # [rows, hidden] -> [rows, dims]
    """Standardised states on their principal components, for `Known`."""
    scaled = StandardScaler().fit_transform(states.astype(np.float64))
    dims = min(_DIMS, *scaled.shape)
    reduced = PCA(dims, svd_solver="randomized", random_state=seed).fit_transform(scaled)
    return np.asarray(reduced, np.float64)


def ranked(order: Order, known: Known, candidates: Ints, seed: int) -> Ints:
    """The candidates (rows, rising) in the order in which to ask; of `diverse` the first ones.

    `order` is one that `Order.at` returned.
    """
    if order.name in ("random", "audit") or not len(candidates):
        return candidates  # — the pool is in random order
    if order.name == "diverse":
        return typical(known.features, known.labelled, candidates, seed=seed)
    assert known.p is not None, order
    p = known.p[candidates]
    if order.name == "uncertain":
        value = uncertainty(p, known.kind)
    elif order.name == "near":
        value = -np.abs(p[:, 0] - order.threshold)
    else:
        other = np.full(p.shape, np.nan) if known.other is None else known.other[candidates]
        value = contradiction(p, other, known.kind)
        candidates, value = candidates[~np.isnan(value)], value[~np.isnan(value)]
    return candidates[np.argsort(-value, kind="stable")]


def uncertainty(p: Floats, kind: Kind) -> Floats:  # [rows, labels] -> [rows]
    """Higher for documents that the readout is less sure of.

    Minus the margin of the two likeliest labels; of `multi` minus the least |2p - 1|; of `score`
    the entropy, because neighbouring numbers are alike.
    """
    if kind == "multi":
        return np.asarray(-np.abs(2 * p - 1).min(axis=1), np.float64)
    if kind == "score":
        return np.asarray(-(p * np.log(np.maximum(p, 1e-12))).sum(axis=1), np.float64)
    second, first = np.sort(p, axis=1)[:, -2:].T
    return np.asarray(second - first, np.float64)


def contradiction(p: Floats, other: Floats, kind: Kind) -> Floats:  # [rows, labels] x2 -> [rows]
    """The total variation distance; of `multi` the largest one of a label. NaN where `other` is."""
    apart = np.abs(p - other)
    return np.asarray(apart.max(axis=1) if kind == "multi" else apart.sum(axis=1) / 2, np.float64)


def typical(features: Floats, labelled: Bools, candidates: Ints, *, seed: int) -> Ints:
    """Up to BATCH candidates: the most typical one of each large cluster without a label.

    There are as many clusters as labels and a batch. A document is typical if its mean distance to
    the nearest neighbours of its cluster is small.
    """
    rows, _ = features.shape
    count = min(int(labelled.sum()) + BATCH, _MOST_CLUSTERS, rows)
    cluster = KMeans(count, n_init=1, random_state=seed).fit_predict(features)
    sizes = np.bincount(cluster, minlength=count)
    labels = np.bincount(cluster[labelled], minlength=count)
    open_ = np.zeros(rows, np.bool_)
    open_[candidates] = True
    chosen: list[int] = []
    for number in np.lexsort((-sizes, labels, sizes < _SMALL)):
        members = np.flatnonzero(cluster == number)
        if len(chosen) < BATCH and open_[members].any():
            distance = np.where(open_[members], _distances(features[members]), np.inf)
            chosen.append(int(members[distance.argmin()]))
    return np.array(chosen, np.int64)


def _distances(features: Floats) -> Floats:  # [rows, dims] -> [rows]
    """The mean distance of each row to its nearest ones."""
    nearest = min(_NEAREST, len(features) - 1)
    if nearest == 0:
        return np.zeros(len(features))
    distances, _ = NearestNeighbors(n_neighbors=nearest).fit(features).kneighbors()
    return np.asarray(distances.mean(axis=1), np.float64)
