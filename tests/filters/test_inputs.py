"""Which columns of the input a rule may read."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.errors import SpecError
from pipeline.filters.inputs import check_columns_of
from pipeline.sources.shards import Shard
from pipeline.sources.source import cut, find_objects
from pipeline.spec.schema import Columns

LATE = 150  # rows before the first value


def shards_of(folder: Path, format: str) -> list[Shard]:
    """Documents with an empty column `never`, and with `late`, whose first values are null."""
    late = [None] * LATE + ["mail"] * 10
    rows = pa.table(
        {
            "text": [f"text {row}" for row in range(len(late))],
            "late": pa.array(late, pa.string()),
            "never": pa.nulls(len(late), pa.string()),
        }
    )
    file = folder / f"corpus.{format}"
    if format == "parquet":
        pq.write_table(rows, file)
    elif format == "csv":
        pa.csv.write_csv(rows, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    [item] = find_objects(str(file), folder / "cache")
    return cut(item, Columns("text", None), 1_000)


@pytest.mark.parametrize("format", ["parquet", "csv", "jsonl"])
def test_a_column_may_begin_with_any_number_of_nulls(tmp_path: Path, format: str) -> None:
    shards = shards_of(tmp_path, format)
    check_columns_of(shards, {}, ["late"], place="filter.keep")
    with pytest.raises(SpecError, match="no such column" if format != "jsonl" else "no value"):
        check_columns_of(shards, {}, ["lates"], place="filter.keep")
    if format != "jsonl":  # — its header has the column
        check_columns_of(shards, {}, ["never"], place="filter.keep")
