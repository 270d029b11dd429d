"""Resume: what is missing is computed, and nothing else."""

from __future__ import annotations

import pytest

from pipeline.errors import StorageError
from pipeline.ledger.cells import Committed, WorkItem, committed, record_specs, remaining
from pipeline.ledger.keys import documents_key, label_key
from pipeline.sources.shards import ObjectVersion, Piece, Shard
from pipeline.stores.local import LocalStore

FIRST = Shard(ObjectVersion("/a.jsonl", 10, "etag", "jsonl", "text", None), Piece(0, 3, 8, 0, 10))
SHARDS = [Shard(FIRST.version, Piece(start, start + 3, 8, 0, 10)) for start in range(0, 15, 3)]
SIDS = [shard.id for shard in SHARDS]
F1, F2, F3, F9 = ("f1" * 8, "f2" * 8, "f3" * 8, "f9" * 8)
TASKS = {"toxic": F1, "topic": F2}


@pytest.fixture
def full(store: LocalStore) -> LocalStore:
    """A store with everything for SHARDS and TASKS."""
    for shard in SHARDS:
        store.create(documents_key(shard.id), bytes(12))
        for task, fp in TASKS.items():
            store.create(label_key(task, fp, shard.id), bytes(12))
    return store


def test_in_an_empty_store_everything_remains_in_order(store: LocalStore) -> None:
    work_items = remaining(SHARDS, TASKS, committed(store, TASKS, SIDS))
    assert work_items == [WorkItem(shard, ("toxic", "topic"), documents=True) for shard in SHARDS]


def test_in_a_full_store_nothing_remains(full: LocalStore) -> None:
    assert remaining(SHARDS, TASKS, committed(full, TASKS, SIDS)) == []


def test_a_deleted_label_file_is_the_only_work(full: LocalStore) -> None:
    (full.root / label_key("topic", F2, SHARDS[2].id)).unlink()
    work_items = remaining(SHARDS, TASKS, committed(full, TASKS, SIDS))
    assert work_items == [WorkItem(SHARDS[2], ("topic",), documents=False)]


def test_a_deleted_documents_file_is_the_only_work(full: LocalStore) -> None:
    (full.root / documents_key(SHARDS[1].id)).unlink()
    work_items = remaining(SHARDS, TASKS, committed(full, TASKS, SIDS))
    assert work_items == [WorkItem(SHARDS[1], (), documents=True)]


def test_an_added_task_alone_is_computed(full: LocalStore) -> None:
    tasks = {**TASKS, "quality": F3}
    work_items = remaining(SHARDS, tasks, committed(full, tasks, SIDS))
    assert work_items == [WorkItem(shard, ("quality",), documents=False) for shard in SHARDS]


def test_a_changed_task_alone_is_computed(full: LocalStore) -> None:
    tasks = {**TASKS, "toxic": F9}
    work_items = remaining(SHARDS, tasks, committed(full, tasks, SIDS))
    assert work_items == [WorkItem(shard, ("toxic",), documents=False) for shard in SHARDS]


def test_a_removed_task_leaves_nothing_to_do(full: LocalStore) -> None:
    assert remaining(SHARDS, {"topic": F2}, committed(full, {"topic": F2}, SIDS)) == []


@pytest.mark.parametrize(
    "key",
    [
        f"labels/toxic/{F1}/{FIRST.id[:2]}/{FIRST.id}.parquet.copy",
        f"labels/toxic/{F1}/{FIRST.id[:2]}/{FIRST.id}.json",
        f"labels/toxic/{F1}/{FIRST.id}.parquet",
        f"labels/toxic/{F1}0/{FIRST.id[:2]}/{FIRST.id}.parquet",
        f"labels/toxic2/{F1}/{FIRST.id[:2]}/{FIRST.id}.parquet",
        f"attempts/{F1}/{FIRST.id}/{FIRST.id}.parquet",
    ],
)
def test_a_key_that_only_resembles_a_shards_is_not_its_labels(store: LocalStore, key: str) -> None:
    store.create(key, bytes(12))
    assert committed(store, TASKS, SIDS) == Committed(
        TASKS, {}, {"toxic": {}, "topic": {}}, {"toxic": {}, "topic": {}}
    )


def test_a_spec_is_written_down_once(store: LocalStore) -> None:
    record_specs(store, TASKS, {"toxic": b"{1}", "topic": b"{2}"})
    record_specs(store, {"toxic": F1}, {"toxic": b"{1}"})
    with pytest.raises(StorageError, match=rf"specs/toxic/{F1}\.json: its content was changed"):
        record_specs(store, {"toxic": F1}, {"toxic": b"{changed}"})
    assert store.read(f"specs/toxic/{F1}.json") == b"{1}"
    assert store.read(f"specs/topic/{F2}.json") == b"{2}"


@pytest.mark.parametrize("kind", ["empty", "short", "link", "dangling"])
@pytest.mark.parametrize("which", ["documents", "label", "retry"])
def test_what_cannot_be_a_file_of_results_is_named_and_counts_as_nothing(
    kind: str, which: str, store: LocalStore
) -> None:
    sid = SHARDS[0].id
    keys = {
        "documents": documents_key(sid),
        "label": label_key("toxic", F1, sid),
        "retry": label_key("toxic", F1, sid, 1),
    }
    path = store.root / keys[which]
    path.parent.mkdir(parents=True)
    if kind in ("empty", "short"):
        path.write_bytes(b"" if kind == "empty" else b"PAR1PAR1")
    else:
        whole = store.root / "elsewhere.parquet"
        whole.write_bytes(bytes(100)) if kind == "link" else None
        path.symlink_to(whole)
    with pytest.raises(StorageError, match=f"{path}: has . bytes of its own") as named:
        committed(store, TASKS, SIDS)
    assert "delete it and run again" in str(named.value)
    path.unlink()
    assert not committed(store, TASKS, SIDS).documents
