"""The log of counts: what it has is read from no file of results, and what it lacks is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest
from label_tables import toy_shard
from memory_store import MemoryStore, Recording

from pipeline.errors import StorageError
from pipeline.ledger import counts_log
from pipeline.ledger.cells import Committed, committed
from pipeline.ledger.counts_log import CountsLog, counted, logged_counts, of_shards
from pipeline.ledger.keys import counts_key, documents_key, label_key
from pipeline.ledger.label_files import FileCounts, sealed_hash, to_parquet
from pipeline.ledger.numbered import CHECKPOINT
from pipeline.ledger.snapshot_files import label_files_of
from pipeline.ledger.snapshots import SnapshotTask, publish
from pipeline.sources.shards import Shard

SHARDS = [toy_shard(4 * number, 4) for number in range(200)]
FPS = {"toxic": "f1" * 8, "topic": "f2" * 8}
# — of the documents one is no text; of the answers another failed, and one was not asked
DOCUMENTS = to_parquet(pa.table({"status": ["ok", "ok", "error:not JSON", "ok"]}), {})
STATUS = ["ok", "quarantined", "error:not JSON", "skipped"]
ANSWERS = to_parquet(pa.table({"status": STATUS}), {"taken_over": "1", "since": "3"})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """A store with the files of all shards, as a run left it that logged nothing."""
    assert counts_log.SHARDS_A_LOG == 1_000
    monkeypatch.setattr(counts_log, "SHARDS_A_LOG", 100)
    objects = MemoryStore()
    for shard in SHARDS:
        objects.create(documents_key(shard.id), DOCUMENTS)
        for task, fp in FPS.items():
            objects.create(label_key(task, fp, shard.id), ANSWERS)
    return Recording(objects)


def committed_now(store: Recording) -> Committed:
    return committed(store, FPS, {shard.id for shard in SHARDS})


def files_of(shard: Shard, done: Committed) -> Iterator[FileCounts]:
    """What a worker reports of the files of a shard."""
    etag = done.documents[shard.id]
    yield FileCounts(documents_key(shard.id), etag, str(sealed_hash(DOCUMENTS)), 3)
    for task in FPS:
        of_file = done.label_key(task, shard.id), done.labels[task][shard.id]
        yield FileCounts(*of_file, str(sealed_hash(ANSWERS)), 3, 2, 1, 1, 1)


def log_all(store: Recording, shards: Sequence[Shard]) -> Committed:
    """Logs the shards as a run does that is killed after the last: it wrote full hundreds."""
    log, done = CountsLog(store), committed_now(store)
    for shard in shards:
        log.add(files_of(shard, done))
    return done


def opened(store: Recording) -> list[str]:
    """The files of results that were read."""
    return [key for key in store.read_keys if key.startswith(("labels/", "documents/"))]


def test_of_many_shards_only_those_are_read_that_a_killed_driver_did_not_log(
    store: Recording,
) -> None:
    done = log_all(store, SHARDS[:190])
    files = counted(store, label_files_of(SHARDS[:100], done))
    assert opened(store) == [], "a hundred shards are in the log"
    assert of_shards(files, "failed", "max") == 2 * 100
    counts = {name: set(files[name].to_pylist()) for name in counts_log.COUNTED[1:]}
    assert counts == {
        "since": {3},
        "failed": {2},
        "to_retry": {1},
        "skipped": {1},
        "taken_over": {1},
    }
    all_counts = counted(store, label_files_of(SHARDS, done), keep=True)
    assert set(opened(store)) == {
        key
        for shard in SHARDS[100:]
        for key in (documents_key(shard.id), *(label_key(t, FPS[t], shard.id) for t in FPS))
    }
    columns = counts_log.COUNTED
    assert all_counts.select(columns).slice(0, 1).equals(all_counts.select(columns).slice(399, 1))
    # — what was read is in the log now: publishing, and later calls, read none again
    store.read_keys.clear()
    assert counted(store, label_files_of(SHARDS, done)).equals(all_counts)
    tasks = {task: SnapshotTask(fp, ("yes", "no")) for task, fp in FPS.items()}
    publish(store, "job", tasks, SHARDS, done, created_at="")
    assert {*opened(store)} == {documents_key(shard.id) for shard in SHARDS[100:]}
    store.read_keys.clear()
    assert publish(store, "other", tasks, SHARDS, done, created_at="") == 2
    assert opened(store) == []


def test_files_without_a_count_are_read_many_at_once(store: Recording) -> None:
    """No read ends before as many have begun as there are threads for them."""
    all_begun = threading.Barrier(counts_log.READ_THREADS)

    class Waiting(Recording):
        def read(self, key: str) -> bytes:
            if key.startswith("labels/"):
                all_begun.wait(timeout=60)
            return super().read(key)

    shards = SHARDS[: 2 * counts_log.READ_THREADS]
    counted(Waiting(store), label_files_of(shards, committed_now(store)))
    labels = [key for key in opened(store) if key.startswith("labels/")]
    assert len(labels) == len(FPS) * len(shards)


def test_a_file_that_is_another_object_by_now_is_read_and_a_damaged_one_is_named(
    store: Recording,
) -> None:
    log_all(store, SHARDS[:100])
    key, damaged = (label_key("toxic", FPS["toxic"], shard.id) for shard in SHARDS[:2])
    store.delete([key])
    store.create(key, to_parquet(pa.table({"status": ["ok"] * 4}), {}))
    files = counted(store, label_files_of(SHARDS[:100], committed_now(store)))
    assert opened(store) == [key] and of_shards(files, "failed", "min") == 2 * 99
    store.delete([damaged])
    store.create(damaged, ANSWERS[:-1])
    with pytest.raises(StorageError, match=f"{damaged}: its content was changed"):
        counted(store, label_files_of(SHARDS[:100], committed_now(store)))


def test_the_log_is_read_from_its_last_checkpoint_and_does_without_a_damaged_entry(
    store: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    done = committed_now(store)
    for shard in SHARDS[: CHECKPOINT + 3]:
        with CountsLog(store) as log:
            log.add(files_of(shard, done))
    store.read_keys.clear()
    assert len(logged_counts(store)) == 3 * (CHECKPOINT + 3)
    assert sorted(store.read_keys) == [counts_key(CHECKPOINT + more) for more in range(4)]
    store.delete([counts_key(CHECKPOINT)])
    store.create(counts_key(CHECKPOINT), b"PAR1")
    with caplog.at_level(logging.WARNING):
        assert len(logged_counts(store)) == 3 * 3
    assert f"{counts_key(CHECKPOINT)}: is damaged" in caplog.text
    files = counted(store, label_files_of(SHARDS[: CHECKPOINT + 3], done))
    assert of_shards(files, "failed", "max") == 2 * (CHECKPOINT + 3)


def test_an_error_of_the_run_is_not_hidden_by_one_of_its_log(store: Recording) -> None:
    def refuse(key: str, data: bytes) -> str | None:
        raise StorageError(f"{key} {len(data)}")

    done = committed_now(store)
    store.create = refuse
    with pytest.raises(KeyboardInterrupt), CountsLog(store) as log:
        log.add(files_of(SHARDS[0], done))
        raise KeyboardInterrupt
    with pytest.raises(StorageError, match=counts_key(1)), CountsLog(store) as log:
        log.add(files_of(SHARDS[0], done))
