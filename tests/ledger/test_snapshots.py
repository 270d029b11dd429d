"""Snapshots: published when complete, once for one content, never two with one number."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from label_tables import toy_shard
from memory_store import MemoryStore, Recording

from pipeline.errors import StorageError, UnavailableError
from pipeline.ledger import snapshot_files, snapshots
from pipeline.ledger.cells import committed, is_whole
from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.counts_log import skipped_by_all
from pipeline.ledger.keys import documents_key, label_key, manifest_key, snapshot_key
from pipeline.ledger.label_files import sealed_hash, to_parquet
from pipeline.ledger.snapshots import (
    SnapshotTask,
    contents,
    last_contents,
    publish,
    read_snapshot,
    snapshot_numbers,
)
from pipeline.stores.local import LocalStore
from pipeline.stores.store import Store

FIRST, SECOND = SHARDS = [toy_shard(), toy_shard(3, 2)]
SIDS = [shard.id for shard in SHARDS]
F1, F2 = "f1" * 8, "f2" * 8
FPS = {"toxic": F1, "topic": F2}
TASKS = {task: SnapshotTask(fp, ("yes", "no")) for task, fp in FPS.items()}


@pytest.fixture
def full(store: LocalStore) -> LocalStore:
    """A store with everything for SHARDS and TASKS."""
    fill(store)
    return store


def fill(store: Store) -> None:
    for shard in SHARDS:
        store.create(documents_key(shard.id), documents_file_of(shard.rows))
        for task, fp in FPS.items():
            store.create(label_key(task, fp, shard.id), labels_of(shard.rows, failed=1))


def documents_file_of(rows: int) -> bytes:
    """A documents file, as far as its status goes."""
    return to_parquet(pa.table({"status": ["ok"] * rows}), {})


def labels_of(rows: int, failed: int) -> bytes:
    """A label file, as far as counts of failed rows go."""
    status = ["quarantined"] * failed + ["ok"] * (rows - failed)
    return to_parquet(pa.table({"status": status}), {"taken_over": "2"})


def publish_now(store: Store, name: str = "job", tasks: tuple[str, ...] = tuple(FPS)) -> int:
    done = committed(store, FPS, SIDS)
    shown = {task: TASKS[task] for task in tasks}
    return publish(store, name, shown, SHARDS, done, created_at="2026-11-01T00:00:00Z")


def test_a_snapshot_names_every_shard_and_every_file(full: LocalStore) -> None:
    assert publish_now(full) == 1
    snapshot = read_snapshot(full, 1)
    assert snapshot_numbers(full) == [1]
    assert [stored.key for stored in full.list("snapshots/")] == [snapshot_key(1), manifest_key(1)]
    assert (snapshot["number"], snapshot["spec"], snapshot["rows"]) == (1, "job", 5)
    assert snapshot["created_at"] == "2026-11-01T00:00:00Z"
    columns = [*ANSWER_COLUMNS]
    assert snapshot["tasks"]["topic"] == {"fp": F2, "labels": ["yes", "no"], "columns": columns}
    files = contents(full, 1).files.to_pylist()
    place = [files[3][name] for name in ("sid", "path", "start_row", "end_row", "rows")]
    assert place == [SECOND.id, "/a.jsonl", 3, 5, 2]
    assert [(file["task"], file["sid"], file["rows"]) for file in files] == [
        (task, shard.id, shard.rows) for shard in SHARDS for task in (None, "toxic", "topic")
    ]


@pytest.mark.parametrize("count", [200, 201])
def test_the_files_are_in_a_table_and_no_label_file_is_read_twice(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert snapshots.GROUP_SHARDS == snapshot_files.GROUP_SHARDS == 10_000
    for module in (snapshots, snapshot_files):
        monkeypatch.setattr(module, "GROUP_SHARDS", 200)
    store = Recording(MemoryStore())
    shards = [toy_shard(n, 1) for n in range(count + 3)]
    sids = [shard.id for shard in shards]
    for number, sid in enumerate(sids):
        store.create(
            documents_key(sid), to_parquet(pa.table({"status": ["ok"], "n": [number]}), {})
        )
        for task, fp in FPS.items():
            failed = int(task == "topic" and number % 100 == 7)
            store.create(label_key(task, fp, sid), labels_of(1, failed))

    def publish_first(shown: int, stamp: str = "2026-11-01") -> int:
        done = committed(store, FPS, sids)
        store.read_keys.clear()
        return publish(store, "job", TASKS, shards[:shown], done, created_at=stamp)

    def files_read() -> list[str]:
        return [key for key in store.read_keys if key.startswith(("labels/", "documents/"))]

    assert publish_first(count) == 1
    # — the documents file of a shard with failed rows has what to ask again
    assert len(files_read()) == 3 * count + 2
    # — of the next snapshot only new shards are read, and of the same none
    assert publish_first(count + 3) == 2
    new = sids[count:]
    expected_keys = [label_key(t, FPS[t], sid) for t in FPS for sid in new] + [
        *map(documents_key, new)
    ]
    assert sorted(files_read()) == sorted(expected_keys)
    assert publish_first(count + 3, stamp="later") == 2
    assert len(store.read_keys) <= 2

    header = read_snapshot(store, 1)
    assert header["rows"] == count and header["complete"]
    assert len(store.read(snapshot_key(1))) < 1_000
    data = store.read(header["files"])
    assert header["files"] == manifest_key(1) and len(data) / count < 300
    (tmp_path / "files.parquet").write_bytes(data)
    relation = duckdb.sql(f"from '{tmp_path}/files.parquet'")
    written = [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
    etags = {stored.key: stored.etag for stored in store.list("")}
    expected = [
        (sid, task, key, etags[key], sealed_hash(store.read(key)), 1, failed, taken_over)
        for number, sid in enumerate(sids[:count])
        for task, key, failed, taken_over in [
            (None, documents_key(sid), None, None),
            ("toxic", label_key("toxic", F1, sid), 0, 2),
            ("topic", label_key("topic", F2, sid), int(number % 100 == 7), 2),
        ]
    ]
    columns = ("sid", "task", "key", "etag", "hash", "rows", "failed", "taken_over")
    assert [tuple(file.get(name) for name in columns) for file in written] == expected
    shown = contents(store, 1)
    assert [shard.start_row for shard in shown.shards] == list(range(count))
    assert shown.files["key"].to_pylist() == [key for _, _, key, *_ in expected]


def test_a_snapshot_under_a_condition_has_all_rows_and_counts_those_that_were_asked_about() -> None:
    store, limit = Recording(MemoryStore()), "year = 2003"
    rows = sum(shard.rows for shard in SHARDS)
    fill(store)
    for task, fp in FPS.items():  # — of one task, one more row is skipped
        for shard in SHARDS:
            store.delete([label_key(task, fp, shard.id)])
            skipped = 1 + (task == "topic" and shard is FIRST)
            status = ["skipped"] * skipped + ["ok"] * (shard.rows - skipped)
            file = to_parquet(pa.table({"status": status}), {})
            store.create(label_key(task, fp, shard.id), file)

    def publish_limited(tasks: dict[str, SnapshotTask]) -> int:
        done = committed(store, FPS, SIDS)
        store.read_keys.clear()
        asked = rows - len(SHARDS)
        return publish(store, "job", tasks, SHARDS, done, created_at="", limit=limit, asked=asked)

    assert publish_limited(TASKS) == 1
    assert skipped_by_all(store, contents(store).files) == len(SHARDS)
    shown, header = contents(store), read_snapshot(store, 1)
    assert (shown.rows, shown.missing_rows, shown.limit) == (rows, len(SHARDS), limit)
    assert header["complete"] is False and header["asked"] == shown.asked == rows - len(SHARDS)
    unpublished = snapshot_files.files_of(SHARDS, TASKS, committed(store, FPS, SIDS))
    assert unpublished.equals(shown.files.select(unpublished.column_names))
    # — of the next snapshot no label file is read
    assert publish_limited({"toxic": TASKS["toxic"]}) == 2
    assert not any(key.startswith("labels/") for key in store.read_keys)


def test_a_manifest_without_its_snapshot_is_no_snapshot_and_takes_only_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.ledger.snapshots.GROUP_SHARDS", 1)
    store = Recording(MemoryStore())
    fill(store)

    def create(key: str, data: bytes) -> str | None:
        if key == snapshot_key(1):
            raise UnavailableError(key)
        return Recording.create(store, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "create", create)
        with pytest.raises(UnavailableError):
            publish_now(store)
    assert [each.key for each in store.list("snapshots/")] == [manifest_key(1)]
    assert snapshot_numbers(store) == []
    assert (publish_now(store), publish_now(store)) == (2, 2)
    assert contents(store).rows == 5
    store.delete([manifest_key(2)])
    with pytest.raises(StorageError, match=r"snapshots/00000002\.parquet"):
        contents(store)
    store.create(manifest_key(2), b"PAR1")
    with pytest.raises(StorageError, match=r"snapshots/00000002\.json: is not a snapshot"):
        contents(store)


def test_a_snapshot_is_published_only_where_its_content_differs_from_the_specs_last(
    full: LocalStore,
) -> None:
    assert publish_now(full) == 1
    before = full.read(snapshot_key(1))
    assert publish_now(full, name="other", tasks=("topic",)) == 2
    assert publish_now(full) == 1
    assert publish_now(full, tasks=("topic",)) == 3  # the spec itself has changed
    assert publish_now(full) == 4  # and back
    key = documents_key(FIRST.id)
    (full.root / key).unlink()
    # — as a run made it that began after snapshot 4
    full.create(key, to_parquet(pa.table({"status": ["empty"] * FIRST.rows}), {"since": "4"}))
    assert publish_now(full) == 5
    assert full.read(snapshot_key(1)) == before


def test_a_shard_without_all_its_labels_is_in_no_snapshot(full: LocalStore) -> None:
    (full.root / label_key("topic", F2, FIRST.id)).unlink()
    assert not is_whole(FIRST, FPS, committed(full, FPS, SIDS))
    snapshot = read_snapshot(full, publish_now(full))
    assert not snapshot["complete"] and snapshot["missing_rows"] == FIRST.rows


def test_the_highest_number_is_current_and_other_names_are_none(store: LocalStore) -> None:
    for name in ("00000009", "00000010", "100000000", "README", "0000011"):
        number = int(name) if name.isdigit() else 0
        store.create(f"snapshots/{name}.json", b'{"number": %d}' % number)
    assert snapshot_numbers(store) == [100_000_000, 10, 9]


def test_runs_that_publish_at_once_get_a_number_each(full: LocalStore) -> None:
    start = threading.Barrier(6)

    def race(number: int) -> int:
        start.wait()
        return publish_now(full, f"job{number}")

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(race, range(6))) == [1, 2, 3, 4, 5, 6]


def test_a_snapshot_that_is_no_json_or_cut_off_is_not_reported_as_missing(
    full: LocalStore,
) -> None:
    publish_now(full)
    whole = full.read(snapshot_key(1))
    full.delete([snapshot_key(1)])
    for data in (b"[" * 200_000, *(whole[:size] for size in range(0, len(whole), 7))):
        full.create(snapshot_key(1), data)
        with pytest.raises(StorageError, match=r"00000001\.json: is not a snapshot"):
            last_contents(full, "job")
        with pytest.raises(StorageError, match=r"snapshots/00000001\.json: is "):
            contents(full)
        full.delete([snapshot_key(1)])
    full.create(snapshot_key(1), whole)
    assert last_contents(full, "job").number == 1
    # — a run publishes above one that is cut off
    full.create(snapshot_key(2), whole[:-40])
    assert publish_now(full, tasks=("topic",)) == 3
    assert last_contents(full, "job").number == 3


def test_files_that_could_not_be_read_make_a_snapshot_partial(full: LocalStore) -> None:
    done = committed(full, FPS, SIDS)
    stamp = "2026-11-01T00:00:00Z"
    publish(full, "job", TASKS, SHARDS, done, created_at=stamp, missing_files=1)
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
