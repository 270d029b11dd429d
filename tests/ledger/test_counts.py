"""The counts of a shard that failed."""

from __future__ import annotations

import pytest
from label_tables import toy_shard

from pipeline.errors import StorageError, UnavailableError
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import ShardCounts


@pytest.mark.parametrize("kind", [StorageError, UnavailableError])
def test_a_shard_that_failed_is_named_once(kind: type[StorageError]) -> None:
    work = WorkItem(toy_shard(2, 2), ("t",), documents=True)
    counts = ShardCounts.of_failed(work, kind("/a.jsonl: rows 2 to 4: is gone\nTraceback"))
    assert counts.error == "/a.jsonl: rows 2 to 4: is gone"
    assert (counts.sid, counts.rows, counts.labels) == (toy_shard(2, 2).id, 0, {"t": {}})
    assert counts.unavailable == (kind is UnavailableError)
