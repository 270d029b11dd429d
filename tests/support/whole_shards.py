"""A shard's documents at once, as only a test can afford them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents


def all_documents(shard: Shard, options: dict[str, Any] | None = None) -> pa.Table:
    """What `read_documents` gives slice by slice."""
    return pa.concat_tables(read_documents(shard, options or {}))
