"""Commits through a bad connection: every row once, whatever the proxy breaks."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fault_proxy import STUBBORN, Faults, proxied
from label_tables import label_rows, toy_shard
from servers import Server

from pipeline.ledger.cells import committed, remaining
from pipeline.ledger.keys import counts_key, manifest_key, snapshot_key
from pipeline.ledger.label_files import LabelFile, commit_shard
from pipeline.ledger.snapshots import SnapshotTask, contents, publish
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.shards import Shard
from pipeline.stores.s3 import S3Store, open_s3
from pipeline.stores.store import Store

SHARES = {
    "error_500": 0.06,
    "slow_down": 0.10,
    "reset": 0.05,
    "lost_reply": 0.10,
    "cut_off": 0.05,
    "conflict": 0.04,
}
SHARDS, ROWS, WRITERS = 16, 25, 2
LABELS = ("yes", "no")
TASKS = {"first": "a" * 16, "second": "b" * 16}


def shard(number: int) -> Shard:
    return toy_shard(rows=ROWS, path=f"s3://corpus/{number}.jsonl", id="id")


def commit(store: Store, number: int, writer: int) -> list[str]:
    """Commits a shard whose rows have their writer's number in `n_tokens`."""
    documents = documents_from([RawRow("text", f"{number}-{row}") for row in range(ROWS)])
    answers = label_rows(
        np.full((ROWS, 2), 0.5, np.float32), LABELS, n_tokens=np.full(ROWS, writer)
    )
    own = shard(number)
    files = [LabelFile(task, fp, own.id, answers, {"fp": fp}) for task, fp in TASKS.items()]
    return [file.key for file in commit_shard(store, own, documents, files)]


def read(store: Store, key: str) -> pa.Table:
    return pq.read_table(pa.BufferReader(store.read(key)))


def everyone_commits_everything(store: S3Store) -> dict[str, list[int]]:
    """By key, the writers whose create made the object: all writers commit all shards at once."""
    makers: dict[str, list[int]] = {}
    work = [(number, writer) for number in range(SHARDS) for writer in range(WRITERS)]
    with ThreadPoolExecutor(2 * WRITERS) as pool:
        done = pool.map(lambda item: (item[1], commit(store, *item)), work)
        for writer, made in done:
            for key in made:
                makers.setdefault(key, []).append(writer)
    return makers


@pytest.mark.parametrize(
    ("server", "seed"),
    [
        ("moto", 1),
        *(
            pytest.param(server, seed, marks=pytest.mark.slow)
            for server, seed in (("moto", 2), ("seaweedfs", 1), ("seaweedfs", 2))
        ),
    ],
)
def test_every_row_is_stored_once_and_each_object_has_one_known_writer(
    server: str, seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own tries wait for seconds
    direct: Server = request.getfixturevalue(server)
    url, faults = direct.new_url(), Faults(SHARES, seed)
    with proxied(direct.endpoint, faults) as endpoint:
        store = replace(
            open_s3(url, {**direct.options, "endpoint_url": endpoint}), retry_policy=STUBBORN
        )
        makers = everyone_commits_everything(store)
        shards = [shard(number) for number in range(SHARDS)]
        done = committed(store, TASKS, [each.id for each in shards])
        assert remaining(shards, list(TASKS), done) == []
        tasks = {task: SnapshotTask(fp, LABELS) for task, fp in TASKS.items()}
        number = publish(store, "job", tasks, shards, done, created_at="now")
    assert min(faults.counted[kind] for kind in SHARES) > 0, faults.counted
    plain = open_s3(url, direct.options)
    of_snapshot = {snapshot_key(number), manifest_key(number), counts_key(1)}
    assert set(makers) == {stored.key for stored in plain.list("")} - of_snapshot
    doc_ids = {task: Counter[str]() for task in TASKS}
    for key, writers in makers.items():
        table = read(plain, key)
        if key.startswith("labels/"):
            doc_ids[key.split("/")[1]].update(table.column("doc_id").to_pylist())
            # — the writer that got an etag made the object, even if its reply was lost
            assert set(table.column("n_tokens").to_pylist()) == set(writers)
        assert len(writers) == 1 and table.num_rows == ROWS
    expected = Counter(f"{number}-{row}" for number in range(SHARDS) for row in range(ROWS))
    assert doc_ids == {"first": expected, "second": expected}
    assert contents(plain).rows == SHARDS * ROWS
