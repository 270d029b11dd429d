"""The store on a local disk: what a crash leaves, what is durable, and what is refused."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import RefusedError, StorageError
from pipeline.stores.local import LocalStore
from pipeline.stores.store import check_create_only


def keys(store: LocalStore, prefix: str = "") -> list[str]:
    return [stored.key for stored in store.list(prefix)]


def test_a_process_that_dies_before_the_link_leaves_nothing_at_the_key(store: LocalStore) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from pipeline.stores.local import LocalStore\n"
        "os.link = lambda *paths: os._exit(9)\n"
        "LocalStore(Path(sys.argv[1])).create('labels/key', b'data')\n"
    )
    died = subprocess.run([sys.executable, "-c", program, store.url], check=False)
    assert died.returncode == 9
    assert keys(store) == []
    assert len(keys(store, "attempts/")) == 1
    assert store.create("labels/key", b"data")


def test_a_link_whose_reply_was_lost_is_recognised_as_our_own(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def lost_and_asked_again(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", lost_and_asked_again)
    assert store.create("key", b"first")
    assert not store.create("key", b"second")
    assert store.read("key") == b"first"


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
    expected = [place.stat().st_ino for place in [store.root / "labels/toxic/key", *folders]]
    assert set(expected) <= set(synced)
    assert synced[-1] == expected[-1]


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
    with pytest.raises(RefusedError, match="has no hard links"):
        check_create_only(store)


def test_the_etag_changes_when_an_object_is_written_again(store: LocalStore) -> None:
    store.create("key", b"data")
    (before,) = store.list("")
    (store.root / "key").unlink()
    store.create("key", b"else")
    os.utime(store.root / "key", ns=(1, 1))
    (after,) = store.list("")
    assert before.etag != after.etag


def test_a_root_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be written"):
        LocalStore(tmp_path / "out").create("key", b"data")


@pytest.mark.parametrize("kind", [FileNotFoundError, FileExistsError])
def test_a_folder_that_another_process_deletes_meanwhile_is_made_again(
    kind: type[OSError], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdir` raises FileExistsError if the folder is there at first and gone when it looks."""
    mkdir, raised = Path.mkdir, list[Path]()

    def deleted_meanwhile(folder: Path, *arguments: int, **named: bool) -> None:
        if folder.name == "a" and not raised:
            raised.append(folder)
            raise kind(errno.EEXIST, "File exists")
        mkdir(folder, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", deleted_meanwhile)
    assert store.create("attempts/a/key", b"") and raised
    assert keys(store, "attempts/a/") == ["attempts/a/key"]
