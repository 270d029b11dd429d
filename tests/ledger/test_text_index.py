"""The index of texts: where a text is found, against a dictionary; damage costs time only."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import pyarrow as pa
import pytest
from finished import small_files
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore, Recording

from pipeline.errors import StorageError
from pipeline.hashes import short_hash
from pipeline.ledger import text_index
from pipeline.ledger.keys import documents_key, index_key
from pipeline.ledger.label_files import documents_table, to_parquet
from pipeline.ledger.text_index import KnownTexts, leading_bits, shards_with_texts, text_hashes
from pipeline.sources.documents import RawRow, documents_from
from pipeline.stores.local import LocalStore
from pipeline.stores.store import Store

TEXTS = [f"text {number}" for number in range(12)]
SHARDS = st.lists(st.lists(st.sampled_from(TEXTS), max_size=8), max_size=6)


def sid_of(number: int) -> str:
    return f"{number:032x}"


def documents(texts: list[str]) -> pa.Table:
    return documents_from(RawRow(text) for text in texts)


def put(store: Store, number: int, texts: list[str]) -> None:
    store.create(documents_key(sid_of(number)), to_parquet(documents_table(documents(texts)), {}))


@given(digits=st.lists(st.text("0123456789abcdef", min_size=32, max_size=32), max_size=5))
def test_the_leading_bits_are_those_of_the_number(digits: list[str]) -> None:
    hashes = pa.array(["f" * 32, *digits], pa.string()).slice(1)
    assert leading_bits(hashes).tolist() == [int(each[:16], 16) for each in digits]


def test_documents_without_a_text_are_not_in_the_index() -> None:
    assert text_hashes(documents(["one", "", "  ", "two"])).tolist() == [
        int(short_hash(text.encode())[:16], 16) for text in ("one", "two")
    ]


def find(
    store: Store, asking: Mapping[int, list[str]], sources: Collection[int], *, keep: bool = True
) -> dict[str, KnownTexts]:
    """Where the texts of these new shards are."""
    texts = [(sid_of(number), text_hashes(documents(each))) for number, each in asking.items()]
    return shards_with_texts(store, texts, [sid_of(n) for n in sources], keep=keep)


@given(shards=SHARDS, data=st.data(), keep=st.booleans())
def test_each_text_is_found_in_one_other_shard_with_answers_that_has_it(
    shards: list[list[str]], data: st.DataObject, keep: bool
) -> None:
    store, numbers = Recording(MemoryStore()), list(range(len(shards)))
    asking = data.draw(st.sets(st.sampled_from(numbers)) if numbers else st.just(set()))
    sources = [number for number in numbers if number not in asking]
    for number, texts in enumerate(shards):
        put(store, number, texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_index, "MAX_ENTRIES", data.draw(st.integers(1, 20)))
        find(store, {99: ["text 0"]}, sources[::2])  # — an earlier run has added some
        store.read_keys.clear()
        known_texts = find(store, {number: shards[number] for number in asking}, sources, keep=keep)
    asks = any(shards[number] for number in asking)
    lacking = [n for n in sources if asks and n not in sources[::2]]
    assert asks or not store.read_keys  # — nothing is read for nothing
    read = [key for key in store.read_keys if key.startswith("documents/")]
    assert sorted(read) == [documents_key(sid_of(n)) for n in lacking]
    assert known_texts.keys() == {sid_of(n) for n in asking if shards[n]}
    for number in (n for n in asking if shards[n]):
        known, texts = known_texts[sid_of(number)], {*shards[number]}
        others = {sid_of(n): {*shards[n]} & texts for n in sources}
        assert known.texts == len(texts)
        counts = [*known.sources.values()]
        assert counts == sorted(counts, reverse=True)
        assert all(0 < count <= len(others[sid]) for sid, count in known.sources.items())
        assert sum(counts) == len(set[str]().union(*others.values()))


@pytest.mark.parametrize("data", [b"PAR1 and no more", to_parquet(pa.table({"hash": [1]}), {})])
def test_a_damaged_object_is_named_and_its_shards_are_added_again(
    data: bytes, store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (0, 1):
        put(store, number, ["one"])
        find(store, {9: ["one"]}, [number])
    (store.root / index_key(2)).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        known_texts = find(store, {9: ["one"]}, [1])
    assert known_texts[sid_of(9)].sources == {sid_of(1): 1}
    assert index_key(2) in caplog.text and "damaged" in caplog.text
    assert [*store.list("index/")][-1].key == index_key(3)


def test_a_disk_without_space_for_the_join_is_one_line() -> None:
    with small_files(), pytest.raises(StorageError, match=r"compared: .* set TMPDIR") as raised:
        shards_with_texts(MemoryStore(), [], [])
    assert "\n" not in str(raised.value)


def test_two_runs_that_add_objects_at_once_lose_none(store: LocalStore) -> None:
    put(store, 1, ["one"])
    put(store, 2, ["two"])
    find(store, {9: ["one"]}, [1])
    blind = Recording(store)
    blind.list = lambda _prefix: iter(())  # does not show yet what another run has created
    find(blind, {9: ["one"]}, [2])
    recording = Recording(store)
    known_texts = find(recording, {9: ["one", "two"]}, [1, 2])
    assert known_texts[sid_of(9)].sources == {sid_of(1): 1, sid_of(2): 1}
    assert recording.read_keys == [index_key(1), index_key(2)]
