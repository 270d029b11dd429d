"""Peers take turns on the same documents; their answers are compared. Entry point: `measure`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Protocol

from benchmarks.peers.environments import PeerError
from benchmarks.peers.serve import Answers, Asked, Documents

# The probability of a token may differ by this much from that of the same weights in float32.
# Which work was done shows in float32: an engine does the same in its other formats.
TOLERANCES = {"float32": 0.001, "bfloat16": 0.1}
OF_INTEGERS = 0.5


class Peer(Protocol):
    """An engine in one number format, in a process of its own."""

    def prepare(self, asked: Asked) -> None: ...

    def label(self, documents: Documents) -> tuple[float, Answers]:
        """The seconds that it took, and the answers."""


@dataclass(frozen=True, slots=True)
class Row:
    """One peer on one workload."""

    workload: str
    peer: str
    seconds: tuple[float, ...] = ()  # per document, one for each round
    ratios: tuple[float, ...] = ()  # to the reference's seconds in the same round
    difference: float = 0.0  # the largest of a token's probability, to the reference's
    failure: str | None = None  # why there are no figures, or why they do not count

    def __str__(self) -> str:
        if not self.seconds:
            return f"{self.workload:14}{self.peer:20}{'-':>10}  {self.failure}"
        interval = f"{statistics.median(self.ratios):6.2f} "
        interval += f"[{min(self.ratios):.2f}, {max(self.ratios):.2f}]"
        seconds = statistics.median(self.seconds)
        return (
            f"{self.workload:14}{self.peer:20}{seconds:10.3f}  {interval:20}{self.difference:.1g}"
        )


def measure(
    peers: Mapping[str, Peer],  # by `engine:format`; the first one is the reference
    workload: str,
    asked: Asked,
    rounds: Sequence[Documents],
) -> list[Row]:
    """One row a peer. Each round has documents of its own, so that no cache holds them.

    The first round is not measured. A peer that fails has the reason in its row, and the others go
    on. PeerError if the reference fails.
    """
    reference = next(iter(peers))
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    answers: dict[str, Answers] = {}
    rows: dict[str, Row] = {}
    for number, documents in enumerate(rounds):
        first = number % len(peers)  # — each peer comes first in some round
        for name in [*list(peers)[first:], *list(peers)[:first]]:
            if name in rows:
                continue
            try:
                if not number:
                    peers[name].prepare(asked)
                took, answers[name] = peers[name].label(documents)
            except PeerError as error:
                if name == reference:
                    raise
                rows[name] = Row(workload, name, failure=str(error))
                continue
            seconds[name].append(took / len(documents))
    known = {name: answers[name] for name in peers if name not in rows}
    differences = _differences(known, peers[reference], asked, rounds[-1])
    for name, difference in differences.items():
        measured = tuple(seconds[name][1:])
        pairs = zip(measured, seconds[reference][1:], strict=True)
        row = Row(
            workload,
            name,
            measured,
            tuple(own / reference_s for own, reference_s in pairs),
            difference,
        )
        if difference > TOLERANCES.get(name.partition(":")[2], OF_INTEGERS):
            row = replace(row, failure=f"its answers differ from assay's by {difference:.2g}")
        rows[name] = row
    return [rows[name] for name in peers]


def _differences(
    answers: Mapping[str, Answers], reference: Peer, asked: Asked, documents: Documents
) -> dict[str, float]:
    """Each peer's largest difference: the reference scores all tokens that any peer returned."""
    tokens = [
        sorted({token for of_peer in answers.values() for each in of_peer for token in each[i]})
        for i in range(len(asked.questions))
    ]
    reference.prepare(replace(asked, tokens=tokens))
    _, expected = reference.label(documents)
    return {
        name: max(
            abs(exp(log_prob) - exp(known[token]))
            for of_document, of_reference in zip(scored, expected, strict=True)
            for own, known in zip(of_document, of_reference, strict=True)
            for token, log_prob in own.items()
        )
        for name, scored in answers.items()
    }
