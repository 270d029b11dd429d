"""Resume: what is missing is computed, and nothing else."""

from __future__ import annotations

import pytest
from label_tables import toy_shard

from pipeline.errors import StorageError
from pipeline.ledger.cells import (
    Committed,
    WorkItem,
    committed,
    equal_versions,
    record_specs,
    remaining,
    stored_fps,
    stored_version,
)
from pipeline.ledger.keys import documents_key, label_key
from pipeline.spec.fingerprint import Fingerprint
from pipeline.stores.local import LocalStore

FIRST, *_ = SHARDS = [toy_shard(start) for start in range(0, 15, 3)]
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


@pytest.mark.parametrize(
    ("key", "item"),
    [
        (label_key("topic", F2, SIDS[2]), WorkItem(SHARDS[2], ("topic",), documents=False)),
        (documents_key(SIDS[1]), WorkItem(SHARDS[1], (), documents=True)),
    ],
    ids=["labels", "documents"],
)
def test_a_deleted_file_is_the_only_work(full: LocalStore, key: str, item: WorkItem) -> None:
    (full.root / key).unlink()
    assert remaining(SHARDS, TASKS, committed(full, TASKS, SIDS)) == [item]


@pytest.mark.parametrize(
    ("tasks", "missing"),
    [
        (TASKS, ()),
        ({**TASKS, "quality": F3}, ("quality",)),
        ({**TASKS, "toxic": F9}, ("toxic",)),
        ({"topic": F2}, ()),
    ],
    ids=["the same", "one more", "another version", "one less"],
)
def test_a_new_version_of_a_task_alone_is_computed(
    full: LocalStore, tasks: dict[str, str], missing: tuple[str, ...]
) -> None:
    items = [WorkItem(shard, missing, documents=False) for shard in SHARDS if missing]
    assert remaining(SHARDS, tasks, committed(full, tasks, SIDS)) == items


def test_each_shard_has_its_own_latest_retry(full: LocalStore) -> None:
    for retry in (2, 10, 1):
        full.create(label_key("toxic", F1, FIRST.id, retry), bytes(12 + retry))
    done = committed(full, TASKS, SIDS)
    etags = {stored.key: stored.etag for stored in full.list("")}
    for sid, retry in ((FIRST.id, 10), (SIDS[1], 0)):
        assert done.retry("toxic", sid) == retry
        key = label_key("toxic", F1, sid, retry)
        assert (done.label_key("toxic", sid), done.labels["toxic"][sid]) == (key, etags[key])


def test_versions_of_other_documents_have_equal_raw_answers(store: LocalStore) -> None:
    """Also under a condition, and after another stage; not another wording."""
    raw, other = Fingerprint({"task": {"question": "a"}}), Fingerprint({"task": {"question": "b"}})
    versions = [
        raw,
        raw.under(limit="sample < 0.1"),
        raw.under(when={"sql": "n_chars > 3", "tasks": {}}, limit="year > 2000"),
        raw.under(after={"stage": F1, "thresholds": ["x", 0.1, 0.9]}),
    ]
    for version in (*versions, other):
        record_specs(store, [("toxic", version)])
    for version in versions:
        others = {each.id for each in versions} - {version.id}
        assert {*equal_versions(store, "toxic", version)} == others
    assert equal_versions(store, "toxic", other) == []
    assert versions[1].of_all == raw and versions[2].of_all == raw.under(**_when(versions[2]))


def _when(version: Fingerprint) -> dict[str, object]:
    return {"when": version.content["when"]}


def test_another_key_is_not_the_labels_of_a_shard(store: LocalStore) -> None:
    """`test_keys` has all keys that no version of assay writes."""
    for key in (
        f"labels/toxic/{F1}/{FIRST.id[:2]}/{FIRST.id}.parquet.copy",
        f"labels/toxic2/{F1}/{FIRST.id[:2]}/{FIRST.id}.parquet",
        f"attempts/{F1}/{FIRST.id}/{FIRST.id}.parquet",
    ):
        store.create(key, bytes(12))
    none: dict[str, dict[str, str]] = {"toxic": {}, "topic": {}}
    assert committed(store, TASKS, SIDS) == Committed(TASKS, {}, none, none)


def test_a_spec_is_written_down_once(store: LocalStore) -> None:
    one, two = Fingerprint({"task": 1}), Fingerprint({"task": 2})
    record_specs(store, [("toxic", one), ("topic", two)])
    record_specs(store, [("toxic", one)])
    assert store.read(f"specs/toxic/{one.id}.json") == b'{"task":1}'
    assert store.read(f"specs/topic/{two.id}.json") == b'{"task":2}'
    store.create(f"specs/topic/{one.id}.json", b"{changed}")
    with pytest.raises(StorageError, match=rf"specs/topic/{one.id}\.json: its content was changed"):
        record_specs(store, [("topic", one)])
    assert store.read(f"specs/topic/{one.id}.json") == b"{changed}"


def test_the_versions_of_a_task_are_those_whose_content_is_stored(store: LocalStore) -> None:
    version = Fingerprint({"task": "x", "limit": "sample < 0.1"})
    record_specs(store, [("toxic", version)])
    store.create(f"specs/toxic/{F2}.json", b"not JSON")
    assert {*stored_fps(store, "toxic")} == {version.id, F2}
    assert stored_version(store, "toxic", version.id).raw.content == {"task": "x"}
    assert stored_version(store, "toxic", F2).content == {}
