"""The cut that lasts: cut once, read ever after, whoever asks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
TEXT = Columns("text", None)


@pytest.fixture
def objects(write: Write) -> list[InputObject]:
    return [write("a.jsonl", LINES), write("b.jsonl", LINES[:-200]), write("empty.jsonl", b"")]


def test_the_shards_of_all_objects_come_in_order(
    store: LocalStore, objects: list[InputObject]
) -> None:
    cuts = load_or_cut(store, objects, TEXT, 3000)
    assert list(cuts.shards) == [shard for each in objects for shard in cut(each, TEXT, 3000)]
    assert [stored.key for stored in store.list("")] == [ENTRY]


def test_what_was_cut_is_not_opened_again_even_for_another_target_or_beside_a_new_object(
    store: LocalStore, objects: list[InputObject], write: Write
) -> None:
    first = load_or_cut(store, objects, TEXT, 3000)
    for input_object in objects:
        Path(input_object.path).unlink()
    assert load_or_cut(store, objects, TEXT, 10**6) == first
    # — a new object alone is cut
    new = write("c.jsonl", LINES[:100])
    both = load_or_cut(store, [*objects, new], TEXT, 3000).shards
    assert both[: len(first.shards)] == first.shards
    assert {shard.path for shard in both[len(first.shards) :]} == {new.path}


def test_what_is_not_kept_is_the_same_cut_and_writes_nothing(
    store: LocalStore, objects: list[InputObject]
) -> None:
    first = load_or_cut(store, objects, TEXT, 17, keep=False)
    assert list(first.shards) == [shard for each in objects for shard in cut(each, TEXT, 17)]
    assert not store.root.exists()
    kept = load_or_cut(store, objects[:1], TEXT, 3000)
    both = load_or_cut(store, objects, TEXT, 17, keep=False)
    assert both.shards[: len(kept.shards)] == kept.shards
    assert [stored.key for stored in store.list("")] == [ENTRY]


def test_of_two_that_cut_at_once_the_first_stands_and_the_rest_is_added(
    store: LocalStore, objects: list[InputObject]
) -> None:
    first = load_or_cut(store, objects[:1], TEXT, 3000)
    blind = Recording(store)
    blind.list = lambda _prefix: iter(())  # does not show yet what another run has created
    late = load_or_cut(blind, objects, TEXT, 10**6)
    assert late.shards[: len(first.shards)] == first.shards
    assert load_or_cut(store, objects, TEXT, 17) == late


@pytest.mark.parametrize(
    ("changed", "id"), [({"etag": "x"}, None), ({"size_bytes": 1}, None), ({}, "id")]
)
def test_another_version_or_column_is_cut_again_and_the_earlier_keeps_its_shards(
    store: LocalStore, objects: list[InputObject], changed: dict[str, Any], id: str | None
) -> None:
    Path(objects[0].path).write_bytes(b'{"text": "t", "id": 1}\n')
    first = load_or_cut(store, objects, TEXT, 3000)
    other = replace(objects[0], **changed)
    second = load_or_cut(store, [other], Columns("text", id), 3000)
    assert not {shard.id for shard in second.shards} & {shard.id for shard in first.shards}
    assert load_or_cut(store, objects, TEXT, 3000).shards == first.shards
    # — in another format, the file is read again
    with pytest.raises(StorageError, match="cannot be read"):
        load_or_cut(store, [replace(objects[0], format="jsonl.gz")], TEXT, 3000)


def test_no_rows_at_all_is_an_error_of_the_spec(store: LocalStore, write: Write) -> None:
    with pytest.raises(SpecError, match="the file has no row"):
        load_or_cut(store, [write("empty.jsonl", b"\n")], TEXT, 3000)


@pytest.mark.parametrize("broken", [b"{", b"{}", json.dumps({"cuts": [{"object": [1]}]}).encode()])
def test_a_broken_entry_is_named(
    store: LocalStore, objects: list[InputObject], broken: bytes
) -> None:
    store.create(ENTRY, broken)
    with pytest.raises(StorageError, match=f"{ENTRY}: is not a list of shards"):
        load_or_cut(store, objects, TEXT, 3000)


def test_an_object_that_cannot_be_read_is_left_out_and_tried_again(
    store: LocalStore, objects: list[InputObject], write: Write
) -> None:
    whole = gzip.compress(LINES)
    broken = write("broken.jsonl.gz", whole[:-30])
    cuts = load_or_cut(store, [*objects, broken], TEXT, 3000)
    assert {shard.path for shard in cuts.shards} == {each.path for each in objects[:2]}
    (reason,) = cuts.unreadable
    assert reason.startswith(f"{broken.path}: cannot be read: ")
    assert load_or_cut(store, [*objects, broken], TEXT, 3000) == cuts
    mended = write("broken.jsonl.gz", whole)
    again = load_or_cut(store, [*objects, mended], TEXT, 3000)
    assert not again.unreadable
    assert sum(shard.rows for shard in again.shards if shard.path == mended.path) == 40
    # — where nothing can be read, that is the error
    broken = write("broken.jsonl.gz", whole[:-31])
    with pytest.raises(StorageError, match="cannot be read"):
        load_or_cut(store, [broken], TEXT, 3000)
