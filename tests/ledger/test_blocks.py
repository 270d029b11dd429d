"""Blocks of the graph: what one stage writes, the next one reads."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StorageError
from pipeline.ledger.blocks import (
    LabelCost,
    LabelledDocuments,
    LabelledShard,
    ShardCounts,
    TaskScores,
    TokenisedShard,
    work_items_of,
    work_rows,
)
from pipeline.ledger.cells import ReusableShard, WorkItem
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.shards import ObjectVersion, Piece, Shard

VERSION = ObjectVersion("/a.jsonl", 10, "etag", "jsonl", "text", None)
COST = LabelCost(1.5, 2, 3, 4, 5)
KNOWN = pa.array([{"label": "yes", "n_chunks": 1}, None])
SOURCES = pa.array(["f" * 32, None])


def shard(start: int) -> Shard:
    return Shard(VERSION, Piece(start, start + 2, 8, 0, 10))


def documents() -> pa.Table:
    return documents_from([RawRow("one", "a"), RawRow("", "b")]).drop_columns(["text"])


def tokenised(start: int = 0) -> TokenisedShard:
    work = WorkItem(shard(start), ("t",), documents=True, retry=3, texts=bytes(range(16)))
    chunks = pa.array([[[1, 2], [3]], []], pa.list_(pa.list_(pa.int32())))
    return TokenisedShard(work, documents(), chunks, ["ok", "empty"], {"t": KNOWN}, SOURCES)


def test_a_tokenised_shard_is_read_as_it_was_written() -> None:
    written = tokenised()
    read = TokenisedShard.from_table(written.to_table())
    assert read.work == written.work and read.status == written.status
    assert read.documents.equals(written.documents) and read.chunks.equals(written.chunks)
    assert set(read.known) == {"t"} and read.known["t"].equals(KNOWN)
    assert read.sources.equals(SOURCES)


def test_a_block_of_two_shards_is_refused() -> None:
    both = pa.concat_tables([tokenised(0).to_table(), tokenised(2).to_table()])
    with pytest.raises(StorageError, match="a block holds 2 shards instead of one"):
        TokenisedShard.from_table(both)


@given(
    kept=st.integers(1, 5),
    ranked=st.booleans(),
    levels=st.none() | st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_labelled_shard_is_read_as_it_was_written(
    kept: int, ranked: bool, levels: int | None, seed: int
) -> None:
    random = np.random.default_rng(seed)
    log_probs = random.normal(size=(2, kept)).astype(np.float32)
    log_probs[1] = np.nan  # without an answer
    scores = TaskScores(
        log_probs=log_probs,
        log_mass=log_probs[:, 0].copy(),
        label_ids=random.integers(0, 9, (2, kept), np.int32) if ranked else None,
        levels=None if levels is None else random.normal(size=(2, levels)).astype(np.float32),
    )
    counts = np.array([3, 0])
    labelled = LabelledDocuments(
        documents(),
        counts.astype(np.int32),
        counts.astype(np.int16),
        ["ok", "empty"],
        {"t": scores},
    )
    written = LabelledShard(tokenised().work, labelled, {"t": KNOWN}, SOURCES, COST)
    read = LabelledShard.from_table(written.to_table())
    assert read.work == written.work and read.cost == COST
    assert read.taken_over == written.taken_over == {"f" * 32: 1}
    assert read.labelled.documents.equals(labelled.documents)
    assert read.labelled.status == labelled.status and read.known["t"].equals(KNOWN)
    for name in ("n_tokens", "n_chunks"):
        column, original = getattr(read.labelled, name), getattr(labelled, name)
        assert column.dtype == original.dtype and (column == original).all()
    for name in ("log_probs", "log_mass", "label_ids", "levels"):
        column, original = getattr(read.labelled.scores["t"], name), getattr(scores, name)
        assert (column is None) == (original is None)
        if original is not None:
            assert column.dtype == original.dtype
            np.testing.assert_array_equal(column, original)


def test_work_items_of_one_path_share_their_reusable_shards() -> None:
    reuse = (ReusableShard("a" * 32, {"t": "labels/a"}),)
    items = [
        WorkItem(shard(0), ("t",), documents=True, reuse=reuse),
        WorkItem(shard(2), ("t",), documents=True, reuse=reuse),
        WorkItem(shard(4), (), documents=True),
    ]
    rows, lists = work_rows(items)
    assert len(lists) == 2
    assert list(work_items_of(pa.Table.from_pylist(rows), lists)) == items


def test_counts_are_read_as_they_were_written() -> None:
    counts = ShardCounts("a", 2, 3, {"ok": 2}, {"t": {"yes": 1}}, COST)
    (row,) = counts.to_table().to_pylist()
    assert ShardCounts.from_row(row) == counts
