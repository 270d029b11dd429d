"""Laws of the cut: every row once and in order, for any target; identity from content."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.sources.shards import (
    MAX_SHARD_BYTES,
    ROW_WEIGHT_BYTES,
    ObjectVersion,
    Piece,
    Shard,
    Unit,
    cut_units,
)

SHARD = Shard(ObjectVersion("/a.jsonl", 10, "etag", "jsonl", "text", "id"), Piece(0, 5, 8, 0, 10))
NOT_IDENTITY = {"start_byte", "end_byte", "text_bytes"}


UNITS = st.lists(
    st.builds(Unit, st.integers(0, 5_000), st.integers(0, MAX_SHARD_BYTES)), max_size=20
)
# Few enough pieces to be quick, from one row in a piece to all in one.
TARGETS = st.integers(ROW_WEIGHT_BYTES, 10**12) | st.integers(10**6, 10**9)


@given(UNITS, TARGETS)
@example([Unit(3, 100), Unit(0, 0), Unit(200, 90_000)], 1)
@example([], 100)
@example([Unit(0, 0)], 100)
def test_a_cut_holds_every_row_once_and_in_order(units: list[Unit], target_bytes: int) -> None:
    pieces = list(cut_units(units, target_bytes))
    edges = [0, *(piece.end_row for piece in pieces)]
    assert [piece.start_row for piece in pieces] == edges[:-1]
    assert edges[-1] == sum(unit.rows for unit in units)
    assert all(piece.end_row > piece.start_row for piece in pieces)


@given(UNITS, TARGETS)
@example([Unit(3, 100), Unit(0, 0), Unit(200, 90_000)], 1)
@example([Unit(10, MAX_SHARD_BYTES * 3 // 5)] * 4, 10**12)
def test_only_a_single_row_may_exceed_the_target(units: list[Unit], target_bytes: int) -> None:
    limit = min(target_bytes, MAX_SHARD_BYTES)
    for piece in cut_units(units, target_bytes):
        rows = piece.end_row - piece.start_row
        assert rows == 1 or piece.text_bytes + rows * ROW_WEIGHT_BYTES <= limit


def test_light_neighbours_are_joined_and_their_bytes_run_on() -> None:
    units = [Unit(1, 100, start, start + 100) for start in range(0, 1000, 100)]
    pieces = list(cut_units(units, 4 * (100 + ROW_WEIGHT_BYTES)))
    assert [(piece.start_row, piece.end_row) for piece in pieces] == [(0, 4), (4, 8), (8, 10)]
    assert [(piece.start_byte, piece.end_byte) for piece in pieces] == [
        (0, 400),
        (400, 800),
        (800, 1000),
    ]


def test_a_heavy_unit_is_split_into_equal_runs_of_rows() -> None:
    pieces = list(cut_units([Unit(100, 100_000)], 50_000 + 34 * ROW_WEIGHT_BYTES))
    assert [piece.end_row - piece.start_row for piece in pieces] == [33, 33, 34]


@pytest.mark.parametrize("name", SHARD.to_json())
def test_the_id_changes_exactly_when_an_identity_field_does(name: str) -> None:
    value = SHARD.to_json()[name]
    other = value + 1 if isinstance(value, int) else f"{value}x"
    changed = Shard.from_json(SHARD.to_json() | {name: other})
    assert (changed.id == SHARD.id) == (name in NOT_IDENTITY)


def test_no_id_column_is_another_identity() -> None:
    assert Shard.from_json(SHARD.to_json() | {"id_column": None}).id != SHARD.id


def test_an_id_is_the_same_in_every_version() -> None:
    assert SHARD.id == "c8f9b7b8244be931b0fb2360a8345acc"
