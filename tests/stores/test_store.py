"""The store's law, the same tests for every store: no create changes an object that exists."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from memory_store import MemoryStore

from pipeline.errors import RefusedError, SpecError, StorageError
from pipeline.runtime.fitted_files import read_fitted
from pipeline.runtime.weights import locate
from pipeline.sources.source import find_files
from pipeline.spec.model import ModelSpec
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.local import LocalStore
from pipeline.stores.named_files import open_target
from pipeline.stores.store import PROBE_KEY, Store, check_create_only, open_store

STORES = ["memory", "disk", "moto", "seaweedfs", "fake_gcs"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "memory":
        return MemoryStore()
    if request.param == "disk":
        return LocalStore(tmp_path / "out")
    server = request.getfixturevalue(request.param)
    # — pages of five, so that listings are long enough to be cut
    return open_store(server.new_url(), server.options | server.small_pages)


@dataclass(frozen=True)
class OverwritingStore(MemoryStore):
    """A store that overwrites, and gives every create the same answer, as some S3 look-alikes."""

    answer: bool = True

    def create(self, key: str, data: bytes) -> str | None:
        self.delete([key])
        etag = super().create(key, data)
        return etag if self.answer else None


def keys(store: Store, prefix: str = "") -> list[str]:
    return [stored.key for stored in store.list(prefix)]


def test_what_is_created_is_read_and_listed(store: Store) -> None:
    etag = store.create("labels/toxic/ab/one.parquet", b"data")
    assert store.read("labels/toxic/ab/one.parquet") == b"data"
    (stored,) = store.list("labels/")
    assert stored.etag == etag
    assert (stored.key, stored.size_bytes) == ("labels/toxic/ab/one.parquet", 4)


def test_a_second_create_changes_nothing(store: Store) -> None:
    store.create("key", b"first")
    before = list(store.list(""))
    assert not store.create("key", b"second")
    assert store.read("key") == b"first"
    assert list(store.list("")) == before


def test_a_deleted_object_is_missing_and_deleting_it_again_is_no_error(store: Store) -> None:
    made = [f"attempts/a/{i}" for i in range(7)] + ["labels/x", "labels/y"]
    for key in made:
        store.create(key, b"1")
    store.delete([*made[2:], "never/there"])
    assert keys(store) == [] and keys(store, "attempts/") == made[:2]
    store.delete([])
    assert store.create("labels/x", b"2") and store.read("labels/x") == b"2"


def test_an_object_may_be_empty_or_of_megabytes(store: Store) -> None:
    for key, data in {"empty": b"", "large": random.Random(1).randbytes(9_000_000)}.items():
        assert store.create(key, data)
        assert store.read(key) == data
        assert not store.create(key, b"other")


def test_only_what_is_below_the_stores_own_prefix_is_listed(store: Store) -> None:
    if isinstance(store, MemoryStore | LocalStore):
        pytest.skip("has no neighbours")
    neighbour = replace(store, prefix=store.prefix.removesuffix("/") + "-other/")
    neighbour.create("key", b"")
    assert keys(store) == []


def test_the_etag_differs_between_contents(store: Store) -> None:
    store.create("a", b"first")
    store.create("b", b"second")
    before = list(store.list(""))
    assert before == list(store.list(""))
    assert before[0].etag != before[1].etag


def test_of_many_threads_racing_for_a_key_one_makes_it(store: Store) -> None:
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


def test_a_store_is_create_only_however_often_it_is_asked(store: Store) -> None:
    check_create_only(store)
    check_create_only(store)
    assert keys(store) == []
    assert keys(store, "attempts/") == [PROBE_KEY]


@pytest.mark.parametrize("answer", [True, False], ids=["says made", "says it existed"])
def test_a_store_that_overwrites_is_refused(answer: bool) -> None:
    with pytest.raises(RefusedError, match="memory://: a second create"):
        check_create_only(OverwritingStore(answer=answer))


def test_a_listing_is_in_the_order_of_keys_at_any_depth(store: Store) -> None:
    names = ["b/z", "b/a/deep/x", "b-c", "a", "b/a.b", "ba/c", *(f"c/{i:02d}" for i in range(23))]
    for name in names:
        store.create(name, b"")
    assert keys(store) == sorted(names)
    assert keys(store, "b/") == ["b/a.b", "b/a/deep/x", "b/z"]
    assert keys(store, "b/a") == ["b/a.b", "b/a/deep/x"]


@pytest.mark.parametrize("prefix", ["", "nothing/", "nothing/deeper/x"])
def test_a_prefix_that_names_nothing_is_empty(store: Store, prefix: str) -> None:
    assert keys(store, prefix) == []


@pytest.mark.parametrize(
    "key", ["", "/", "/etc/passwd", "../", "../out", "a/../../b", "a//b", "a/", "./a", "a\\b"]
)
def test_neither_a_key_nor_a_prefix_can_leave_the_store(store: Store, key: str) -> None:
    with pytest.raises(StorageError, match="is not a key"):
        store.create(key, b"data")
    with pytest.raises(StorageError, match="is not a key"):
        store.read(key)
    if key not in ("", "a/"):
        with pytest.raises(StorageError, match="is not a key"):
            list(store.list(key))


def test_reading_what_is_not_there_is_one_line(store: Store) -> None:
    with pytest.raises(StorageError, match=r"key: cannot be read: .") as raised:
        store.read("key")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("form", ["{}", "file://{}", "FILE://{}"])
def test_a_path_and_a_file_url_open_the_same_store(tmp_path: Path, form: str) -> None:
    assert open_store(form.format(tmp_path), {}) == LocalStore(tmp_path)


def test_the_scheme_of_a_url_may_be_in_upper_case() -> None:
    assert open_store("S3://bucket/out", {"anon": True}).url == "s3://bucket/out"


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("out", {}) == LocalStore(tmp_path / "out")


@pytest.mark.parametrize("url", ["memory://out", "file://out", "ftp://host/out", "s3://", "gs:///"])
def test_a_store_that_cannot_be_written_is_refused_by_name(url: str) -> None:
    with pytest.raises(RefusedError, match=url):
        open_store(url, {"token": "anon"} if url.startswith("gs") else {})


@pytest.mark.parametrize(("server", "scheme"), [("moto", "s3"), ("fake_gcs", "gs")])
def test_a_bucket_that_is_not_there_is_one_line(
    server: str, scheme: str, request: pytest.FixtureRequest
) -> None:
    url = f"{scheme}://no-such-bucket/out"
    store = open_store(url, request.getfixturevalue(server).options)
    with pytest.raises(StorageError, match=f"^{url}/key: .*check the path") as raised:
        store.create("key", b"")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["simplecache::s3://b/a", "zip://a::s3://b", "://x", "data://x", "reference://x"]
)
def test_a_chained_or_unknown_url_is_refused_and_is_no_local_folder(url: str) -> None:
    with pytest.raises(RefusedError, match="is not a supported store"):
        open_store(url, {})


def test_the_home_folder_of_an_unknown_user_is_a_plain_name(tmp_path: Path) -> None:
    """As for a shell."""
    path = "~nobody-has-this-name/x"
    assert Path(open_store(path, {}).url).parts[-2:] == ("~nobody-has-this-name", "x")
    with pytest.raises(SpecError, match=r"^model\.path: "):
        locate(ModelSpec(path=path), tmp_path)
    with pytest.raises(SpecError, match=r"^input\.path: "):
        find_files(path)
    with pytest.raises(SpecError, match=r"^tasks\.0\.readout: the file cannot be read: "):
        read_fitted(path, {}, place="tasks.0.readout")


@pytest.mark.parametrize(
    "url",
    [
        "reference://x",
        "jupyter://127.0.0.1:1/a",
        "dbfs://x/a",
        "github://a/b",
        "generic://x",
        "dir://x",
        "async_wrapper://x",
        "data://x",
        "git://x/a.jsonl",
        "nosuch://x",
        "zip://a::memory://b",
    ],
)
def test_a_url_of_a_file_system_that_cannot_be_made_is_one_problem(url: str) -> None:
    """It needs options, or a package, or is no file system at all."""
    with pytest.raises((ValueError, ImportError)) as refused:
        file_system_at(url, {})
    assert "\n" not in str(refused.value)
    with pytest.raises(SpecError, match=r"^to: cannot be opened: "):
        open_target(url, {})
    with pytest.raises(SpecError, match=r"^input\.path: cannot be opened: "):
        find_files(url)
    with pytest.raises(SpecError, match=r"^tasks\.0\.readout: cannot be opened: "):
        read_fitted(url, {}, place="tasks.0.readout")
