"""`--where` on rows and files that it does not suit: they are outside, and counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import SpecError
from pipeline.runtime import conditions
from pipeline.runtime.conditions import WHERE, check
from pipeline.sources.shards import Shard
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.spec.schema import Columns

YEARS = [str(2000 + row % 20) if row < 220 else "n/a" for row in range(230)]


def write(path: Path, columns: dict[str, Sequence[object]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
        return
    rows = (
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def shards_of(folder: Path, target_bytes: int) -> list[Shard]:
    objects = find_objects(str(folder / "in"), folder / "cache")
    return [shard for item in objects for shard in cut(item, Columns("text", "id"), target_bytes)]


def inside(shards: Sequence[Shard], where: str) -> tuple[list[str], int]:
    """The ids of the rows that the condition chooses, and the number of rows on which it fails."""
    check(where, shards, {}, place=WHERE)
    ids: list[str] = []
    failed = 0
    for shard in shards:
        documents = pa.concat_tables(read_documents(shard, {}))
        chosen, unknown = conditions.inside(shard, where, documents, {})
        ids += documents["doc_id"].filter(pa.array(chosen)).to_pylist()
        failed += unknown
    return ids, failed


@pytest.mark.parametrize(
    ("name", "where", "target_bytes"),
    [
        ("a.jsonl", "cast(year as int) >= 2019", 400),
        ("a.jsonl", "year::INT = 2019 -- only", 10_000_000),
        ("a.parquet", "cast(year as int) >= 2019", 10_000_000),
        ("a.parquet", "year::INT = 2019 -- only", 4_000),
    ],
)
def test_a_late_row_on_which_a_cast_fails_is_outside(
    name: str, where: str, target_bytes: int, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    texts = [f"text {row}" for row in range(230)]
    write(tmp_path / "in" / name, {"id": range(230), "text": texts, "year": YEARS})
    chosen, failed = inside(shards_of(tmp_path, target_bytes), where)
    assert chosen == [str(row) for row in range(220) if row % 20 == 19] and failed == 10


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_without_the_column_is_outside(suffix: str, first: bool, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with_year = {"id": ["x", "y"], "text": ["one", "two"], "year": [2020, 1999]}
    without = {"id": ["z"], "text": ["three"]}
    files = [without, with_year] if first else [with_year, without]
    for number, columns in enumerate(files):
        write(tmp_path / "in" / f"{number}.{suffix}", columns)
    chosen, failed = inside(shards_of(tmp_path, 10_000), "year > 2000")
    assert chosen == ["x"] and failed == (1 if suffix == "parquet" else 0)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_with_another_type_of_the_column_is_outside(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / f"0.{suffix}", {"id": ["x"], "text": ["one"], "tags": [["a", "b"]]})
    write(tmp_path / "in" / f"1.{suffix}", {"id": ["y"], "text": ["two"], "tags": [7]})
    assert inside(shards_of(tmp_path, 10_000), "tags[1] = 'a'") == (["x"], 1)


@pytest.mark.parametrize(
    "where, reason",
    [
        ("cast(title as int) > 3", "Could not convert string 'title 0'"),
        ("yaer > 2000", r"no (value in|column) yaer"),
        ("title[1", "is not one SQL expression"),
        ("title + 1 > 0", "title"),
        ("length(title)", "is int64, not a boolean"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_condition_that_fails_on_all_of_the_first_rows_is_refused(
    suffix: str, where: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    titles = [f"title {row}" for row in range(120)]
    write(tmp_path / "in" / f"0.{suffix}", {"id": range(120), "text": titles, "title": titles})
    with pytest.raises(SpecError, match=rf"^where.*{reason}"):
        check(where, shards_of(tmp_path, 500), {}, place=WHERE)
