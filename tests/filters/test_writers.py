"""Kept rows are in a file that other readers read; its rows, in order, are the kept ones."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.errors import StorageError
from pipeline.filters.writers import kept_rows
from pipeline.hashes import content_hash
from pipeline.sources.formats import format_of
from pipeline.sources.shards import Shard
from pipeline.sources.source import InputObject, cut, find_objects
from pipeline.spec.schema import Columns

Row = tuple[str, str]  # id, text


def shards_of(path: Path, target_bytes: int = 40_000) -> list[Shard]:
    format = format_of(path.name)
    assert format is not None
    etag = content_hash(path, path.parent / "cache")
    file = InputObject(str(path), path.stat().st_size, etag, format)
    return cut(file, Columns("text", "id"), target_bytes)


def unpacked(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.decompress(data)
    return zstandard.ZstdDecompressor().decompressobj().decompress(data) if "zst" in name else data


def read_rows(name: str, data: bytes) -> list[Row]:
    """The rows, by readers that are not assay's."""
    if name.endswith((".parquet", ".arrow")):
        table = pq.read_table(io.BytesIO(data))
        assert table.column_names == ["other", "text", "id"]
        return list(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
    plain = unpacked("a.jsonl.zst" if "wet" in name else name, data)
    if ".csv" in name or ".tsv" in name:
        text = io.StringIO(plain.decode(), newline="")
        csv.field_size_limit(sys.maxsize)
        tsv: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        lines = csv.DictReader(text, **({} if ".csv" in name else tsv))
        return [(row["id"], row["text"]) for row in lines]
    rows = map(json.loads, filter(bytes.strip, plain.split(b"\n")))
    return [(row["id"], row["text"]) for row in rows]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_kept_rows_of_all_shards_are_those_of_the_file(
    corpus: Path, share: float, rows: Sequence[Row]
) -> None:
    keep = np.random.default_rng(3).random(len(rows)) < share
    shards = shards_of(corpus)
    assert len(shards) > 3
    actual: list[Row] = []
    for shard in shards:
        of_shard = keep[shard.piece.start_row : shard.piece.end_row]
        actual += read_rows(corpus.name, kept_rows(shard, {}, of_shard))
    expected = [row for row, is_kept in zip(rows, keep, strict=True) if is_kept]
    assert actual == expected


@pytest.mark.parametrize(
    "corpus", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.jsonl.zst"], indirect=True
)
def test_a_line_keeps_its_exact_bytes(corpus: Path, rows: Sequence[Row]) -> None:
    name = corpus.name
    lines = [line for line in unpacked(name, one_frame(corpus)).split(b"\n") if line.strip()]
    (shard,) = shards_of(corpus, 64_000_000)
    keep = np.arange(len(rows)) % 3 != 1
    kept = [line for line, is_kept in zip(lines, keep, strict=True) if is_kept]
    assert unpacked(name, kept_rows(shard, {}, keep)) == b"".join(line + b"\n" for line in kept)


@pytest.mark.parametrize("corpus", ["corpus.csv"], indirect=True)
def test_a_csv_record_keeps_its_exact_bytes(corpus: Path, rows: Sequence[Row]) -> None:
    (shard,) = shards_of(corpus, 64_000_000)
    data = kept_rows(shard, {}, np.ones(len(rows), dtype=np.bool_))
    records = corpus.read_bytes().removeprefix(codecs.BOM_UTF8)
    assert data == re.sub(rb"(\r\n)+", b"\r\n", records) + b"\n"  # no row holds a newline


def one_frame(path: Path) -> bytes:
    """The file; two zstd frames as one."""
    if path.suffix != ".zst":
        return path.read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True) as r:
        return zstandard.compress(r.read())


@pytest.mark.parametrize("corpus", ["corpus.warc.wet.gz"], indirect=True)
def test_a_kept_web_page_has_text_id_url_and_date(corpus: Path, rows: Sequence[Row]) -> None:
    (shard,) = shards_of(corpus, 64_000_000)
    data = unpacked("a.jsonl.zst", kept_rows(shard, {}, np.ones(len(rows), dtype=np.bool_)))
    url, date = "http://example.org/", "2026-11-01T00:00:00Z"
    assert [json.loads(line) for line in data.splitlines()] == [
        {"text": text, "id": identifier, "url": url, "date": date} for identifier, text in rows
    ]


