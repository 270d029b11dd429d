"""The store's law: once an object is there no create changes it, whoever races or dies."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.data.storage import (
    PROBE_KEY,
    LocalStore,
    StoredObject,
    check_create_only,
    open_store,
)
from pipeline.errors import RefusedError, StorageError


@dataclass
class OverwritingStore:
    """A store that says yes to every create, as some S3 look-alikes do."""

    url: str = "toy://overwrites"
    objects: dict[str, bytes] = field(default_factory=dict)
    answer: bool = True

    def create(self, key: str, data: bytes) -> bool:
        self.objects[key] = data
        return self.answer

    def read(self, key: str) -> bytes:
        return self.objects[key]

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return iter(())


def keys(store: LocalStore, prefix: str = "") -> list[str]:
    return [stored.key for stored in store.list(prefix)]


def test_what_is_created_is_read_and_listed(store: LocalStore) -> None:
    assert store.create("labels/toxic/ab/one.parquet", b"data")
    assert store.read("labels/toxic/ab/one.parquet") == b"data"
    (stored,) = store.list("labels/")
    assert (stored.key, stored.size_bytes) == ("labels/toxic/ab/one.parquet", 4)


def test_a_second_create_changes_nothing(store: LocalStore) -> None:
    store.create("key", b"first")
    before = list(store.list(""))
    assert not store.create("key", b"second")
    assert store.read("key") == b"first"
    assert list(store.list("")) == before


def test_of_many_threads_racing_for_a_key_one_makes_it(store: LocalStore) -> None:
    made: list[int] = []
    start = threading.Barrier(8)

    def race(writer: int) -> None:
        start.wait()
        if store.create("labels/key", bytes([writer]) * 100_000):
            made.append(writer)

    threads = [threading.Thread(target=race, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert store.read("labels/key") == bytes(made) * 100_000
    assert keys(store, "attempts/") == []


def test_a_process_that_dies_before_the_link_leaves_nothing_at_the_key(store: LocalStore) -> None:
    program = (
        "import os, sys; from pathlib import Path; from pipeline.data.storage import LocalStore\n"
        "os.link = lambda *paths: os._exit(9)\n"
        "LocalStore(Path(sys.argv[1])).create('labels/key', b'data')\n"
    )
    died = subprocess.run([sys.executable, "-c", program, store.url], check=False)
    assert died.returncode == 9
    assert keys(store) == []
    assert len(keys(store, "attempts/")) == 1
    assert store.create("labels/key", b"data")


def test_a_full_disk_leaves_nothing_behind(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store.create("other", b"")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="key: cannot be written: No space left"):
            store.create("key", b"data")
    assert keys(store) == ["other"]
    assert keys(store, "attempts/") == []


def test_the_data_and_every_new_name_are_on_the_disk_when_create_returns(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    original = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    store.create("labels/toxic/key", b"data")
    folders = [store.root.parent, store.root, store.root / "labels", store.root / "labels/toxic"]
    wanted = [place.stat().st_ino for place in [store.root / "labels/toxic/key", *folders]]
    assert set(wanted) <= set(synced)
    assert synced[-1] == wanted[-1]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(place: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    store.create("labels/key", b"")
    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.raises(StorageError, match="labels: cannot be listed: Permission denied"):
        list(store.list("labels/"))


def test_a_file_system_without_hard_links_is_refused(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(RefusedError, match="makes no hard links"):
        check_create_only(store)


def test_a_local_folder_is_create_only_however_often_it_is_asked(store: LocalStore) -> None:
    check_create_only(store)
    check_create_only(store)
    assert keys(store) == []
    assert keys(store, "attempts/") == [PROBE_KEY]


@pytest.mark.parametrize("answer", [True, False], ids=["says made", "says it was there"])
def test_a_store_that_overwrites_is_refused(answer: bool) -> None:
    with pytest.raises(RefusedError, match="toy://overwrites: a second create"):
        check_create_only(OverwritingStore(answer=answer))


def test_a_listing_is_in_the_order_of_keys_at_any_depth(store: LocalStore) -> None:
    names = ["b/z", "b/a/deep/x", "b-c", "a", "b/a.b", "ba/c"]
    for name in names:
        store.create(name, b"")
    assert keys(store) == sorted(names)
    assert keys(store, "b/") == ["b/a.b", "b/a/deep/x", "b/z"]
    assert keys(store, "b/a") == ["b/a.b", "b/a/deep/x"]


@pytest.mark.parametrize("prefix", ["", "nothing/", "nothing/deeper/x"])
def test_a_prefix_that_names_nothing_is_empty(store: LocalStore, prefix: str) -> None:
    assert keys(store, prefix) == []


def test_the_etag_changes_when_an_object_is_written_anew(store: LocalStore) -> None:
    store.create("key", b"data")
    (before,) = store.list("")
    (store.root / "key").unlink()
    store.create("key", b"else")
    os.utime(store.root / "key", ns=(1, 1))
    (after,) = store.list("")
    assert before.etag != after.etag


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../out", "a/../../b", "a//b", "a/", "./a", "a\\b"]
)
def test_a_key_cannot_leave_the_store(store: LocalStore, key: str) -> None:
    with pytest.raises(StorageError, match="is not a key"):
        store.create(key, b"data")
    with pytest.raises(StorageError, match="is not a key"):
        store.read(key)


@pytest.mark.parametrize("prefix", ["../", "/", "a/../b"])
def test_a_prefix_cannot_leave_the_store(store: LocalStore, prefix: str) -> None:
    with pytest.raises(StorageError, match="is not a key"):
        list(store.list(prefix))


def test_reading_what_is_not_there_is_one_line(store: LocalStore) -> None:
    with pytest.raises(StorageError, match="key: cannot be read: No such file"):
        store.read("key")


def test_a_root_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be written"):
        LocalStore(tmp_path / "out").create("key", b"data")


@pytest.mark.parametrize("form", ["{}", "file://{}", "FILE://{}"])
def test_a_path_and_a_file_url_open_the_same_store(tmp_path: Path, form: str) -> None:
    assert open_store(form.format(tmp_path)) == LocalStore(tmp_path)


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("out") == LocalStore(tmp_path / "out")


@pytest.mark.parametrize(
    "url", ["s3://bucket/out", "gs://bucket/out", "memory://out", "file://out"]
)
def test_a_store_that_cannot_be_written_is_refused_by_name(url: str) -> None:
    with pytest.raises(RefusedError, match=url):
        open_store(url)
