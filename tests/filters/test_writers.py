"""Kept rows lie in a file of the same format, read here without the code that wrote it."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from warcio.archiveiterator import ArchiveIterator

from pipeline.errors import StorageError
from pipeline.filters.writers import kept_rows
from pipeline.hashes import content_hash
from pipeline.sources.shards import Shard
from pipeline.sources.source import InputObject, cut, format_of

Row = tuple[str, str]  # id, text


def shards_of(path: Path, target_bytes: int = 40_000) -> list[Shard]:
    format = format_of(path.name)
    assert format is not None
    etag = content_hash(path, path.parent / "cache")
    found = InputObject(str(path), path.stat().st_size, etag, format)
    return cut(found, "text", "id", target_bytes)


def unpacked(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.decompress(data)
    return zstandard.ZstdDecompressor().decompressobj().decompress(data) if "zst" in name else data


def found_rows(name: str, data: bytes) -> list[Row]:
    """The rows by readers that are none of ours."""
    if name.endswith(".parquet"):
        table = pq.read_table(io.BytesIO(data))
    elif name.endswith(".arrow"):
        prefix = pa.ipc.open_file if data.startswith(b"ARROW1") else pa.ipc.open_stream
        table = prefix(io.BytesIO(data)).read_all()
    elif "wet" in name:
        return [
            (
                record.rec_headers.get_header("WARC-Record-ID"),
                record.content_stream().read().decode(),
            )
            for record in ArchiveIterator(io.BytesIO(data))
            if record.rec_type == "conversion"
        ]
    else:
        lines = unpacked(name, data).split(b"\n")
        return [(row["id"], row["text"]) for row in map(json.loads, filter(bytes.strip, lines))]
    assert table.column_names == ["other", "text", "id"]
    return list(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_kept_rows_of_all_shards_are_those_of_the_file(
    corpus: Path, share: float, rows: Sequence[Row]
) -> None:
    keep = np.random.default_rng(3).random(len(rows)) < share
    shards = shards_of(corpus)
    assert len(shards) > 3
    found: list[Row] = []
    for shard in shards:
        of_shard = keep[shard.piece.start_row : shard.piece.end_row]
        found += found_rows(corpus.name, kept_rows(shard, {}, of_shard))
    wanted = [row for row, is_kept in zip(rows, keep, strict=True) if is_kept]
    assert found == wanted


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


def one_frame(path: Path) -> bytes:
    """The file; two zstd frames as one."""
    if path.suffix != ".zst":
        return path.read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True) as r:
        return zstandard.compress(r.read())


@pytest.mark.parametrize("corpus", ["corpus.warc.wet.gz"], indirect=True)
def test_a_wet_record_keeps_its_exact_bytes(corpus: Path, rows: Sequence[Row]) -> None:
    records = gzip.decompress(corpus.read_bytes()).split(b"WARC/1.0\r\n")[1:]
    keep = np.arange(len(rows)) % 5 == 0
    (shard,) = shards_of(corpus, 64_000_000)
    wanted = [records[0], *(r for r, is_kept in zip(records[1:], keep, strict=True) if is_kept)]
    found = gzip.decompress(kept_rows(shard, {}, keep))
    assert found.split(b"WARC/1.0\r\n")[1:] == wanted


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
    found = InputObject(str(path), path.stat().st_size, etag, "parquet")
    (shard,) = cut(found, "text", None, 64_000_000)
    keep = np.arange(50) % 2 == 0
    data = kept_rows(shard, {}, keep)
    wanted = pq.read_table(path).filter(pa.array(keep))
    assert pq.read_table(io.BytesIO(data)).equals(wanted, check_metadata=True)
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    assert [group.column(i).compression for i in range(5)] == [
        "ZSTD",
        "GZIP",
        "UNCOMPRESSED",
        "BROTLI",
        "BROTLI",
    ]


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
    assert len(found_rows(path.name, kept_rows(shard, {}, first))) == 50
    with pytest.raises(StorageError, match=r"4000 rows from row 0 are to be kept and cannot be"):
        kept_rows(shard, {}, np.ones(4000, dtype=np.bool_))
