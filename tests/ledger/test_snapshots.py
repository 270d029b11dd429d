"""Snapshots: published when complete, once for one content, never two with one number."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from pipeline.errors import StorageError
from pipeline.ledger.cells import committed, is_whole
from pipeline.ledger.keys import documents_key, label_key, snapshot_key
from pipeline.ledger.snapshots import (
    SnapshotTask,
    contents,
    contents_of,
    last_contents,
    publish,
    read_snapshot,
    snapshot_numbers,
)
from pipeline.sources.shards import ObjectVersion, Piece, Shard, Slice
from pipeline.stores.local import LocalStore

FIRST = Shard(ObjectVersion("/a.jsonl", 10, "etag", "jsonl", "text", None), Piece(0, 3, 8, 0, 10))
SHARDS = [FIRST, replace(FIRST, piece=Piece(3, 5, 8, 0, 10))]
SIDS = [shard.id for shard in SHARDS]
F1, F2 = "f1" * 8, "f2" * 8
FPS = {"toxic": F1, "topic": F2}
TASKS = {task: SnapshotTask(fp, ("yes", "no")) for task, fp in FPS.items()}


@pytest.fixture
def full(store: LocalStore) -> LocalStore:
    """A store with everything for SHARDS and TASKS."""
    for shard in SHARDS:
        store.create(documents_key(shard.id), bytes(12))
        for task, fp in FPS.items():
            store.create(label_key(task, fp, shard.id), bytes(12))
    return store


def publish_now(store: LocalStore, name: str = "job", tasks: tuple[str, ...] = tuple(FPS)) -> int:
    done = committed(store, FPS, SIDS)
    shown = {task: TASKS[task] for task in tasks}
    return publish(store, name, shown, SHARDS, done, created_at="2026-11-01T00:00:00Z")


def test_a_snapshot_names_every_shard_and_every_file(full: LocalStore) -> None:
    assert publish_now(full) == 1
    snapshot = read_snapshot(full, 1)
    assert snapshot_numbers(full) == [1]
    assert [stored.key for stored in full.list("snapshots/")] == ["snapshots/00000001.json"]
    assert (snapshot["number"], snapshot["spec"], snapshot["rows"]) == (1, "job", 5)
    assert snapshot["created_at"] == "2026-11-01T00:00:00Z"
    assert snapshot["tasks"]["topic"] == {"fp": F2, "labels": ["yes", "no"]}
    assert snapshot["shards"][1] == {
        "sid": SHARDS[1].id,
        "path": "/a.jsonl",
        "start_row": 3,
        "end_row": 5,
        "rows": 2,
    }
    etags = {stored.key: stored.etag for stored in full.list("")}
    assert [(file["task"], file["sid"], file["rows"]) for file in snapshot["files"]] == [
        (task, shard.id, shard.rows) for shard in SHARDS for task in (None, "toxic", "topic")
    ]
    assert all(file["etag"] == etags[file["key"]] for file in snapshot["files"])


def test_the_same_content_is_not_published_again(full: LocalStore) -> None:
    assert (publish_now(full), publish_now(full)) == (1, 1)


def test_other_content_is_the_next_number_and_the_old_one_stays(full: LocalStore) -> None:
    assert publish_now(full) == 1
    before = full.read(snapshot_key(1))
    assert publish_now(full, tasks=("topic",)) == 2
    assert publish_now(full) == 3
    assert full.read(snapshot_key(1)) == before


def test_a_file_made_again_is_other_content(full: LocalStore) -> None:
    publish_now(full)
    key = documents_key(FIRST.id)
    (full.root / key).unlink()
    full.create(key, b"of another size")
    assert publish_now(full) == 2


def test_unfinished_work_has_no_snapshot(full: LocalStore) -> None:
    (full.root / label_key("topic", F2, FIRST.id)).unlink()
    assert not is_whole(FIRST, FPS, committed(full, FPS, SIDS))
    with pytest.raises(StorageError, match="not complete"):
        publish_now(full)
    assert snapshot_numbers(full) == []


def test_the_highest_number_is_current_and_other_names_are_none(store: LocalStore) -> None:
    for name in ("00000009", "00000010", "100000000", "README", "0000011"):
        number = int(name) if name.isdigit() else 0
        store.create(f"snapshots/{name}.json", b'{"number": %d}' % number)
    assert snapshot_numbers(store) == [100_000_000, 10, 9]


def test_runs_that_publish_at_once_get_a_number_each(full: LocalStore) -> None:
    numbers: list[int] = []
    start = threading.Barrier(6)

    def race(name: str) -> None:
        start.wait()
        numbers.append(publish_now(full, name))

    threads = [threading.Thread(target=race, args=(f"job{job}",)) for job in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("data", [b"{", b"[" * 200_000])
def test_a_snapshot_that_is_not_json_is_one_line(store: LocalStore, data: bytes) -> None:
    store.create(snapshot_key(1), data)
    with pytest.raises(StorageError, match=r"snapshots/00000001\.json: is not JSON"):
        contents(store)


def test_of_a_snapshot_that_is_cut_off_nobody_says_that_there_is_none(full: LocalStore) -> None:
    publish_now(full)
    whole = full.read(snapshot_key(1))
    full.delete([snapshot_key(1)])
    for size in range(0, len(whole), 7):
        full.create(snapshot_key(1), whole[:size])
        with pytest.raises(StorageError, match=r"00000001\.json: is (cut off|not JSON)"):
            last_contents(full, "job")
        full.delete([snapshot_key(1)])
    full.create(snapshot_key(1), whole)
    assert last_contents(full, "job").number == 1
    # — a run publishes above one that is cut off
    full.create(snapshot_key(2), whole[:-40])
    assert publish_now(full, tasks=("topic",)) == 3
    assert last_contents(full, "job").number == 3


def test_another_specs_snapshot_is_not_a_change_of_this_ones(full: LocalStore) -> None:
    assert publish_now(full) == 1
    assert publish_now(full, name="other", tasks=("topic",)) == 2
    assert publish_now(full) == 1
    assert publish_now(full, tasks=("topic",)) == 3  # the spec itself has changed
    assert publish_now(full) == 4  # and back


def test_a_snapshot_of_a_slice_names_its_label_files_and_the_whole_documents(
    store: LocalStore,
) -> None:
    sliced = [replace(shard, slice=Slice(sample="0.5")) for shard in SHARDS]
    for shard in sliced:
        store.create(documents_key(shard.id), bytes(12))
        for task, fp in FPS.items():
            store.create(label_key(task, fp, shard.cell), bytes(12))
    done, rows = committed(store, FPS, SIDS), {SIDS[0]: 2, SIDS[1]: 0}
    with pytest.raises(StorageError, match="not complete"):  # without the slice
        publish_now(store)
    publish(store, "job", TASKS, sliced, done, created_at="now", slice_rows=rows)
    shown = contents(store)
    assert (shown.slice, shown.rows) == (Slice(sample="0.5"), 2)
    assert shown == replace(
        contents_of("job", TASKS, sliced, done, rows),
        number=1,
        missing_rows=3,
        slice=shown.slice,
        created_at="now",
    )
    for shard, named in zip(sliced, shown.shards, strict=True):
        assert (named.sid, named.rows) == (shard.id, rows[shard.id])
        documents = named.documents
        assert (documents.key, documents.rows) == (documents_key(shard.id), shard.rows)
        assert {(file.key, file.rows) for file in named.labels.values()} == {
            (label_key(task, fp, shard.cell), named.rows) for task, fp in FPS.items()
        }
        assert named.sliced and not named.has_own_documents
    assert read_snapshot(store, 1)["complete"] is False


def test_files_that_could_not_be_read_make_a_snapshot_partial(full: LocalStore) -> None:
    done = committed(full, FPS, SIDS)
    stamp = "2026-11-01T00:00:00Z"
    with pytest.raises(StorageError, match="not complete"):
        publish(full, "job", TASKS, SHARDS, done, created_at=stamp, missing_files=1)
    publish(full, "job", TASKS, SHARDS, done, created_at=stamp, missing_files=1, partial=True)
    snapshot = read_snapshot(full, 1)
    assert (snapshot["complete"], snapshot["missing_files"], snapshot["rows"]) == (False, 1, 5)
    assert publish_now(full) == 2


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_a_foreign_entry_at_the_next_number_is_named(full: LocalStore, kind: str) -> None:
    publish_now(full)
    path = full.root / snapshot_key(2)
    path.mkdir() if kind == "folder" else path.symlink_to("nowhere")
    with pytest.raises(StorageError, match=r"snapshots/00000002\.json: (is a|cannot be read)"):
        publish_now(full, tasks=("topic",))
