"""The cut that lasts: cut once, read ever after, whoever asks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from memory_store import Recording

from pipeline.errors import SpecError, StorageError
from pipeline.ledger.cuts import load_or_cut
from pipeline.sources.source import InputObject, cut
from pipeline.spec.schema import Columns
from pipeline.stores.local import LocalStore

Write = Callable[[str, bytes], InputObject]
LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(40))
ENTRY = "inputs/00000001.json"


@pytest.fixture
def objects(write: Write) -> list[InputObject]:
    return [write("a.jsonl", LINES), write("b.jsonl", LINES[:-200]), write("empty.jsonl", b"")]


def test_the_shards_of_all_objects_come_in_order(
    store: LocalStore, objects: list[InputObject]
) -> None:
    cuts = load_or_cut(store, objects, Columns("text", None), 3000)
    assert list(cuts.shards) == [
        shard
        for input_object in objects
        for shard in cut(input_object, Columns("text", None), 3000)
    ]
    assert [stored.key for stored in store.list("")] == [ENTRY]


def test_what_was_cut_is_not_opened_again_even_for_another_target(
    store: LocalStore, objects: list[InputObject]
) -> None:
    first = load_or_cut(store, objects, Columns("text", None), 3000)
    for input_object in objects:
        Path(input_object.path).unlink()
    assert load_or_cut(store, objects, Columns("text", None), 10**6) == first


def test_what_is_not_kept_is_the_same_cut_and_writes_nothing(
    store: LocalStore, objects: list[InputObject]
) -> None:
    first = load_or_cut(store, objects, Columns("text", None), 17, keep=False)
    assert list(first.shards) == [
        shard for input_object in objects for shard in cut(input_object, Columns("text", None), 17)
    ]
    assert not store.root.exists()
    kept = load_or_cut(store, objects[:1], Columns("text", None), 3000)
    both = load_or_cut(store, objects, Columns("text", None), 17, keep=False)
    assert both.shards[: len(kept.shards)] == kept.shards
    assert [stored.key for stored in store.list("")] == [ENTRY]


def test_a_new_object_alone_is_cut(store: LocalStore, objects: list[InputObject]) -> None:
    first = load_or_cut(store, objects[:1], Columns("text", None), 3000).shards
    Path(objects[0].path).unlink()
    both = load_or_cut(store, objects[:2], Columns("text", None), 3000).shards
    assert both[: len(first)] == first
    assert {shard.path for shard in both} == {objects[0].path, objects[1].path}


def test_of_two_that_cut_at_once_the_first_stands_and_the_rest_is_added(
    store: LocalStore, objects: list[InputObject]
) -> None:
    first = load_or_cut(store, objects[:1], Columns("text", None), 3000)
    blind = Recording(store)
    blind.list = lambda _prefix: iter(())  # does not show yet what another run has created
    late = load_or_cut(blind, objects, Columns("text", None), 10**6)
    assert late.shards[: len(first.shards)] == first.shards
    assert load_or_cut(store, objects, Columns("text", None), 17) == late


@pytest.mark.parametrize(
    "changed", [{"etag": "x"}, {"size_bytes": 1}, {"format": "jsonl.gz"}, {"column": "id"}]
)
def test_another_version_is_cut_again_and_the_earlier_keeps_its_shards(
    store: LocalStore, objects: list[InputObject], changed: dict[str, str]
) -> None:
    path = objects[0].path
    Path(path).write_bytes(b'{"text": "t", "id": 1}\n')
    first = load_or_cut(store, objects, Columns("text", None), 3000)
    id_column = changed.pop("column", None)
    other = objects[0] if id_column else replace(objects[0], **changed)
    if other.format == "jsonl.gz":
        with pytest.raises(StorageError, match="cannot be read"):
            load_or_cut(store, [other], Columns("text", id_column), 3000)
        return
    second = load_or_cut(store, [other], Columns("text", id_column), 3000)
    assert not {shard.id for shard in second.shards} & {shard.id for shard in first.shards}
    assert load_or_cut(store, objects, Columns("text", None), 3000).shards == first.shards


def test_no_rows_at_all_is_an_error_of_the_spec(store: LocalStore, write: Write) -> None:
    with pytest.raises(SpecError, match="the file has no row"):
        load_or_cut(store, [write("empty.jsonl", b"\n")], Columns("text", None), 3000)


@pytest.mark.parametrize("broken", [b"{", b"{}", json.dumps({"cuts": [{"object": [1]}]}).encode()])
def test_a_broken_entry_is_named(
    store: LocalStore, objects: list[InputObject], broken: bytes
) -> None:
    store.create(ENTRY, broken)
    with pytest.raises(StorageError, match=f"{ENTRY}: is not a list of shards"):
        load_or_cut(store, objects, Columns("text", None), 3000)


def test_an_object_that_cannot_be_read_is_left_out_and_tried_again(
    store: LocalStore, objects: list[InputObject], write: Write
) -> None:
    whole = gzip.compress(LINES)
    broken = write("broken.jsonl.gz", whole[:-30])
    cuts = load_or_cut(store, [*objects, broken], Columns("text", None), 3000)
    assert {shard.path for shard in cuts.shards} == {
        input_object.path for input_object in objects[:2]
    }
    (reason,) = cuts.unreadable
    assert reason.startswith(f"{broken.path}: cannot be read: ")
    assert load_or_cut(store, [*objects, broken], Columns("text", None), 3000) == cuts
    mended = write("broken.jsonl.gz", whole)
    again = load_or_cut(store, [*objects, mended], Columns("text", None), 3000)
    assert not again.unreadable
    assert sum(shard.rows for shard in again.shards if shard.path == mended.path) == 40


def test_where_nothing_can_be_read_that_is_the_error(store: LocalStore, write: Write) -> None:
    broken = write("broken.jsonl.gz", gzip.compress(LINES)[:-30])
    with pytest.raises(StorageError, match="cannot be read"):
        load_or_cut(store, [broken], Columns("text", None), 3000)
