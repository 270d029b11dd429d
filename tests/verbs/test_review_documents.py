"""The documents of a review: every row has the same chance, and no more is read than needed."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from filtered import labelled, spec_of
from reviews import task_of
from scipy.stats import binom, chi2

from pipeline.filters.labelled import LabelledRows
from pipeline.ledger.cuts import load_or_cut
from pipeline.review.session import Pool
from pipeline.sources.rule import Rule
from pipeline.sources.shards import ObjectVersion, Piece, Shard
from pipeline.sources.source import find_objects
from pipeline.spec.schema import Columns
from pipeline.stores.local import LocalStore
from pipeline.verbs import review_documents
from pipeline.verbs.review_documents import Answers, Draw, Read, Reading, accepted_by, drawn

SIZES = (1, 40, 3, 3, 120, 1, 30, 2)  # rows of shards
RISK = 1e-6  # of a test that fails by chance


def shards_of(*sizes: int) -> list[Shard]:
    version = ObjectVersion("corpus.jsonl", 1, "etag", "jsonl", "text", None)
    ends = np.cumsum(sizes).tolist()
    return [
        Shard(version, Piece(end - rows, end, 1_000_000, 0, 0))
        for end, rows in zip(ends, sizes, strict=True)
    ]


def rows_of(draws: list[Draw]) -> dict[int, int]:
    """Each row of the draws, with its place in the random order."""
    return {row: rank for _, ranks in draws for row, rank in ranks.items()}


def test_the_first_document_is_each_row_with_the_same_chance() -> None:
    shards, seeds, count = shards_of(*SIZES), 4_000, 20
    first: Counter[int] = Counter()
    for seed in range(seeds):
        draws = drawn(shards, count, seed)
        ranks = rows_of(draws)
        row = min(ranks, key=ranks.__getitem__)
        assert row in draws[0][1]  # — its shard is read first
        first[row] += 1
    expected = seeds / sum(SIZES)
    statistic = sum((first[row] - expected) ** 2 / expected for row in range(sum(SIZES)))
    assert statistic < chi2.ppf(1 - RISK, sum(SIZES) - 1)


@pytest.mark.parametrize("most", [3, 100])
def test_every_row_is_drawn_with_the_same_chance_also_from_a_part_of_the_shards(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(review_documents, "LEAST_SHARDS", most)
    monkeypatch.setattr(review_documents, "MOST_BYTES", 1)
    shards, seeds, count = shards_of(*SIZES), 4_000, 20
    drawn_times: Counter[int] = Counter()
    for seed in range(seeds):
        draws = drawn(shards, count, seed)
        assert len(draws) <= most
        drawn_times.update(rows_of(draws).keys())
    # — seeds are independent, so the count of a row is binomial; half of the risk at each end
    rows = sum(SIZES)
    low, high = binom.ppf([RISK / rows / 2, 1 - RISK / rows / 2], seeds, count / rows)
    assert all(low <= drawn_times[row] <= high for row in range(rows)), drawn_times


def test_a_draw_is_stable_and_a_small_corpus_is_drawn_whole() -> None:
    shards = shards_of(*SIZES)
    assert drawn(shards, 20, 7) == drawn(shards, 20, 7) != drawn(shards, 20, 8)
    ranks = rows_of(drawn(shards, 1_000, 7))
    assert sorted(ranks) == sorted(ranks.values()) == [*range(sum(SIZES))]


@pytest.mark.parametrize("count", [1, 7, 30])
def test_as_many_rows_are_drawn_as_were_asked_for(count: int) -> None:
    shards = shards_of(*SIZES)
    assert {len(rows_of(drawn(shards, count, seed))) for seed in range(200)} == {count}


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_the_drawn_rows_are_read_and_equal_texts_once(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"text {row % 90}" for row in range(100)]
    table = pa.table({"id": [f"d{row}" for row in range(100)], "text": texts})
    if format == "parquet":
        pq.write_table(table, tmp_path / "in.parquet", row_group_size=10)
    else:
        lines = "".join(f'{{"id": "d{row}", "text": "{text}"}}\n' for row, text in enumerate(texts))
        (tmp_path / "in.jsonl").write_text(lines)
    store = LocalStore(tmp_path / "out")
    objects = find_objects(str(tmp_path / f"in.{format}"), tmp_path / "cache")
    [shard] = load_or_cut(store, objects, Columns("text", "id"), 2**20, keep=False).shards
    pool, read = Pool(), list[tuple[int, int]]()
    read_documents = review_documents.read_documents

    def noted(part: Shard, options: object) -> object:
        read.append((part.piece.start_row, part.piece.end_row))
        assert not pool.is_read
        return read_documents(part, {})

    monkeypatch.setattr(review_documents, "read_documents", noted)
    ranks = {3: 1, 5: 0, 42: 2, 95: 3}  # — row 95 has the text of row 5
    reading = Reading(pool, [(shard, ranks)], (), (), Read(Answers(store, None, task_of())))
    reading.wait(for_all=True)
    assert pool.is_read
    assert [(each.doc_id, each.text, each.rank) for each in pool.documents] == [
        ("d5", "text 5", 0), ("d3", "text 3", 1), ("d42", "text 42", 2)
    ]  # fmt: skip
    # — the first row of the random order alone, then the others
    assert read == [(5, 6), *([(3, 6), (42, 43), (95, 96)] if format == "parquet" else [(0, 100)])]


def test_of_the_rows_that_a_condition_accepts_only_the_drawn_ones_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled(tmp_path, ["en"])
    spec, of_shard = spec_of(tmp_path, keep="true"), 100_000

    def batches(own: LabelledRows, shards: Mapping[str, Shard]) -> Iterator[pa.RecordBatch]:
        for _ in own.contents.shards:
            yield pa.record_batch({"row": np.arange(of_shard), "n_chars": np.arange(of_shard)})

    monkeypatch.setattr(LabelledRows, "batches", batches)
    monkeypatch.setattr(Rule, "verdicts", lambda self, rows: pc.greater(rows["n_chars"], 9))
    tracemalloc.start()
    draws = accepted_by("n_chars > 9", spec, 50, 0, cache_dir=tmp_path / "cache")
    _, held_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ranks = sorted(rank for _, of in draws for rank in of.values())
    assert ranks == [*range(50)] and 0 in draws[0][1].values() and len(draws) > 1
    assert min(row for _, of in draws for row in of) > 9
    assert held_bytes < 150 * of_shard  # — of one shard
