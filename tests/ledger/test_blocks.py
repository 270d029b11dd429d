"""Blocks of the graph: what one stage writes, the next one reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from label_tables import label_rows, toy_shard

from pipeline.errors import StorageError, UnavailableError
from pipeline.ledger.blocks import (
    LabelCost,
    LabelledShard,
    ReadShard,
    ShardCounts,
    work_items_of,
    work_rows,
)
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.columns import only
from pipeline.ledger.keys import label_key
from pipeline.ledger.label_files import LabelFile
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.shards import Slice

COST = LabelCost(1.5, 2, 3, 4)
LABELS = ("yes", "no")
FP = "f" * 16
NAME = f"t/{FP}"  # of a version


def work(start: int = 0, rows: int = 2, sources: int = 1) -> WorkItem:
    keys = tuple(label_key("t", FP, f"{number:032x}") for number in range(sources))
    return WorkItem(
        toy_shard(start, rows), ("t",), True, sources={NAME: keys}, rows_without_answer=1
    )


def documents(rows: int = 2) -> pa.Table:
    """Every second document has no text."""
    texts = (f"text {row}" if row % 2 == 0 else "" for row in range(rows))
    return documents_from(RawRow(text, str(row)) for row, text in enumerate(texts)).drop_columns(
        ["text"]
    )


def answers(rows: int, seed: int = 0) -> pa.StructArray:
    """The rows of a label file, of which some have no answer."""
    random = np.random.default_rng(seed)
    p = random.dirichlet([1, 1], rows).astype(np.float32)
    p[random.random(rows) < 0.5] = np.nan
    return label_rows(p, LABELS, n_tokens=random.integers(0, 9, rows))


def known(rows: int) -> pa.StructArray:
    """Answers as they are reused: null without one."""
    return answers(rows).take(pa.array([row if row % 2 == 0 else None for row in range(rows)]))


def as_read(start: int = 0, rows: int = 2) -> ReadShard:
    return ReadShard(
        work=work(start, rows),
        documents=documents(rows),
        inside=np.arange(rows) % 3 != 1,
        answers={NAME: known(rows), f"other/{FP}": known(rows)},
        reused={NAME: {"e" * 32: 1}},
    )


def assert_same(read: ReadShard, written: ReadShard) -> None:
    assert (read.work, read.reused) == (written.work, written.reused)
    assert read.documents.equals(written.documents)
    assert read.inside.dtype == np.bool_ and (read.inside == written.inside).all()
    assert read.answers.keys() == written.answers.keys()
    assert all(rows.equals(written.answers[version]) for version, rows in read.answers.items())


@given(rows=st.integers(1, 9), cut=st.integers(0, 8), has_images=st.booleans())
def test_a_shard_is_read_as_it_was_written_also_from_several_chunks(
    rows: int, cut: int, has_images: bool
) -> None:
    written = as_read(rows=rows)
    if has_images:
        images = pa.array([b"png", *[None] * (rows - 1)], pa.large_binary())
        written = replace(written, documents=written.documents.append_column("image", images))
    block = written.to_table()
    chunked = pa.concat_tables([block.slice(0, cut), block.slice(cut)])
    assert_same(ReadShard.from_table(chunked), written)


@pytest.mark.parametrize("kind", [ReadShard, LabelledShard])
def test_a_block_of_two_shards_is_refused(kind: type[ReadShard | LabelledShard]) -> None:
    blocks = [
        (as_read(start) if kind is ReadShard else labelled(start)).to_table() for start in (0, 2)
    ]
    both = pa.concat_tables(blocks)
    with pytest.raises(AssertionError, match="a block holds 2 shards"):
        kind.from_table(both)


def test_the_work_item_of_a_long_shard_is_stored_once() -> None:
    """A work item with 200 sources has about 20 KB."""
    rows = 100_000
    long = as_read(rows=rows)
    few, many = (replace(long, work=work(0, rows, sources)).to_table() for sources in (0, 200))
    (row,) = work_rows([work(0, rows, 200)])
    assert len(row["work"]) > 10_000
    assert many.nbytes - few.nbytes < 2 * len(row["work"])
    assert few.nbytes < 200 * rows


def label_file(rows: int, seed: int, is_part: bool) -> LabelFile:
    """A file as a stage makes it: the other rows of a part are null."""
    own, mask = answers(rows, seed), np.random.default_rng(seed).random(rows) < 0.5
    metadata = {"task": "t", "spec": '{"question": "é"}'}
    if not is_part:
        return LabelFile("t", FP, "a" * 32, own, metadata, retry=3)
    return LabelFile("t", FP, f"{'a' * 32}.{FP}", only(own, mask), metadata)


def labelled(start: int, rows: int = 2, files: tuple[LabelFile, ...] = ()) -> LabelledShard:
    counts = ShardCounts("a" * 32, rows, {"ok": rows}, {"t": {"yes": 1}}, {"0": COST})
    return LabelledShard(work(start, rows), documents(rows), files, counts)


@given(
    rows=st.integers(1, 5),
    kinds=st.lists(st.booleans(), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_labelled_shard_is_read_as_it_was_written(
    rows: int, kinds: list[bool], seed: int
) -> None:
    files = tuple(label_file(rows, seed + n, is_part) for n, is_part in enumerate(kinds))
    written = labelled(0, rows, files)
    read = LabelledShard.from_table(written.to_table())
    assert (read.work, read.counts) == (written.work, written.counts)
    assert read.documents.equals(written.documents) and len(read.files) == len(files)
    for file, original in zip(read.files, files, strict=True):
        assert file.rows.equals(original.rows)
        assert replace(file, rows=None) == replace(original, rows=None)


@pytest.mark.parametrize("part", [None, Slice(sample="0.5", where="year > 2020")])
def test_work_items_are_read_as_they_were_written(part: Slice | None) -> None:
    items = [
        replace(work(0, sources=3), shard=replace(toy_shard(0, 2), slice=part)),
        replace(work(2), retry=3, documents=False),
        WorkItem(toy_shard(4, 2), (), documents=True),
    ]
    rows = work_rows(items)
    assert list(work_items_of(pa.Table.from_pylist(rows))) == items
    assert [list(work_items_of(pa.Table.from_pylist([row]))) for row in rows] == [
        [item] for item in items
    ]


def test_counts_are_read_as_they_were_written() -> None:
    counts = ShardCounts(
        sid="a",
        rows=2,
        status={"ok": 2},
        labels={"t": {"yes": 1}},
        costs={"0": COST, "2": LabelCost()},
        stages={"t": {"1": 2}},
        reused=1,
    )
    (row,) = counts.to_table().to_pylist()
    assert ShardCounts.from_row(row) == counts
    assert ShardCounts.are_in(counts.to_table()) and not ShardCounts.are_in(labelled(0).to_table())


@pytest.mark.parametrize("stage", ["work", "tokenised", "labelled"])
@pytest.mark.parametrize("kind", [StorageError, UnavailableError])
def test_a_stage_that_failed_names_the_shard_once(stage: str, kind: type[StorageError]) -> None:
    block = {
        "work": pa.Table.from_pylist(work_rows([work(2)])),
        "tokenised": as_read(2).to_table(),
        "labelled": labelled(2).to_table(),
    }[stage]
    counts = ShardCounts.of_failed(block, kind("/a.jsonl: rows 2 to 4: is gone\nTraceback"))
    assert counts.error == "/a.jsonl: rows 2 to 4: is gone"
    assert (counts.sid, counts.rows, counts.labels) == (toy_shard(2, 2).id, 0, {"t": {}})
    assert counts.unavailable == (kind is UnavailableError)
