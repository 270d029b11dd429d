"""The index of texts: where a text is found, against a dictionary; damage costs time only."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore, Recording

from pipeline.hashes import short_hash
from pipeline.ledger import text_index
from pipeline.ledger.keys import documents_key, index_key, parse_key
from pipeline.ledger.label_files import documents_table, to_parquet
from pipeline.ledger.text_index import (
    candidates,
    hashes_of,
    index_missing_shards,
    leading_bits,
    shards_of_objects,
    text_hashes,
)
from pipeline.sources.documents import RawRow, documents_from
from pipeline.stores.local import LocalStore

TEXTS = [f"text {number}" for number in range(12)]
SHARDS = st.lists(st.lists(st.sampled_from(TEXTS), max_size=8), max_size=6)


def sid_of(number: int) -> str:
    return f"{number:032x}"


def documents(texts: list[str]) -> pa.Table:
    return documents_from(RawRow(text) for text in texts)


def put(store: LocalStore | MemoryStore, number: int, texts: list[str]) -> None:
    store.create(documents_key(sid_of(number)), to_parquet(documents_table(documents(texts)), {}))


NOBODY = np.full(1, -1, np.int32)  # asks: the answer may be any shard


def hashes_by_hand(texts: list[str]) -> np.ndarray:
    return leading_bits(pa.array([short_hash(text.encode()) for text in texts], pa.string()))


def sorted_lists(texts: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    return {sid: sorted(hashes.tolist()) for sid, hashes in texts.items()}


@given(digits=st.lists(st.text("0123456789abcdef", min_size=32, max_size=32), max_size=5))
def test_the_leading_bits_are_those_of_the_number(digits: list[str]) -> None:
    hashes = pa.array(["f" * 32, *digits], pa.string()).slice(1)
    assert leading_bits(hashes).tolist() == [int(each[:16], 16) for each in digits]


def test_documents_without_a_text_are_not_in_the_index() -> None:
    assert text_hashes(documents(["one", "", "  ", "two"])).tolist() == [
        int(short_hash(text.encode())[:16], 16) for text in ("one", "two")
    ]


@given(shards=SHARDS, asked=st.lists(st.sampled_from([*TEXTS, "unknown"])), data=st.data())
def test_a_text_is_found_in_a_wanted_shard_that_has_it(
    shards: list[list[str]], asked: list[str], data: st.DataObject
) -> None:
    store, numbers = MemoryStore(), list(range(len(shards)))
    for number, texts in enumerate(shards):
        put(store, number, texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_index, "MAX_ENTRIES", data.draw(st.integers(1, 20)))
        # — in two runs, of which the second adds the rest
        first = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set()
        index_missing_shards(store, [sid_of(n) for n in first])
        texts = hashes_of(store, {sid_of(n) for n in numbers[::2]})
        index_missing_shards(store, [sid_of(n) for n in numbers])
    assert sorted_lists(hashes_of(store, texts.keys())) == sorted_lists(texts)
    assert sorted_lists(texts) == {
        sid_of(n): sorted(hashes_by_hand(shards[n]).tolist()) for n in numbers[::2]
    }
    covered = [sid for sids in shards_of_objects(store).values() for sid in sids]
    assert sorted(covered) == [sid_of(n) for n in numbers]
    wanted = set(data.draw(st.lists(st.sampled_from(numbers)))) if numbers else set()
    asking = data.draw(st.sampled_from([-1, *(100 + n for n in numbers)]))
    found = candidates(
        store,
        hashes_by_hand(asked),
        {sid_of(n): 100 + n for n in wanted},
        np.full(len(asked), asking, np.int32),
    )
    for text, number in zip(asked, found.tolist(), strict=True):
        having = {100 + n for n in wanted if text in shards[n]} - {asking}
        assert (number in having) if having else number == -1


def test_a_damaged_object_is_named_and_its_shards_are_added_again(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 1, ["one"])
    index_missing_shards(store, [sid_of(1)])
    (store.root / index_key(1)).write_bytes(b"PAR1 and no more")
    assert candidates(store, hashes_by_hand(["one"]), {sid_of(1): 1}, NOBODY).tolist() == [-1]
    with caplog.at_level(logging.WARNING):
        index_missing_shards(store, [sid_of(1)])
    assert index_key(1) in caplog.text and "damaged" in caplog.text
    assert candidates(store, hashes_by_hand(["one"]), {sid_of(1): 1}, NOBODY).tolist() == [1]


def test_of_old_objects_only_the_ends_are_read_to_learn_their_shards() -> None:
    store, runs = Recording(MemoryStore()), 5
    for number in range(runs):  # each run indexes one new shard
        put(store, number, [f"text {number}"])
        store.read_keys.clear()
        index_missing_shards(store, [sid_of(n) for n in range(number + 1)])
        found = hashes_of(store, {sid_of(number)})
        assert sorted_lists(found)[sid_of(number)] == hashes_by_hand([f"text {number}"]).tolist()
        assert store.read_keys == [documents_key(sid_of(number)), index_key(number + 1)]
    shards = shards_of_objects(store)
    assert shards == {index_key(n + 1): frozenset([sid_of(n)]) for n in range(runs)}


@pytest.mark.parametrize("size", [16, 100_000])
def test_the_end_of_an_object_has_its_shards_however_many_these_are(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.ledger.label_files.FOOTER_BYTES", size)
    store = Recording(MemoryStore())
    for number in range(200):
        put(store, number, ["one"])
    index_missing_shards(store, map(sid_of, range(200)))
    assert shards_of_objects(store) == {index_key(1): frozenset(map(sid_of, range(200)))}
    assert len(store.ends_read) == 1 + (size == 16)


def test_two_runs_that_add_objects_at_once_lose_none(store: LocalStore) -> None:
    put(store, 1, ["one"])
    put(store, 2, ["two"])
    index_missing_shards(store, [sid_of(1)])
    blind = Recording(store)
    blind.list = lambda _prefix: iter(())  # does not show yet what another run has created
    index_missing_shards(blind, [sid_of(2)])
    numbers = {sid_of(1): 1, sid_of(2): 2}
    assert candidates(
        store, hashes_by_hand(["one", "two"]), numbers, NOBODY.repeat(2)
    ).tolist() == [1, 2]


def test_the_key_of_an_object_is_known() -> None:
    key = parse_key(index_key(7))
    assert key is not None and (key.folder, key.number) == ("index/", 7)
