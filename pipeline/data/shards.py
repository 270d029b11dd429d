"""Shards: which rows of which input object are labelled, and committed, together.

Knows identities, row ranges and weights. Knows nothing of files, formats' insides or stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.data.hashes import canonical_json, short_hash

MAX_SHARD_BYTES = 64 * 1024 * 1024
# A row costs its questions too, about a hundred tokens of prompt however short its text is; without
# this a shard of a million one-word rows would weigh next to nothing.
ROW_WEIGHT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Unit:
    """Neighbouring rows measured together: a row group, a record batch, or one line."""

    rows: int
    text_bytes: int
    start_byte: int | None = None
    end_byte: int | None = None

    @property
    def weight_bytes(self) -> int:
        """What the rows cost to label, in bytes of text."""
        return self.text_bytes + ROW_WEIGHT_BYTES * self.rows


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start_row` to before `end_row` of one object, and where its stream has them."""

    start_row: int
    end_row: int
    text_bytes: int
    start_byte: int | None
    end_byte: int | None


@dataclass(frozen=True, slots=True)
class Shard:
    """A bounded piece of one version of one input object, known by what it holds."""

    path: str
    size_bytes: int
    etag: str
    format: str
    text_column: str
    id_column: str | None
    start_row: int
    end_row: int
    start_byte: int | None  # in the decompressed stream; None where rows are found by number
    end_byte: int | None
    text_bytes: int  # an estimate

    @property
    def id(self) -> str:
        """The `sid`: changes exactly when the rows could be others."""
        identity = {
            "path": self.path,
            "size_bytes": self.size_bytes,
            "etag": self.etag,
            "format": self.format,
            "text_column": self.text_column,
            "id_column": self.id_column,
            "start_row": self.start_row,
            "end_row": self.end_row,
        }
        return short_hash(canonical_json(identity))

    @property
    def rows(self) -> int:
        """How many rows go in, and so how many come out."""
        return self.end_row - self.start_row

    def to_json(self) -> dict[str, object]:
        """The shard as JSON values; `from_json` takes it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Shard:
        """The shard that `to_json` gave."""
        return cls(**content)


def cut_units(units: Iterable[Unit], target_bytes: int) -> Iterator[Piece]:
    """Pieces that weigh at most `target_bytes`, or are one row.

    Law: the pieces hold every row once, in order, whatever the target. Light neighbours are
    joined; a unit above the target is split into equal runs of rows.
    """
    limit = min(target_bytes, MAX_SHARD_BYTES)
    assert limit > 0, target_bytes
    row, joined = 0, Unit(rows=0, text_bytes=0)
    for unit in units:
        for part in _split(unit, limit):
            if joined.rows and joined.weight_bytes + part.weight_bytes > limit:
                yield _piece(joined, row)
                row, joined = row + joined.rows, Unit(rows=0, text_bytes=0)
            joined = _join(joined, part) if joined.rows else part
    if joined.rows:
        yield _piece(joined, row)


def _split(unit: Unit, limit: int) -> Iterator[Unit]:
    """A unit's rows in runs within the limit, each with its share of the bytes."""
    if unit.rows <= 1 or unit.weight_bytes <= limit:
        if unit.rows:
            yield unit
        return
    assert unit.start_byte is None, unit  # rows inside a unit have no known place in a stream
    rows_within_limit = max(1, unit.rows * limit // unit.weight_bytes)
    parts = -(-unit.rows // rows_within_limit)
    for part in range(parts):
        rows = (part + 1) * unit.rows // parts - part * unit.rows // parts
        yield Unit(rows, unit.text_bytes * rows // unit.rows)


def _join(left: Unit, right: Unit) -> Unit:
    rows, text_bytes = left.rows + right.rows, left.text_bytes + right.text_bytes
    return Unit(rows, text_bytes, left.start_byte, right.end_byte)


def _piece(unit: Unit, start_row: int) -> Piece:
    end_row = start_row + unit.rows
    return Piece(start_row, end_row, unit.text_bytes, unit.start_byte, unit.end_byte)
