"""Shards: the rows of an input object that are labelled and committed together.

Entry point: `cut_units`, which joins and splits units of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pipeline.errors import MissingColumnsError, Problem, SpecError
from pipeline.hashes import canonical_json, short_hash

MAX_SHARD_BYTES = 64 * 1024 * 1024
# Each row also costs its questions, about a hundred tokens of prompt, even if its text is short.
# Without this, a shard of a million rows of one word would weigh almost nothing.
ROW_WEIGHT_BYTES = 512
# The length of a column's name in errors.
NAME_CHARS = 60


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive rows that are measured together: a row group, a record batch, or one line."""

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
    """Rows `start_row` to before `end_row` of one object, and their byte range in its stream."""

    start_row: int
    end_row: int
    text_bytes: int
    start_byte: int | None
    end_byte: int | None


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """One version of one input object, and the columns that are read."""

    path: str  # absolute, or a URL
    size_bytes: int
    etag: str
    format: str
    text_column: str | None
    id_column: str | None
    image_column: str | None = None
    quoted: bool | None = None  # of CSV and TSV, as in the spec
    # Of a table's data file its rows and columns (`views`); of texts, the output among them.
    view: str | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A bounded piece of one version of one input object, identified by its content."""

    version: ObjectVersion
    piece: Piece
    # The `sid`; changes exactly when the rows may be different.
    id: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", short_hash(canonical_json(self._identity)))

    @property
    def path(self) -> str:
        return self.version.path

    @property
    def rows(self) -> int:
        """The number of rows of the input, and of each file of results."""
        return self.piece.end_row - self.piece.start_row

    def to_json(self) -> dict[str, object]:
        """The shard as a flat JSON object; `from_json` is the inverse."""
        return fields_of(self.version) | fields_of(self.piece)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Shard:
        """The shard that `to_json` returned."""
        version, piece = (
            {f.name: content[f.name] for f in fields(t) if f.name in content}
            for t in (ObjectVersion, Piece)
        )
        return cls(ObjectVersion(**version), Piece(**piece))

    @property
    def _identity(self) -> dict[str, Any]:
        rows = {"start_row": self.piece.start_row, "end_row": self.piece.end_row}
        version = fields_of(self.version)
        if self.version.view is None:  # — plain files have the ids of versions without views
            del version["view"]
        return version | rows


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass with slots, by name.

    `dataclasses.asdict` copies deeply, and `fields` looks at each field: too slow for millions.
    """
    return {name: getattr(value, name) for name in value.__slots__}


def check_columns(version: ObjectVersion, names: list[str]) -> None:
    """SpecError unless the object, which has these columns, has each that is read once.

    MissingColumnsError if it only lacks some.
    """
    columns = {
        "input.image": version.image_column,
        "input.text": version.text_column,
        "input.id": version.id_column,
    }
    # — a file without a header has its first text in place of a name
    existing = ", ".join(map(_shown, sorted(names))) or "none"
    problems = []
    for place, name in columns.items():
        if name is not None and names.count(name) != 1:
            count = f"{names.count(name)} such columns" if name in names else "no such column"
            fix = f"{version.path} has {count}; it has: {existing}"
            problems.append(Problem(place, fix, name))
    if problems:
        lacks = all(problem.value not in names for problem in problems)
        raise MissingColumnsError(problems) if lacks else SpecError(problems)


def _shown(name: str) -> str:
    """A column's name as it is, or in quotes where it could be taken for something else."""
    start = name if len(name) <= NAME_CHARS else name[:NAME_CHARS] + "..."
    return start if re.fullmatch(r"[\w.:/-]+", start) else repr(start)


def cut_units(units: Iterable[Unit], target_bytes: int) -> Iterator[Piece]:
    """Pieces that weigh at most `target_bytes`, or have one row.

    Law: the pieces hold every row once, in order, for any target. Light neighbours are joined; a
    unit above the target is split into equal runs of rows.
    """
    limit = min(target_bytes, MAX_SHARD_BYTES)
    assert limit > 0, target_bytes
    row, joined = 0, Unit(rows=0, text_bytes=0)
    for unit in units:
        for part in _split(unit, limit):
            if joined.rows and joined.weight_bytes + part.weight_bytes > limit:
                yield _piece(joined, row)
                row, joined = row + joined.rows, Unit(rows=0, text_bytes=0)
            rows, text_bytes = joined.rows + part.rows, joined.text_bytes + part.text_bytes
            start_byte = joined.start_byte if joined.rows else part.start_byte
            joined = Unit(rows, text_bytes, start_byte, part.end_byte)
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


def _piece(unit: Unit, start_row: int) -> Piece:
    end_row = start_row + unit.rows
    return Piece(start_row, end_row, unit.text_bytes, unit.start_byte, unit.end_byte)
