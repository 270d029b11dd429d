"""The columns of the input that a condition names: odd values, broken columns, two of one name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fixtures import arrow_bytes, parquet_bytes

from pipeline.errors import SpecError, StorageError
from pipeline.runtime.conditions import input_columns
from pipeline.sources.source import InputObject, cut, read_documents
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]


@pytest.mark.parametrize(("value", "text"), [(2**64, f"{2**64}"), ("\ud83d", "\\ud83d")])
@pytest.mark.parametrize("row", [0, 200])
def test_a_value_that_arrow_does_not_hold_is_a_text(
    write: Write, value: object, text: str, row: int
) -> None:
    values = [value if n == row else n for n in range(201)]
    lines = "\n".join(json.dumps({"text": "a", "n": each}) for each in values)
    (shard,) = cut(write("a.jsonl", lines.encode()), Columns("text", None), 10**6)
    expected = [text if n == row else str(n) for n in range(201)]
    assert input_columns(shard, ["n"], {})["n"].to_pylist() == expected


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_broken_column_has_no_values_from_there_on_and_the_texts_are_read(
    write: Write, is_changed: bool
) -> None:
    rows = 2_000
    table = pa.table({"text": ["a"] * rows, "source": [f"source {n}" for n in range(rows)]})
    whole = parquet_bytes(table, row_group_size=rows // 2, compression="none")
    file = write("a.parquet", whole)
    (shard,) = cut(file, Columns("text", None), 10**9)
    chunk = pq.read_metadata(file.path).row_group(1).column(1)
    start, size = chunk.dictionary_page_offset, chunk.total_compressed_size
    data = whole[:start] + bytes(size) + whole[start + size :]
    Path(file.path).write_bytes(data + bytes(is_changed))
    if is_changed:
        with pytest.raises(StorageError, match="changed while the job ran"):
            input_columns(shard, ["source"], {})
        return
    assert input_columns(shard, ["source"], {}).num_rows == rows // 2
    assert sum(documents.num_rows for documents in read_documents(shard)) == rows


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_two_columns_of_one_name_are_an_error_of_the_input(write: Write, name: str) -> None:
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["text", "n", "n"])
    data = parquet_bytes(table) if name == "a.parquet" else arrow_bytes(table)
    (shard,) = cut(write(name, data), Columns("text", None), 10**6)
    with pytest.raises(SpecError, match="has several columns of this name") as raised:
        input_columns(shard, ["text", "n"], {})
    assert [(each.place, each.value) for each in raised.value.problems] == [("input.path", "n")]
