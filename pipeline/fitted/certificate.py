"""What a run proved about a cascade: which answers decide, and the promise that they keep.

Entry points: `Certificate`, and `parse_certificate`, which reads the object of an output; `hash_of`
the shards that one is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.hashes import canonical_json, parse_json, short_hash, validated

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Which answers of a stage before the last decide."""

    # By label, the probabilities at which the label does not apply, or below, and at which it
    # applies, or above. -1 and 2: never.
    at: Mapping[str, tuple[float, float]]
    # Whether each of these labels must be decided; otherwise the likeliest label alone.
    each: bool

    def decides(
        self,
        p: NDArray[np.floating],  # [docs, labels]
        labels: tuple[str, ...],
    ) -> NDArray[np.bool_]:  # [docs]
        """Whether a stage decides documents with these probabilities."""
        low, high = (
            np.array([self.at.get(label, (-1.0, 2.0))[side] for label in labels], np.float32)
            for side in (0, 1)
        )
        p = p.astype(np.float32)
        if not self.each:
            chosen = np.nan_to_num(p, nan=-1).argmax(axis=1)
            return np.asarray(p[np.arange(len(p)), chosen] >= high[chosen], np.bool_)
        own = [number for number, label in enumerate(labels) if label in self.at]
        decided = (p[:, own] <= low[own]) | (p[:, own] >= high[own])
        return np.asarray(decided.all(axis=1), np.bool_)


@dataclass(frozen=True, slots=True)
class Share:
    """A share that is promised: the trials that were errors, and the share that they prove."""

    promised: float
    trials: int
    errors: int
    proved: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a run proved about the cascade of a task. Also its JSON form."""

    task: str
    promise: Mapping[str, Any]  # as the spec has it
    stages: tuple[str, ...]  # raw fingerprints; the last one is the whole model's
    draw: float  # documents with a draw below are the sample; its second half proves
    # The hash of the spec's name, the task's condition, and the model that readouts are of.
    scope: str = ""
    thresholds: Thresholds | None = None  # None: the last stage answers everything
    reason: str = ""  # why the last stage answers everything
    # Of the rules that were tested: by part and class, how right an answer is by its probability
    # (`Judged.curves`); and which of them, from careful to cheap, has the thresholds.
    curves: tuple[tuple[tuple[float, float], ...], ...] = ()
    rule: int = -1
    readout: str = ""  # the key of the fitted readout in the output; "": the spec has the stages
    max_tokens: int | None = None  # of a document, that the readout reads; None: as the spec says
    layer: int | None = None  # after which it is read
    cost: float = 0.0  # of the stages before the last, as a share of the whole model's
    shards: str = ""  # the hash of the shards that it is about
    documents: int = 0  # of the sample's second half with an answer of every stage
    decided: float = 0.0  # share of these that a stage before the last decides
    # By the name of what is promised; of groups, `NAME (GROUP)`.
    shares: Mapping[str, Share] = field(default_factory=dict)
    groups: tuple[str, ...] = ()  # of each of these documents, if the promise is about groups

    def without_proof(self, draw: float) -> Certificate:
        """A certificate of the same cascade, with the stages of its spec, which proves nothing."""
        stages = self.stages[1:] if self.readout else self.stages
        return Certificate(self.task, self.promise, stages, draw, self.scope)

    @property
    def content(self) -> dict[str, Any]:
        """What can change an answer: the stages and the thresholds."""
        assert self.thresholds is not None, self.task
        return {"stages": list(self.stages), **asdict(self.thresholds)}

    def proved_of(self, promise: Mapping[str, Any]) -> dict[str, float]:
        """The proved shares that are about the same as those of another promise."""
        same = all(
            self.promise.get(key) == promise.get(key) for key in ("label", "threshold", "by")
        )
        if not same or self.promise["confidence"] < promise["confidence"]:
            return {}
        return {name: own.proved for name, own in self.shares.items()}

    @property
    def words(self) -> str:
        """The proved shares, in a sentence."""
        if self.thresholds is None:
            return f"all documents are answered by the whole model: {self.reason}"
        shares = " and ".join(
            f"{name} of at least {own.promised:g} (proved: {own.proved:.4f}, with {own.errors:,} "
            f"errors in {own.trials:,} trials)"
            for name, own in self.shares.items()
        )
        return (
            f"cheap stages decide {self.decided:.0%} of the documents, with {shares}, at a "
            f"confidence of {self.promise['confidence']:g}"
        )

    def json(self) -> bytes:
        """The object's content: the same bytes for the same values."""
        return canonical_json({"format": FORMAT, **asdict(self)}) + b"\n"


def hash_of(sids: Iterable[str]) -> str:
    """The hash of the shards that a certificate is about."""
    return short_hash("\n".join(sorted(sids)).encode())


def parse_certificate(data: bytes) -> Certificate:
    """The certificate that `Certificate.json` wrote; ValueError names what is wrong."""
    content = parse_json(data)
    written = content.get("format") if isinstance(content, dict) else None
    if written != FORMAT:
        raise ValueError(f"its format is {written!r}, and {FORMAT} is read")
    return validated(Certificate, content)