def test_kept_text_files_are_lines_with_the_text_and_the_path(tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    for name, data in {
        "a.txt": b"one",
        "b.txt": b"\xff",
        "deep/c.txt": 'drei\n"é'.encode(),
    }.items():
        (tmp_path / "in" / name).write_bytes(data)
    (file,) = find_objects(str(tmp_path / "in"), tmp_path / "cache")
    (shard,) = cut(file, Columns("text", None), 64_000_000)
    data = unpacked("a.jsonl.zst", kept_rows(shard, {}, np.array([True, False, True])))
    assert [json.loads(line) for line in data.splitlines()] == [
        {"text": "one", "id": "a.txt"},
        {"text": 'drei\n"é', "id": "deep/c.txt"},
    ]
    with pytest.raises(StorageError, match=r"text of record b\.txt is not readable: invalid UTF-8"):
        kept_rows(shard, {}, np.ones(3, dtype=np.bool_))


def test_a_web_page_that_is_not_utf8_can_be_dropped_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "c.warc.wet.gz"
    record = "WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Record-ID: {}\r\nContent-Length: 2\r\n\r\n"
    records = [
        record.format(i).encode() + b"\xff" * (i == 1) + b"ab"[: 2 - (i == 1)] for i in (0, 1)
    ]
    path.write_bytes(gzip.compress(b"".join(each + b"\r\n\r\n" for each in records)))
    (shard,) = shards_of(path, 64_000_000)
    assert read_rows(path.name, kept_rows(shard, {}, np.array([True, False]))) == [("0", "ab")]
    with pytest.raises(StorageError, match="text of record 1 is not readable: invalid UTF-8"):
        kept_rows(shard, {}, np.array([False, True]))


def test_rows_of_arrow_batches_with_different_dictionaries_are_kept(tmp_path: Path) -> None:
    batches = [
        pa.RecordBatch.from_pydict(
            {"text": pa.array(texts).dictionary_encode(), "id": pa.array(ids)}
        )
        for texts, ids in ((["a", "b", "a"], ["0", "1", "2"]), (["c", "a"], ["3", "4"]))
    ]
    path = tmp_path / "c.arrow"
    with pa.ipc.new_stream(str(path), batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    (shard,) = shards_of(path, 64_000_000)
    data = kept_rows(shard, {}, np.array([True, False, True, True, True]))
    table = pq.read_table(io.BytesIO(data))
    assert table["text"].to_pylist() == ["a", "a", "c", "a"]
    assert table["id"].to_pylist() == ["0", "2", "3", "4"]


def test_rows_of_string_views_are_kept(tmp_path: Path) -> None:
    views = pa.array(["a", "b", "c", "d", None], pa.string_view())
    table = pa.table({"text": views, "id": range(5), "of": [{"x": n} for n in range(5)]})
    path = tmp_path / "c.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    (shard,) = shards_of(path, 64_000_000)
    keep = np.array([True, True, False, True, True])
    kept = pq.read_table(io.BytesIO(kept_rows(shard, {}, keep)))
    assert kept.to_pylist() == [row for row in table.to_pylist() if row["id"] != 2]


def test_a_parquet_file_keeps_its_schema_and_codecs(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("text", pa.large_string(), nullable=False, metadata={"a": "b"}),
            pa.field("day", pa.timestamp("ns", tz="UTC")),
            pa.field("kind", pa.dictionary(pa.int8(), pa.string())),
            pa.field("tags", pa.list_(pa.struct([("k", pa.string()), ("v", pa.decimal128(9, 2))]))),
        ],
        metadata={"owner": "corpus"},
    )
    rows = [
        {
            "text": f"t{i}",
            "day": i * 10**15 + 1,
            "kind": "ab"[i % 2],
            "tags": [{"k": "x"}] * (i % 3),
        }
        for i in range(50)
    ]
    table = pa.Table.from_pylist(rows, schema)
    codecs = {"text": "zstd", "day": "gzip", "kind": "none"} | {
        f"tags.list.element.{leaf}": "brotli" for leaf in "kv"
    }
    path = tmp_path / "c.parquet"
    pq.write_table(table, path, row_group_size=7, compression=codecs)
    etag = content_hash(path, tmp_path / "cache")
    file = InputObject(str(path), path.stat().st_size, etag, "parquet")
    (shard,) = cut(file, Columns("text", None), 64_000_000)
    keep = np.arange(50) % 2 == 0
    data = kept_rows(shard, {}, keep)
    expected = pq.read_table(path).filter(pa.array(keep))
    assert pq.read_table(io.BytesIO(data)).equals(expected, check_metadata=True)
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    written = [group.column(i).compression for i in range(5)]
    assert written == ["ZSTD", "GZIP", "UNCOMPRESSED", "BROTLI", "BROTLI"]


def test_rows_behind_a_break_can_be_dropped_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    lines = "".join(
        json.dumps({"id": str(i), "text": random.Random(i).randbytes(400).hex()}) + "\n"
        for i in range(4000)
    )
    path.write_bytes(gzip.compress(lines.encode()))
    (shard,) = shards_of(path, 64_000_000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    first = np.arange(4000) < 50
    assert len(read_rows(path.name, kept_rows(shard, {}, first))) == 50
    with pytest.raises(StorageError, match=r"4000 rows from row 0 are to be kept and cannot be"):
        kept_rows(shard, {}, np.ones(4000, dtype=np.bool_))
