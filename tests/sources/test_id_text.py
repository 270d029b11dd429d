"""One value has one id, in the corpus and in gold, whichever type and format a file has it in."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pandas import DataFrame

from pipeline.gold.labels import read_gold
from pipeline.sources.id_text import id_text, plain_values, spellings
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import Columns

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 500_000)
# By type: the values, and their ids.
IDS: list[tuple[pa.DataType, list[object], list[str]]] = [
    (pa.int64(), [0, -7], ["0", "-7"]),
    (pa.uint64(), [2**64 - 1], ["18446744073709551615"]),
    (pa.float64(), [0.0, 1.0, 2.5, 1e-7], ["0", "1", "2.5", "1e-07"]),
    (pa.float64(), [-0.0, 2.0**53 - 1, 1e300], ["0", "9007199254740991", "1e+300"]),
    (pa.float32(), [0.1, 16777216.0], ["0.1", "16777216"]),
    (pa.float16(), [0.5, 2.0], ["0.5", "2"]),
    (pa.bool_(), [True, False], ["true", "false"]),
    (pa.decimal128(38, 0), [Decimal(7)], ["7"]),
    (pa.decimal128(9, 2), [Decimal("7.50"), Decimal("7.00")], ["7.50", "7"]),
    (pa.decimal128(38, -3), [Decimal("1e10")], ["10000000000"]),
    (pa.decimal256(60, 30), [Decimal("1e-30")], [f"0.{'0' * 29}1"]),
    (pa.timestamp("s"), [datetime(2026, 1, 2)], ["2026-01-02 00:00:00"]),
    (pa.timestamp("ms"), [MOMENT], ["2026-01-02 03:04:05.500"]),
    (pa.timestamp("ns"), [MOMENT], ["2026-01-02 03:04:05.500000000"]),
    (pa.timestamp("us", "UTC"), [MOMENT], ["2026-01-02 03:04:05.500000Z"]),
    (pa.timestamp("us", "Asia/Tokyo"), [MOMENT], ["2026-01-02 03:04:05.500000Z"]),
    (pa.date32(), [date(2026, 1, 2)], ["2026-01-02"]),
    (pa.date64(), [date(2026, 1, 2)], ["2026-01-02"]),
    (pa.time64("us"), [time(3, 4, 5, 500)], ["03:04:05.000500"]),
    (pa.duration("s"), [90], ["90"]),
    (pa.duration("ms"), [1500], ["1500"]),
    (pa.uuid(), [uuid.UUID(int=1).bytes], ["00000000-0000-0000-0000-000000000001"]),
    (pa.binary(), ["é".encode(), b"\xff\x01"], ["é", "ff01"]),
    (pa.binary(2), [b"\xff\x01"], ["ff01"]),
    (pa.binary(2), [b"\x01\x02"], ["0102"]),
    (pa.binary_view(), [b"x", b"\xff\x00"], ["x", "ff00"]),
    (pa.dictionary(pa.int32(), pa.int64()), [3], ["3"]),
    (pa.dictionary(pa.int32(), pa.binary()), [b"x"], ["x"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "ids"), IDS, ids=lambda value: str(value)[:30])
def test_the_id_of_a_value_of_each_type(
    kind: pa.DataType, values: list[object], ids: list[str]
) -> None:
    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    column = pa.array([*values, None], storage)
    column = pa.ExtensionArray.from_storage(kind, column) if storage != kind else column
    *present, missing = plain_values(column)
    assert (list(map(id_text, present)), missing) == (ids, None)


# — of one column of a corpus in Parquet, as other programs write it again
COLUMNS: list[tuple[pa.DataType, list[object]]] = [
    (pa.float64(), [0.0, 1.0, 2.5, 1e-7, 1e16, 1e300]),
    (pa.float32(), [0.5, 160.0]),
]
WRITERS = ["parquet", "duckdb.csv", "duckdb.jsonl", "pandas.csv", "pandas.jsonl"]


def write_as(writer: str, table: pa.Table, path: Path) -> None:
    match writer:
        case "parquet":
            pq.write_table(table, path)
        case "pandas.csv":
            table.to_pandas().to_csv(path, index=False)
        case "pandas.jsonl":
            table.to_pandas().to_json(path, orient="records", lines=True, date_format="iso")
        case _:
            how = "format json" if path.suffix == ".jsonl" else "header"
            with duckdb.connect(":memory:") as connection:
                connection.register("rows", table)
                connection.execute(f"set TimeZone = 'UTC'; copy rows to '{path}' ({how})")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("kind", "values"), COLUMNS, ids=lambda value: str(value)[:30])
def test_gold_of_the_column_that_has_the_ids_of_a_parquet_corpus_joins_all_rows(
    writer: str,
    kind: pa.DataType,
    values: list[object],
    write_spec: Callable[..., Path],
    tmp_path: Path,
) -> None:
    column = pa.array(values, kind)
    texts = [f"text {place}" for place in range(len(values))]
    pq.write_table(pa.table({"id": column, "text": texts}), tmp_path / "in.parquet")
    gold = tmp_path / f"gold.{writer.rpartition('.')[2]}"
    write_as(writer, pa.table({"id": column, "topic": ["law"] * len(values)}), gold)
    joined = spellings(gold_keys(gold, write_spec))
    assert set(corpus_ids(tmp_path / "in.parquet")) <= set(joined)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_numbers_that_pandas_made_floats_join_the_numbers_of_the_corpus(
    suffix: str, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    """A row without a label makes an outer join's column of ids one of floats."""
    pq.write_table(pa.table({"id": [1, 2, 30], "text": ["a", "b", "c"]}), tmp_path / "in.parquet")
    frame = DataFrame({"id": [1.0, 2.0, 30.0], "topic": ["law", "art", "law"]})
    path = tmp_path / f"gold.{suffix}"
    match suffix:
        case "csv":
            frame.to_csv(path, index=False)
        case "jsonl":
            frame.to_json(path, orient="records", lines=True)
        case _:
            frame.to_parquet(path)
    joined = spellings(gold_keys(path, write_spec))
    assert {"1", "2", "30"} <= set(joined)


@pytest.mark.parametrize("key", ["007", "2.10", "1e3", "a 1.0", "-0.5"])
def test_a_text_that_no_program_writes_for_another_value_has_one_spelling(key: str) -> None:
    assert set(spellings([key])) == {key}


def test_the_key_itself_comes_before_another_one_that_may_be_spelled_so() -> None:
    assert spellings(["1.0", "1"]) == {"1.0": "1.0", "1": "1"}


def corpus_ids(path: Path) -> list[str]:
    [item] = find_objects(str(path), path.parent)
    shards = cut(item, Columns("text", "id", None), 1_000_000)
    parts = [part for shard in shards for part in read_documents(shard)]
    return [str(own) for part in parts for own in part.column("doc_id").to_pylist()]


def gold_keys(path: Path, write_spec: Callable[..., Path]) -> tuple[str, ...]:
    task = {"name": "topic", "question": "Which?", "labels": ["art", "law"]}
    own = {"path": str(path.parent / "in.parquet"), "text": "text", "id": "id"}
    return read_gold(str(path), load_spec(write_spec(tasks=[task], input=own))).keys
