"""Label files: their rows, an independent reader, and a commit that is whole or nothing."""

from __future__ import annotations

import json
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from label_tables import label_rows, toy_shard
from memory_store import Recording

from pipeline.errors import StorageError
from pipeline.ledger.columns import only
from pipeline.ledger.keys import documents_key, label_key
from pipeline.ledger.label_files import (
    LabelFile,
    commit_shard,
    documents_table,
    sealed_hash,
    to_parquet,
    verify,
)
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.shards import Shard
from pipeline.stores.local import LocalStore

LABELS = ("toxic", "clean", "it's other")
SHARD = toy_shard()
DOCUMENTS = documents_from([RawRow("one", "a"), RawRow("", "b"), RawRow("three", "c")])
SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("label", pa.dictionary(pa.int32(), pa.string())),
        ("p", pa.struct([(label, pa.float32()) for label in LABELS])),
        ("mass", pa.float32()),
        ("margin", pa.float32()),
        ("n_tokens", pa.int32()),
        ("n_chunks", pa.int16()),
        ("status", pa.dictionary(pa.int32(), pa.string())),
    ]
)


def toy_rows() -> pa.StructArray:
    no_values = [np.nan] * 3
    return label_rows(
        p=np.array([[0.125, 0.25, 0.625], no_values, [0.75, 0.25, 0.0]], np.float32),
        mass=np.array([0.5, np.nan, np.nan], np.float32),
        n_tokens=np.array([7, 0, 9]),
        n_chunks=np.array([1, 0, 2]),
        status=["ok", "empty", "truncated"],
        labels=LABELS,
    )


def label_file(task: str, rows: pa.StructArray | None = None, cell: str = SHARD.id) -> LabelFile:
    metadata = {"task": '{"question": "?"}', "fp": "f" * 16}
    return LabelFile(task, "f" * 16, cell, toy_rows() if rows is None else rows, metadata)


def test_the_best_label_its_probabilities_and_its_margin_are_kept() -> None:
    first, none, last = ([*row.values()] for row in toy_rows().to_pylist())
    p = {"toxic": 0.125, "clean": 0.25, "it's other": 0.625}
    assert first == ["it's other", p, 0.5, 0.375, 7, 1, "ok"]
    assert none == [None, None, None, None, 0, 0, "empty"]
    p = {"toxic": 0.75, "clean": 0.25, "it's other": 0.0}
    assert last == ["toxic", p, None, 0.5, 9, 2, "truncated"]


@pytest.mark.parametrize("docs", [0, 4])
def test_rows_without_an_answer_have_the_same_columns(docs: int) -> None:
    rows = label_rows(np.full((docs, 3), np.nan, np.float32), LABELS)
    assert rows.type == toy_rows().type
    assert rows.field("label").null_count == rows.field("p").null_count == docs


@given(st.lists(st.lists(st.floats(1e-6, 1), min_size=3, max_size=3), min_size=1, max_size=9))
def test_the_label_is_the_most_probable_one_and_the_margin_its_lead(
    weights: list[list[float]],
) -> None:
    p = np.array(weights) / np.sum(weights, axis=1, keepdims=True)
    p32 = p.astype(np.float32)
    for row, values in zip(label_rows(p32, LABELS).to_pylist(), p32, strict=True):
        assert list(row["p"].values()) == values.tolist()
        first, second, _ = sorted(values, reverse=True)
        assert row["p"][row["label"]] == first and row["margin"] == first - second


def test_probabilities_that_do_not_sum_to_one_are_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        label_rows(np.array([[0.5, 0.25]], np.float32), ("yes", "no"))


TABLE = pa.table({"doc_id": ["a", "b", "c"], "label": pa.array(["x", None, "x"])})


def test_the_same_table_is_the_same_file_and_it_keeps_types_and_metadata() -> None:
    data = to_parquet(TABLE, {"fp": "abc", "task": '{"labels": ["é"]}'})
    assert data == to_parquet(TABLE, {"fp": "abc", "task": '{"labels": ["é"]}'})
    read = pq.read_table(pa.BufferReader(data))
    assert read.equals(TABLE)
    metadata = pq.read_metadata(pa.BufferReader(data)).metadata
    assert metadata[b"assay.fp"] == b"abc"
    assert json.loads(metadata[b"assay.task"]) == {"labels": ["é"]}


def test_a_file_that_cannot_be_read_back_or_has_other_rows_than_the_shard_is_noticed() -> None:
    data = to_parquet(TABLE, {})
    verify(data, DOCUMENTS.column("doc_id"))
    with pytest.raises(StorageError, match="cannot be read back"):
        verify(data[:-10], DOCUMENTS.column("doc_id"))
    for doc_ids in (["a", "c", "b"], ["a", "b"], ["a", "b", "c", "d"], []):
        with pytest.raises(StorageError, match="3 rows, which are not the"):
            verify(data, pa.chunked_array([pa.array(doc_ids, pa.string())]))


