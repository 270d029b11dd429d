"""Counts: what they add up to, and those of a shard that failed."""

from __future__ import annotations

import pytest
from label_tables import toy_shard

from pipeline.errors import StorageError, UnavailableError
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import Counts, ShardCounts


def test_counts_add_up_and_are_read_by_the_parts_of_their_keys() -> None:
    shards = [Counts(), Counts({("answered", "topic"): 0})]
    shards[0].count("rows", values=["ok", "error:torn", "ok", "quarantined"])
    shards[0].count("label", "toxic", values=["yes", "no", "yes"])
    shards[0].update({("answered", "toxic"): 2, ("asked", "0"): 3, ("asked", "1"): 1})
    shards[1].count("rows", values=["ok"])
    total = Counts()
    for shard in shards:
        total.update(shard)
    assert total.by("rows") == {"ok": 3, "error:torn": 1, "quarantined": 1}
    assert (total.total_of("rows"), total.failed, total.asked) == (5, 2, 3)
    assert total.labels == {"toxic": {"yes": 2, "no": 1}, "topic": {}}
    assert total.by("label") == {"toxic": 3} and total.by("asked") == {"0": 3, "1": 1}


@pytest.mark.parametrize("kind", [StorageError, UnavailableError])
def test_a_shard_that_failed_is_named_once(kind: type[StorageError]) -> None:
    work = WorkItem(toy_shard(2, 2), ("t",), documents=True)
    counts = ShardCounts.of_failed(work, kind("/a.jsonl: rows 2 to 4: is gone\nTraceback"))
    assert counts.error == "/a.jsonl: rows 2 to 4: is gone"
    assert (counts.sid, counts.tasks, counts.n) == (toy_shard(2, 2).id, ("t",), Counts())
    assert counts.unavailable == (kind is UnavailableError)
