"""Neighbouring shards of one file: a store sends each byte of it about once."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from data_fixtures import arrow_bytes, parquet_bytes
from s3fs.core import S3File
from servers import Server

from pipeline.runtime.conditions import inside
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.spec.schema import Columns

ROWS_OF_SHARD, SHARDS = 20, 47


def lines(table: pa.Table) -> bytes:
    rows = table.select(["id", "text", "year"]).to_pylist()
    return gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode())


ENCODERS: dict[str, Callable[[pa.Table], bytes]] = {
    "one.parquet": parquet_bytes,  # one row group
    "groups.parquet": lambda table: parquet_bytes(table, row_group_size=70),
    "a.arrow": lambda table: arrow_bytes(table, ROWS_OF_SHARD, new=pa.ipc.new_file),
    "a.jsonl.gz": lines,
}


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what an S3 client fetches."""
    sizes: list[int] = []
    fetch = S3File._fetch_range

    def counted(file: S3File, start: int, end: int) -> bytes:
        data: bytes = fetch(file, start, end)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(S3File, "_fetch_range", counted)
    return sizes


@pytest.mark.parametrize(
    ("name", "text_bytes", "where"),
    [
        ("one.parquet", 12_000, "year > 3"),
        ("groups.parquet", 12_000, "year > 3"),
        ("groups.parquet", 2_000, None),
        ("a.arrow", 2_000, None),
        ("a.jsonl.gz", 2_000, "year > 3"),
    ],
)
def test_shards_of_one_row_group_or_stream_are_fetched_once(
    name: str, text_bytes: int, where: str | None, moto: Server, fetched: list[int], tmp_path: Path
) -> None:
    source, rows = random.Random(1), ROWS_OF_SHARD * SHARDS
    texts = [source.randbytes(text_bytes // 2).hex() for _ in range(rows)]
    columns = {"id": range(rows), "text": texts, "year": [2000] * rows}
    data = ENCODERS[name](pa.table(columns))
    url = f"{moto.new_url()}/{name}"
    moto.file_system().pipe_file(url, data)
    (file,) = find_objects(url, tmp_path, moto.options)
    shards = cut(file, Columns("text", "id"), (text_bytes + 600) * ROWS_OF_SHARD)
    assert len(shards) >= SHARDS
    fetched.clear()
    found_texts: list[str] = []
    for shard in shards:
        documents = pa.concat_tables(read_documents(shard, moto.options))
        assert inside(shard, where, documents, moto.options)[0].all()
        found_texts += documents["text"].to_pylist()
    assert found_texts == texts
    # — a condition is a second pass; in Parquet it reads its own columns alone
    passes = 1 if where is None or name.endswith("parquet") else 2
    assert sum(fetched) <= 1.3 * passes * len(data)