def test_a_commit_makes_the_documents_and_one_file_a_task(store: LocalStore) -> None:
    files = [label_file("toxic"), label_file("topic")]
    written = commit_shard(store, SHARD, DOCUMENTS, files)
    made = [file.key for file in written]
    assert made == [
        documents_key(SHARD.id),
        label_key("toxic", "f" * 16, SHARD.id),
        label_key("topic", "f" * 16, SHARD.id),
    ]
    assert {stored.key for stored in store.list("")} == set(made)
    documents = pq.read_table(pa.BufferReader(store.read(made[0])))
    assert documents.equals(documents_table(DOCUMENTS))
    assert documents.column_names == ["doc_id", "content_hash", "n_chars", "status"]
    metadata = pq.read_metadata(pa.BufferReader(store.read(made[1]))).metadata
    assert Shard.from_json(json.loads(metadata[b"assay.shard"])) == SHARD
    labels = pq.read_table(pa.BufferReader(store.read(made[1])))
    assert labels.schema.remove_metadata() == SCHEMA
    assert labels.drop_columns(["doc_id"]).to_pylist() == toy_rows().to_pylist()
    assert json.loads(metadata[b"assay.task"]) == {"question": "?"}
    assert metadata[b"assay.hash"] == f"assay-sha256:{written[1].hash}".encode()
    assert metadata[b"assay.key"] == made[1].encode()


@pytest.mark.parametrize("text", ["assay-sha256:", "assay-sha256:" + "0" * 16, "assay.hash"])
def test_the_hash_of_a_file_is_that_of_the_file_with_zeros_whatever_words_are_in_it(
    text: str,
) -> None:
    table = pa.table({"doc_id": [text], text: [{text: 0.5}]})
    data = to_parquet(table, {"spec": text})
    digits = sealed_hash(data)
    assert digits is not None and data.count(digits.encode()) == 1
    zeros = data.replace(digits.encode(), b"0" * len(digits))
    assert sha256(zeros).hexdigest().startswith(digits)
    assert pq.read_table(pa.BufferReader(data)).equals(table)


@given(st.data())
def test_a_file_with_any_bit_flipped_or_any_end_cut_off_is_noticed(data: st.DataObject) -> None:
    file = to_parquet(TABLE, {"fp": "abc"})
    at, bit = data.draw(st.integers(0, len(file) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(file)
    flipped[at] ^= 1 << bit
    assert sealed_hash(bytes(flipped)) is None
    assert sealed_hash(file[:at]) is None and sealed_hash(file[at + 1 :]) is None
    assert sealed_hash(file) is not None


def test_the_first_writers_file_stays(store: LocalStore) -> None:
    commit_shard(store, SHARD, DOCUMENTS, [label_file("toxic")])
    before = {stored.key: store.read(stored.key) for stored in store.list("")}
    files = [label_file("toxic", toy_rows().take([2, 1, 0])), label_file("topic")]
    made = commit_shard(store, SHARD, DOCUMENTS, files)
    assert [file.key for file in made] == [label_key("topic", "f" * 16, SHARD.id)]
    assert {key: store.read(key) for key in before} == before


def test_a_commit_creates_each_file_once_reads_none_and_refuses_other_documents(
    store: LocalStore,
) -> None:
    recording = Recording(store)
    commit_shard(recording, SHARD, DOCUMENTS, [label_file("a")])
    commit_shard(recording, SHARD, DOCUMENTS, [label_file("b")], has_documents=True)
    keys = [documents_key(SHARD.id), *(label_key(t, "f" * 16, SHARD.id) for t in ("a", "b"))]
    assert recording.created == keys and not recording.read_keys and not recording.listed
    # — the input is read in another order now: rows and labels agree, and the file has others
    order = [0, 2, 1]
    other = [label_file("late", toy_rows().take(order))]
    with pytest.raises(StorageError, match=f"{SHARD.id}.parquet: has other documents than"):
        commit_shard(store, SHARD, DOCUMENTS.take(order), other)
    assert {stored.key for stored in store.list("")} == {*keys}


@pytest.mark.parametrize(
    ("shard", "bad"),
    [
        (SHARD, toy_rows().slice(0, 2)),
        (SHARD, only(toy_rows(), np.array([True, True, False]))),
        (toy_shard(rows=4), toy_rows()),
    ],
    ids=["a row less", "a row without values", "a shard of more rows"],
)
def test_one_bad_file_and_nothing_is_committed(
    store: LocalStore, shard: Shard, bad: pa.StructArray
) -> None:
    files = [label_file("toxic"), label_file("topic", bad)]
    with pytest.raises(StorageError, match="nothing was committed"):
        commit_shard(store, shard, DOCUMENTS, files)
    assert list(store.list("")) == []
