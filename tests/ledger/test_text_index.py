"""The index of texts: where a text is found, against a dictionary; damage costs time only."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore, Recording

from pipeline.hashes import short_hash
from pipeline.ledger import text_index
from pipeline.ledger.keys import documents_key, index_key
from pipeline.ledger.label_files import documents_table, to_parquet
from pipeline.ledger.text_index import (
    index_missing_shards,
    leading_bits,
    shards_of_objects,
    shards_with_texts,
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


@given(digits=st.lists(st.text("0123456789abcdef", min_size=32, max_size=32), max_size=5))
def test_the_leading_bits_are_those_of_the_number(digits: list[str]) -> None:
    hashes = pa.array(["f" * 32, *digits], pa.string()).slice(1)
    assert leading_bits(hashes).tolist() == [int(each[:16], 16) for each in digits]


def test_documents_without_a_text_are_not_in_the_index() -> None:
    assert text_hashes(documents(["one", "", "  ", "two"])).tolist() == [
        int(short_hash(text.encode())[:16], 16) for text in ("one", "two")
    ]


@given(shards=SHARDS, data=st.data(), keep=st.booleans())
def test_each_text_is_found_in_one_other_shard_with_answers_that_has_it(
    shards: list[list[str]], data: st.DataObject, keep: bool
) -> None:
    store, numbers = MemoryStore(), list(range(len(shards)))
    asking = data.draw(st.sets(st.sampled_from(numbers)) if numbers else st.just(set()))
    sources = [number for number in numbers if number not in asking]
    for number, texts in enumerate(shards):
        put(store, number, texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_index, "MAX_ENTRIES", data.draw(st.integers(1, 20)))
        # — an earlier run has added some
        index_missing_shards(store, [sid_of(n) for n in sources[::2]])
        found = shards_with_texts(
            store,
            [(sid_of(n), text_hashes(documents(shards[n]))) for n in asking],
            [sid_of(n) for n in sources],
            keep=keep,
        )
    covered = [sid for sids in shards_of_objects(store).values() for sid in sids]
    assert sorted(covered) == [sid_of(n) for n in (sources if keep else sources[::2])]
    assert found.keys() == {sid_of(n) for n in asking if shards[n]}
    for number in (n for n in asking if shards[n]):
        known, texts = found[sid_of(number)], {*shards[number]}
        others = {sid_of(n): {*shards[n]} & texts for n in sources}
        assert known.texts == len(texts)
        counts = [*known.sources.values()]
        assert counts == sorted(counts, reverse=True)
        assert all(0 < count <= len(others[sid]) for sid, count in known.sources.items())
        assert sum(counts) == len(set[str]().union(*others.values()))


def asked(store: LocalStore | MemoryStore, *numbers: int, texts: list[str]) -> dict[str, int]:
    """In which of these shards such texts are, and how many."""
    asking = [(sid_of(99), text_hashes(documents(texts)))]
    found = shards_with_texts(store, asking, [sid_of(n) for n in numbers])
    return found[sid_of(99)].sources


def test_a_damaged_object_is_named_and_its_shards_are_added_again(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (0, 1):
        put(store, number, ["one"])
        index_missing_shards(store, [sid_of(number)])
    (store.root / index_key(2)).write_bytes(b"PAR1 and no more")
    with caplog.at_level(logging.WARNING):
        assert asked(store, 1, texts=["one"]) == {sid_of(1): 1}
    assert index_key(2) in caplog.text and "damaged" in caplog.text


def test_of_objects_without_a_shard_that_is_looked_for_only_the_ends_are_read() -> None:
    store = Recording(MemoryStore())
    for number in range(5):  # each run indexes one new shard
        put(store, number, ["one"])
        store.read_keys.clear()
        index_missing_shards(store, [sid_of(n) for n in range(number + 1)])
        assert store.read_keys == [documents_key(sid_of(number))]
    store.read_keys.clear()
    assert asked(store, 3, texts=["one"]) == {sid_of(3): 1}
    assert store.read_keys == [index_key(4)]


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
    assert asked(store, 1, 2, texts=["one", "two"]) == {sid_of(1): 1, sid_of(2): 1}
