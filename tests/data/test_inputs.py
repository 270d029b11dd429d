"""The cut that lasts: cut once, read ever after, whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.data.inputs import input_key, load_or_cut
from pipeline.data.local_store import LocalStore
from pipeline.data.source import InputObject, cut
from pipeline.data.storage import StoredObject
from pipeline.errors import SpecError, StorageError

Write = Callable[[str, bytes], InputObject]
LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(40))


class Blind:
    """A store whose LIST is late: what others created since is not in it."""

    def __init__(self, store: LocalStore) -> None:
        self.url, self.create, self.read = store.url, store.create, store.read

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return iter(())


@pytest.fixture
def objects(write: Write) -> list[InputObject]:
    return [write("a.jsonl", LINES), write("b.jsonl", LINES[:-200]), write("empty.jsonl", b"")]


def test_the_shards_of_all_objects_come_in_order(
    store: LocalStore, objects: list[InputObject]
) -> None:
    shards = load_or_cut(store, objects, "text", None, 3000)
    assert shards == [shard for found in objects for shard in cut(found, "text", None, 3000)]


def test_what_was_cut_is_not_opened_again_even_for_another_target(
    store: LocalStore, objects: list[InputObject]
) -> None:
    first = load_or_cut(store, objects, "text", None, 3000)
    for found in objects:
        Path(found.path).unlink()
    assert load_or_cut(store, objects, "text", None, 10**6) == first


def test_a_new_object_alone_is_cut(store: LocalStore, objects: list[InputObject]) -> None:
    first = load_or_cut(store, objects[:1], "text", None, 3000)
    Path(objects[0].path).unlink()
    both = load_or_cut(store, objects[:2], "text", None, 3000)
    assert both[: len(first)] == first
    assert {shard.path for shard in both} == {objects[0].path, objects[1].path}


def test_of_two_that_cut_at_once_the_first_stands(
    store: LocalStore, objects: list[InputObject]
) -> None:
    first = load_or_cut(store, objects, "text", None, 3000)
    late = load_or_cut(Blind(store), objects, "text", None, 10**6)
    assert late == first


def test_the_key_changes_with_the_object_and_its_columns(objects: list[InputObject]) -> None:
    found = objects[0]
    keys = [
        input_key(found, "text", None),
        input_key(found, "body", None),
        input_key(found, "text", "id"),
        input_key(replace(found, etag="x"), "text", None),
        input_key(replace(found, size_bytes=1), "text", None),
        input_key(replace(found, path="/x"), "text", None),
        input_key(replace(found, format="jsonl.gz"), "text", None),
    ]
    assert len(set(keys)) == len(keys)


def test_a_corpus_without_a_row_is_one_problem(store: LocalStore, write: Write) -> None:
    with pytest.raises(SpecError, match=r"^input\.path: none of the 1 files has a row"):
        load_or_cut(store, [write("empty.jsonl", b"\n")], "text", None, 3000)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"shards": [{"path": "x"}]}'])
def test_a_broken_cut_is_one_line_that_says_what_to_do(
    store: LocalStore, objects: list[InputObject], content: bytes
) -> None:
    key = input_key(objects[0], "text", None)
    store.create(key, content)
    with pytest.raises(StorageError, match=r"is not a list of shards: .*; delete it"):
        load_or_cut(store, objects, "text", None, 3000)
