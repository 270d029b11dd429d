"""Law: a view of a file has exactly the rows and columns that the table has of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_shards import all_documents

from pipeline.filters.writers import kept_rows
from pipeline.sources.source import InputObject, cut, read_rows
from pipeline.sources.views import DataFile, deletions, view_of
from pipeline.spec.schema import Columns

COLUMNS = Columns("text", "id")


@settings(max_examples=settings().max_examples // 2)
@given(
    count=st.integers(1, 900),
    deleted=st.sets(st.integers(0, 899)),
    group=st.integers(1, 400),
    target=st.sampled_from([1, 600, 40_000, 10**7]),
    renamed=st.booleans(),
)
def test_shards_have_each_row_that_is_not_deleted_once_and_in_order(
    count: int, deleted: set[int], group: int, target: int, renamed: bool
) -> None:
    deleted_rows = np.array(sorted(row for row in deleted if row < count), np.int64)
    view: dict[str, Any] = {"deleted": deletions(deleted_rows)} if len(deleted_rows) else {}
    names = {"text": "a", "id": "b"} if renamed else {"text": "text", "id": "id"}
    if renamed:
        view |= {"names": names, "values": {"lang": ["string", "en"]}}
    table = pa.table({names["text"]: [f"t{row}" for row in range(count)], "other": [1] * count})
    table = table.append_column(names["id"], pa.array(map(str, range(count))))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "a.parquet")
        pq.write_table(table, path, row_group_size=group)
        size = Path(path).stat().st_size
        item = InputObject(path, size, f"{folder}", "parquet", file=DataFile(path, view))
        shards = cut(item, COLUMNS, target)
        assert np.array_equal(view_of(item.version(COLUMNS)).deleted, deleted_rows)
        expected = [str(row) for row in range(count) if row not in deleted]
        read = [all_documents(shard) for shard in shards]
        assert [id for of in read for id in of["doc_id"].to_pylist()] == expected
        assert [t for of in read for t in of["text"].to_pylist()] == [f"t{id}" for id in expected]
        assert sum(shard.rows for shard in shards) == len(expected)
        for shard in shards[-2:]:  # — without the shards before it, as another worker reads it
            keep = np.arange(shard.rows) % 3 == 0
            kept = pq.read_table(pa.BufferReader(kept_rows(shard, {}, keep)))
            own = expected[shard.piece.start_row : shard.piece.end_row : 3]
            assert kept["id"].to_pylist() == own
            assert {*kept.column_names} == {"text", "id", "lang" if renamed else "other"}
            rows = list(read_rows(shard, {}, ["none"]))
            assert len(rows) == shard.rows and all(row.values == {} for row in rows)
