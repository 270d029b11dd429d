"""A shard's documents at once, as only a test can afford them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.sources import records
from pipeline.sources.documents import Row
from pipeline.sources.shards import Shard
from pipeline.sources.source import InputObject, cut, read_documents, read_rows
from pipeline.spec.schema import Columns


def all_documents(shard: Shard, options: dict[str, Any] | None = None) -> pa.Table:
    """What `read_documents` gives slice by slice."""
    return pa.concat_tables(read_documents(shard, options or {}))


def rows_read_in_blocks(
    data: bytes, format: str, target_bytes: int, block_bytes: int, quoted: bool | None = None
) -> list[Row]:
    """The columns text and id of all shards of a file that is read in blocks of this size."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "BLOCK_BYTES", block_bytes)
        path = Path(folder) / f"a.{format}"
        path.write_bytes(data)
        item = InputObject(str(path), len(data), "", format)
        shards = cut(item, Columns("text", "id", quoted=quoted), target_bytes)
        return [row for shard in shards for row in read_rows(shard, {}, ["text", "id"])]
