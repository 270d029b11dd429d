"""Label files: their rows, an independent reader, and a commit that is whole or nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from label_tables import label_table

from pipeline.errors import StorageError
from pipeline.ledger.keys import documents_key, label_key
from pipeline.ledger.label_files import LabelFile, commit_shard, documents_table, to_parquet, verify
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.shards import ObjectVersion, Piece, Shard
from pipeline.stores.local import LocalStore

LABELS = ("toxic", "clean", "it's other")
SHARD = Shard(ObjectVersion("/a.jsonl", 10, "etag", "jsonl", "text", None), Piece(0, 3, 8, 0, 10))
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


def toy_table(doc_ids: object = DOCUMENTS.column("doc_id")) -> pa.Table:
    nothing = [np.nan] * 3
    return label_table(
        doc_ids,
        p=np.array([[0.125, 0.25, 0.625], nothing, [0.75, 0.25, 0.0]], np.float32),
        mass=np.array([0.5, np.nan, np.nan], np.float32),
        n_tokens=np.array([7, 0, 9]),
        n_chunks=np.array([1, 0, 2]),
        status=["ok", "empty", "truncated"],
        labels=LABELS,
    )


def label_file(task: str, table: pa.Table) -> LabelFile:
    return LabelFile(task, "f" * 8, table, {"task": '{"question": "?"}', "fp": "f" * 8})


def test_the_best_label_its_probabilities_and_its_margin_are_kept() -> None:
    table = toy_table()
    assert table.schema == SCHEMA
    assert table.to_pylist() == [
        {
            "doc_id": "a",
            "label": "it's other",
            "p": {"toxic": 0.125, "clean": 0.25, "it's other": 0.625},
            "mass": 0.5,
            "margin": 0.375,
            "n_tokens": 7,
            "n_chunks": 1,
            "status": "ok",
        },
        {
            "doc_id": "b",
            "label": None,
            "p": None,
            "mass": None,
            "margin": None,
            "n_tokens": 0,
            "n_chunks": 0,
            "status": "empty",
        },
        {
            "doc_id": "c",
            "label": "toxic",
            "p": {"toxic": 0.75, "clean": 0.25, "it's other": 0.0},
            "mass": None,
            "margin": 0.5,
            "n_tokens": 9,
            "n_chunks": 2,
            "status": "truncated",
        },
    ]


@pytest.mark.parametrize("doc_ids", [["a", "b", "c"], pa.array(["a", "b", "c"])], ids=type)
def test_ids_may_be_a_list_or_an_array(doc_ids: object) -> None:
    assert toy_table(doc_ids).equals(toy_table())


def test_a_table_without_an_answer_or_without_a_row_has_the_same_columns() -> None:
    for docs in (0, 4):
        table = label_table(
            [str(doc) for doc in range(docs)],
            p=np.full((docs, 3), np.nan, np.float32),
            mass=np.full(docs, np.nan, np.float32),
            n_tokens=np.zeros(docs, np.int64),
            n_chunks=np.zeros(docs, np.int64),
            status=["empty"] * docs,
            labels=LABELS,
        )
        assert table.schema == SCHEMA
        assert table.column("label").null_count == table.column("p").null_count == docs


@given(st.lists(st.lists(st.floats(1e-6, 1), min_size=3, max_size=3), min_size=1, max_size=9))
def test_the_label_is_the_most_probable_one_and_the_margin_its_lead(
    weights: list[list[float]],
) -> None:
    p = np.array(weights) / np.sum(weights, axis=1, keepdims=True)
    rows, ones = len(p), np.ones(len(p), np.int64)
    ids, status = [str(row) for row in range(rows)], ["ok"] * rows
    p32 = p.astype(np.float32)
    table = label_table(ids, p32, ones.astype(np.float32), ones, ones, status, LABELS)
    for row, values in zip(table.to_pylist(), p32, strict=True):
        assert list(row["p"].values()) == values.tolist()
        first, second, _ = sorted(values, reverse=True)
        assert row["p"][row["label"]] == first and row["margin"] == first - second


def test_probabilities_that_do_not_sum_to_one_are_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        label_table(
            ["a"],
            p=np.array([[0.5, 0.25]], np.float32),
            mass=np.ones(1, np.float32),
            n_tokens=np.ones(1, np.int64),
            n_chunks=np.ones(1, np.int64),
            status=["ok"],
            labels=("yes", "no"),
        )


def test_the_same_table_is_the_same_file_and_it_keeps_types_and_metadata() -> None:
    data = to_parquet(toy_table(), {"fp": "abc", "task": '{"labels": ["é"]}'})
    assert data == to_parquet(toy_table(), {"fp": "abc", "task": '{"labels": ["é"]}'})
    read = pq.read_table(pa.BufferReader(data))
    assert read.equals(toy_table())
    metadata = pq.read_metadata(pa.BufferReader(data)).metadata
    assert metadata[b"assay.fp"] == b"abc"
    assert json.loads(metadata[b"assay.task"]) == {"labels": ["é"]}


@pytest.mark.parametrize("doc_ids", [["a", "c", "b"], ["a", "b"], ["a", "b", "c", "d"]])
def test_a_file_with_other_rows_than_the_shard_is_noticed(doc_ids: list[str]) -> None:
    with pytest.raises(StorageError, match=f"3 rows, which are not the {len(doc_ids)} documents"):
        verify(to_parquet(toy_table(), {}), pa.chunked_array([doc_ids]))


def test_a_file_that_cannot_be_read_back_is_noticed() -> None:
    data = to_parquet(toy_table(), {})
    verify(data, DOCUMENTS.column("doc_id"))
    with pytest.raises(StorageError, match="cannot be read back"):
        verify(data[:-10], DOCUMENTS.column("doc_id"))


def test_a_commit_makes_the_documents_and_one_file_a_task(store: LocalStore) -> None:
    files = [label_file("toxic", toy_table()), label_file("topic", toy_table())]
    made = commit_shard(store, SHARD, DOCUMENTS, files)
    assert made == [
        documents_key(SHARD.id),
        label_key("toxic", "f" * 8, SHARD.id),
        label_key("topic", "f" * 8, SHARD.id),
    ]
    assert {stored.key for stored in store.list("")} == set(made)
    documents = pq.read_table(pa.BufferReader(store.read(made[0])))
    assert documents.equals(documents_table(DOCUMENTS))
    assert documents.column_names == ["doc_id", "content_hash", "n_chars", "status"]
    metadata = pq.read_metadata(pa.BufferReader(store.read(made[1]))).metadata
    assert Shard.from_json(json.loads(metadata[b"assay.shard"])) == SHARD
    assert json.loads(metadata[b"assay.task"]) == {"question": "?"}


def test_the_first_writers_file_stands(store: LocalStore) -> None:
    commit_shard(store, SHARD, DOCUMENTS, [label_file("toxic", toy_table())])
    before = {stored.key: store.read(stored.key) for stored in store.list("")}
    other = toy_table().set_column(5, "n_tokens", pa.array([1, 1, 1], pa.int32()))
    files = [label_file("toxic", other), label_file("topic", toy_table())]
    made = commit_shard(store, SHARD, DOCUMENTS, files)
    assert made == [label_key("topic", "f" * 8, SHARD.id)]
    assert {key: store.read(key) for key in before} == before


def test_labels_are_of_the_documents_file_that_exists_and_it_is_not_created_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_shard(store, SHARD, DOCUMENTS, []) == [documents_key(SHARD.id)]
    tried: list[str] = []
    create = LocalStore.create
    monkeypatch.setattr(
        LocalStore, "create", lambda store, key, data: tried.append(key) or create(store, key, data)
    )
    tasks = [f"task{number}" for number in range(6)]
    for task in tasks:  # as work items of one shard do
        commit_shard(store, SHARD, DOCUMENTS, [label_file(task, toy_table())])
    assert tried == [label_key(task, "f" * 8, SHARD.id) for task in tasks]
    # — the input is read in another order now: rows and labels agree, and the file has others
    order = [0, 2, 1]
    other = [label_file("late", toy_table().take(order))]
    with pytest.raises(StorageError, match=f"{SHARD.id}.parquet: has other documents than"):
        commit_shard(store, SHARD, DOCUMENTS.take(order), other)
    assert tried == [label_key(task, "f" * 8, SHARD.id) for task in tasks]


@pytest.mark.parametrize(
    ("shard", "bad"),
    [
        (SHARD, toy_table().slice(0, 2)),
        (SHARD, toy_table(["a", "c", "b"])),
        (replace(SHARD, piece=Piece(0, 4, 8, 0, 10)), toy_table()),
    ],
    ids=["a row less", "another order", "a shard of more rows"],
)
def test_one_bad_file_and_nothing_is_committed(
    store: LocalStore, shard: Shard, bad: pa.Table
) -> None:
    files = [label_file("toxic", toy_table()), label_file("topic", bad)]
    with pytest.raises(StorageError, match="nothing was committed"):
        commit_shard(store, shard, DOCUMENTS, files)
    assert list(store.list("")) == []


def test_duckdb_reads_the_files_of_a_task_by_a_glob(store: LocalStore) -> None:
    for start in range(0, 12, 3):
        shard = replace(SHARD, piece=Piece(start, start + 3, 8, 0, 10))
        commit_shard(store, shard, DOCUMENTS, [label_file("toxic", toy_table())])
    labels = f"read_parquet('{store.root}/labels/toxic/*/*/*.parquet')"
    documents = f"read_parquet('{store.root}/documents/*.parquet')"
    counts = (
        f"SELECT count(*), count(label), sum(p.toxic), min(margin), max(n_tokens) FROM {labels}"
    )
    assert duckdb.sql(counts).fetchall() == [(12, 8, 3.5, 0.375, 9)]
    joined = (
        f"SELECT DISTINCT doc_id, label, n_chars FROM {labels} l JOIN {documents} d USING (doc_id)"
    )
    assert sorted(duckdb.sql(joined).fetchall()) == [
        ("a", "it's other", 3),
        ("b", None, 0),
        ("c", "toxic", 5),
    ]
