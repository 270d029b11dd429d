"""What a filter kept and dropped, counted: documents, bytes of text and tokens, also by group.

Knows sums. Knows nothing of rules, files or how they are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Amount:
    """So many documents, with so much text."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.documents + other.documents,
            self.text_bytes + other.text_bytes,
            self.tokens + other.tokens,
        )


@dataclass(frozen=True, slots=True)
class Parted:
    """What was kept and what was dropped; adds up."""

    kept: Amount = Amount()
    dropped: Amount = Amount()

    def __add__(self, other: Parted) -> Parted:
        return Parted(self.kept + other.kept, self.dropped + other.dropped)


@dataclass(frozen=True, slots=True)
class Counts:
    """The sums over some documents; those of two parts of a corpus add up to those of both."""

    all: Parted = Parted()
    groups: Mapping[str, Mapping[str, Parted]] = field(default_factory=dict)  # by column, by value
    reasons: Mapping[str, int] = field(default_factory=dict)  # documents dropped, by why

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values; `counts_from_json` takes them back."""
        return asdict(self)


def counted(
    kept: Sequence[bool],
    sizes: Iterable[tuple[int, int]],  # [docs]: bytes of text, tokens
    groups: Mapping[str, Sequence[str]],  # by column: [docs]
    reasons: Sequence[str],  # [docs]; "" where kept
) -> Counts:
    """The counts of some documents."""
    parted = [
        Parted(kept=Amount(1, *size)) if is_kept else Parted(dropped=Amount(1, *size))
        for is_kept, size in zip(kept, sizes, strict=True)
    ]
    by_column: dict[str, dict[str, Parted]] = {}
    for column, values in groups.items():
        of_column = by_column.setdefault(column, {})
        for value, each in zip(values, parted, strict=True):
            of_column[value] = of_column.get(value, Parted()) + each
    return Counts(sum(parted, Parted()), by_column, dict(Counter(filter(None, reasons))))


def total(parts: Iterable[Counts]) -> Counts:
    """The sums of the parts."""
    whole, reasons = Parted(), Counter[str]()
    groups: dict[str, dict[str, Parted]] = {}
    for part in parts:
        whole += part.all
        reasons.update(part.reasons)
        for column, values in part.groups.items():
            of_column = groups.setdefault(column, {})
            for value, each in values.items():
                of_column[value] = of_column.get(value, Parted()) + each
    return Counts(whole, groups, dict(reasons))


def counts_from_json(content: Mapping[str, Any]) -> Counts:
    """The counts that `Counts.to_json` gave."""
    groups = {
        column: {value: _parted(each) for value, each in values.items()}
        for column, values in content["groups"].items()
    }
    return Counts(_parted(content["all"]), groups, dict(content["reasons"]))


def _parted(content: Mapping[str, Any]) -> Parted:
    return Parted(Amount(**content["kept"]), Amount(**content["dropped"]))
