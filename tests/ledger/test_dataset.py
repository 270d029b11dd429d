"""The wide dataset: what DuckDB makes of it equals a join of the raw files by hand."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from finished import (
    FILES,
    LABELS,
    ROWS,
    Corpus,
    finish,
    read_parquet,
    rewrite,
    sealed_parquet,
    toy_fingerprints,
    write_files,
    write_snapshot,
)
from memory_store import Recording
from servers import Server

from pipeline.errors import SpecError, StorageError
from pipeline.ledger.dataset import LabelDataset, open_labels
from pipeline.ledger.label_files import sealed_hash
from pipeline.ledger.rows import DOCUMENT_SCHEMA, aligned_batches, read_shard
from pipeline.ledger.snapshots import contents
from pipeline.spec.stages import DOCUMENT_COLUMNS
from pipeline.stores.local import LocalStore
from pipeline.stores.store import open_store

FP = {task: fingerprint.id for task, fingerprint in toy_fingerprints().items()}


def joined(store: LocalStore) -> list[dict[str, Any]]:
    """The rows of the output, put together by doc_id from the raw files with DuckDB."""
    answers = "struct_pack(label := {t}.label::varchar, p := {t}.p, mass := {t}.mass, margin := "
    answers += "{t}.margin, n_tokens := {t}.n_tokens, n_chunks := {t}.n_chunks, "
    answers += "status := {t}.status::varchar) as {t}"
    wide = ", ".join(answers.format(t=task) for task in LABELS)
    joins = " ".join(
        f"join '{store.root}/labels/{task}/*/*/*.parquet' as {task} using (doc_id)"
        for task in LABELS
    )
    documents = f"'{store.root}/documents/*.parquet' as d"
    return (
        duckdb.sql(
            f"select doc_id, split_part(doc_id, '-', 2)::bigint as row, d.content_hash, d.n_chars, "
            f"d.status::varchar as status, {wide} from {documents} {joins} "
            "order by split_part(doc_id, '-', 1)::int, row"
        )
        .to_arrow_table()
        .to_pylist()
    )


def sole(store: LocalStore, prefix: str) -> str:
    return next(iter(store.list(prefix))).key


def test_the_table_is_the_join_of_the_raw_files(finished: LocalStore, toy_corpus: Corpus) -> None:
    table = open_labels(str(finished.root)).to_table()
    assert table.schema.names == [*DOCUMENT_COLUMNS, *sorted(LABELS)]
    rows = table.to_pylist()
    paths = [row.pop("path") for row in rows]
    assert rows == joined(finished)
    assert paths == [
        str(toy_corpus.folder / f"{n}.jsonl") for n in range(FILES) for _ in range(ROWS)
    ]
    assert rows[7]["toxic"]["label"] is None and rows[7]["topic"]["p"] is None
    assert not any(pa.types.is_dictionary(field.type) for field in table.schema.field("toxic").type)
    shards = toy_corpus.shards(finished)
    assert len(shards) > 6 and any(shard.piece.start_row for shard in shards)


EVERY = set(LABELS)


@pytest.mark.parametrize(
    ("columns", "filter", "tasks"),
    [
        (["doc_id", "row"], None, set()),
        ([], None, set()),
        (["toxic"], None, {"toxic"}),
        (["toxic.label", "doc_id"], None, {"toxic"}),
        (["topic.margin"], None, {"topic"}),
        (None, None, EVERY),
        # — a filter may read columns that are not shown
        (["doc_id"], pc.field("toxic", "mass") > 0.5, EVERY),
        (None, pc.field("n_chars") > 5, EVERY),
        ([], (pc.field("toxic", "label") == "clean") & pc.field("topic", "p").is_valid(), EVERY),
    ],
)
def test_columns_and_a_filter_are_those_of_arrow_and_only_files_of_the_columns_are_read(
    finished: LocalStore, columns: list[str] | None, filter: pc.Expression | None, tasks: set[str]
) -> None:
    recording = Recording(finished)
    labels = LabelDataset(recording, contents(finished), tuple(LABELS))
    rows = labels.to_table(columns=columns, filter=filter)
    read = {key.split("/")[1] for key in recording.read_keys if key.startswith("labels/")}
    assert read == tasks
    oracle = ds.dataset(labels.to_table()).to_table(columns=columns, filter=filter)
    assert rows.num_rows == oracle.num_rows > 0 and rows.equals(oracle)


@pytest.mark.parametrize(("files", "rows", "ahead"), [(6, 10**6, 3), (32, 1, 1)])
def test_rows_are_read_as_they_are_needed_and_counted_without_reading(
    files: int, rows: int, ahead: int, finished: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.ledger.rows.FILES_AHEAD", files)
    monkeypatch.setattr("pipeline.ledger.rows.ROWS_AHEAD", rows)
    recording = Recording(finished)
    labels = LabelDataset(recording, contents(finished), tuple(LABELS))
    assert labels.count_rows() == ROWS * FILES and labels.schema and recording.read_keys == []
    assert labels.snapshot == 1
    stream = pa.RecordBatchReader.from_stream(labels)
    assert stream.schema == labels.schema and recording.read_keys == []
    first = stream.read_next_batch()
    shards = {key for key in recording.read_keys if key.startswith("documents/")}
    assert len(shards) <= ahead < len(contents(finished).shards)
    assert first.to_pylist() == labels.to_table().slice(0, first.num_rows).to_pylist()


class Meeting(Recording):
    """A store that replies to the first N reads only when all of them have begun."""

    def __init__(self, store: LocalStore, reads: int) -> None:
        super().__init__(store)
        self._left, self._barrier, self._lock = reads, threading.Barrier(reads), threading.Lock()

    def read(self, key: str) -> bytes:
        with self._lock:
            waits, self._left = self._left > 0, self._left - 1
        if waits:
            self._barrier.wait(timeout=60)
        return super().read(key)


def test_files_of_several_shards_are_read_at_once_and_come_in_order(finished: LocalStore) -> None:
    shown, width = contents(finished), 1 + len(LABELS)
    labels = LabelDataset(Meeting(finished, 4 * width), shown, tuple(LABELS))
    rows = labels.to_table()
    assert rows.equals(open_labels(str(finished.root), [*LABELS]).to_table())
    # — also of one shard, as a filter and an export read them
    schema = labels.schema
    one = read_shard(Meeting(finished, width), [*shown.shards][2], schema=schema, tasks=[*LABELS])
    assert one.equals(list(aligned_batches(finished, shown, schema))[2])


def test_a_stream_is_read_any_number_of_times(finished: LocalStore) -> None:
    labels = open_labels(finished.root, ["topic"], snapshot=1)
    assert labels.schema.names == [*DOCUMENT_COLUMNS, "topic"] == [*DOCUMENT_SCHEMA.names, "topic"]
    assert re.fullmatch(r"<LabelDataset: topic; \d+ documents of .*>", repr(labels))
    assert pa.table(labels).equals(labels.to_table()) and pa.table(labels).equals(pa.table(labels))
    rows = duckdb.sql(
        "select a.doc_id, a.topic.label from labels a join labels b using (doc_id) order by all"
    )
    files = f"'{finished.root}/labels/topic/*/*/*.parquet'"
    raw = duckdb.sql(f"select doc_id, label::varchar from {files} order by all").fetchall()
    assert rows.fetchall() == rows.fetchall() == raw and len(raw) == ROWS * FILES


def test_an_older_snapshot_stays_readable(finished: LocalStore, toy_corpus: Corpus) -> None:
    before = open_labels(str(finished.root)).to_table()
    toy_corpus.write_file(1, seed=9)
    assert finish(finished, toy_corpus.shards(finished), toy_fingerprints("2")) == 2
    assert open_labels(str(finished.root), snapshot=1).to_table().equals(before)
    assert not open_labels(str(finished.root)).to_table().equals(before)


def test_what_is_not_there_is_named(finished: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"tasks: snapshot 1 of .* it has: topic, toxic \(got 'x'"):
        open_labels(str(finished.root), ["x"])
    with pytest.raises(StorageError, match="has no snapshot yet; `assay run`"):
        open_labels(str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match=r"00000007\.json: cannot be read"):
        open_labels(str(finished.root), snapshot=7)
    write_snapshot(finished, {"number": 1})
    with pytest.raises(StorageError, match="is not a snapshot: KeyError"):
        open_labels(str(finished.root))


def test_answers_in_another_order_are_refused_though_their_hash_is_the_snapshots(
    finished: LocalStore,
) -> None:
    key = sole(finished, "labels/toxic/")
    table = read_parquet(finished, key)
    data = sealed_parquet(table.take(list(range(table.num_rows))[::-1]))
    rewrite(finished, key, data)
    write_files(finished, lambda f: sealed_hash(data) if f["key"] == key else f["hash"])
    labels = open_labels(str(finished.root))
    with pytest.raises(StorageError, match=f"{key}: its doc_id are not those"):
        labels.to_table()
    with pytest.raises(duckdb.Error, match="its doc_id are not those"):
        duckdb.sql("select max(toxic.margin) from labels").fetchall()
    assert labels.to_table(columns=["topic"]).num_rows == ROWS * FILES


def test_a_bucket_is_read_with_the_users_options(moto: Server, toy_corpus: Corpus) -> None:
    url = moto.new_url()
    store = open_store(url, moto.options)
    finish(store, toy_corpus.shards(store), toy_fingerprints())
    labels = open_labels(url, storage_options=moto.options)
    counted = duckdb.sql("select count(distinct doc_id), count(toxic.label) from labels")
    assert labels.snapshot == 1 and counted.fetchall() == [(ROWS * FILES, (ROWS - 1) * FILES)]


FLAT = ["doc_id", "toxic", "toxic_p_toxic", "topic", "topic_p_law", "topic_margin"]


def flat_oracle(store: LocalStore) -> list[tuple[Any, ...]]:
    files = {task: f"'{store.root}/labels/{task}/*/*/*.parquet'" for task in LABELS}
    return duckdb.sql(
        f"select doc_id, t.label::varchar, t.p.toxic, o.label::varchar, o.p.law, o.margin "
        f"from {files['toxic']} t join {files['topic']} o using (doc_id) order by doc_id"
    ).fetchall()


def test_pandas_has_flat_columns(finished: LocalStore) -> None:
    frame = open_labels(str(finished.root)).to_pandas().sort_values("doc_id")
    rows = [tuple(row) for row in frame[FLAT].itertuples(index=False)]
    actual = [tuple(None if value != value else value for value in row) for row in rows]
    assert actual == flat_oracle(finished) and len(actual) == ROWS * FILES
    long = open_labels(str(finished.root)).to_pandas(["doc_id", "toxic"], pc.field("n_chars") > 5)
    assert list(long.columns)[:3] == ["doc_id", "toxic", "toxic_p_toxic"]
    assert len(long) == (ROWS - 1) * FILES and "topic" not in long


def test_polars_has_flat_columns_or_structs(finished: LocalStore) -> None:
    polars = pytest.importorskip("polars")
    labels = open_labels(str(finished.root))
    frame = labels.to_polars().sort("doc_id")
    assert frame.select(FLAT).rows() == flat_oracle(finished)
    structs = polars.DataFrame(labels).sort("doc_id")
    margins = structs["topic"].struct.field("margin").to_list()
    assert margins == frame["topic_margin"].to_list()


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_missing_package_is_named_with_its_extra(
    finished: LocalStore, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(SpecError, match=rf"^to_{package}: needs .*pip install .*\[frames\]"):
        getattr(open_labels(str(finished.root)), f"to_{package}")()


@pytest.mark.parametrize(
    ("columns", "filter"), [(None, None), (["toxic.label"], pc.field("n_chars") > 20)]
)
def test_files_are_read_in_the_thread_that_asks_for_rows(
    finished: LocalStore,
    columns: list[str] | None,
    filter: pc.Expression | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of Arrow that calls Python while the process ends aborts it."""
    threads = set()

    def read(*args: Any) -> Iterator[pa.RecordBatch]:
        for batch in aligned_batches(*args):
            threads.add(threading.get_ident())
            yield batch
        raise StorageError("the last file cannot be read")

    monkeypatch.setattr("pipeline.ledger.dataset.aligned_batches", read)
    labels = open_labels(finished.url)
    with pytest.raises(StorageError, match="the last file cannot be read"):
        list(labels.to_batches(columns, filter))
    with pytest.raises(StorageError, match="the last file cannot be read"):
        labels.to_table(columns, filter)
    assert threads == {threading.get_ident()}
