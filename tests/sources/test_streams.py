"""Compressed streams: many members, exact offsets, and no quiet end where the data stops short."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from data_fixtures import ENCODERS

from pipeline.errors import StorageError
from pipeline.runtime.conditions import inside
from pipeline.sources.shards import Shard
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.sources.streams import Fetched, decompressed, reading
from pipeline.spec.schema import Columns

CODECS: dict[str, Callable[[bytes], bytes]] = {
    "jsonl.gz": gzip.compress,
    "jsonl.zst": zstandard.compress,
}
DATA = random.Random(3).randbytes(20_000) + b"a" * 3_000_000


@pytest.mark.parametrize("format", list(CODECS))
def test_members_run_on_and_a_seek_lands_on_the_offset(tmp_path: Path, format: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(CODECS[format](DATA[:5000]) + CODECS[format](DATA[5000:]))
    with decompressed(str(path), format, {}) as stream:
        assert stream.read(100) == DATA[:100]
        stream.seek(4990)
        assert stream.read(5) == DATA[4990:4995]
        stream.seek(2_500_000)
        assert b"".join(iter(lambda: stream.read(1 << 20), b"")) == DATA[2_500_000:]


@pytest.mark.parametrize("format", list(CODECS))
@pytest.mark.parametrize("kept", [1, 4, 500, 20_010, -1, -4, -9])
def test_a_stream_that_stops_short_is_an_error(tmp_path: Path, format: str, kept: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(CODECS[format](DATA)[:kept])
    with (
        pytest.raises(
            StorageError,
            match=r"file: cannot be read: (Truncated|Compressed file ended before|Not a gzip)",
        ),
        reading(str(path)),
        decompressed(str(path), format, {}) as stream,
    ):
        while stream.read(1 << 20):
            pass


NOT_SEEKABLE = (
    "corpus.jsonl.gz", "corpus.jsonl.zst", "corpus.warc.wet.gz", "file.arrow", "stream.arrow",
)  # fmt: skip


def texts_of(shard: Shard, where: str | None = None) -> list[str]:
    """The texts, all of which satisfy the condition."""
    documents = pa.concat_tables(read_documents(shard, {}))
    assert inside(shard, where, documents, {})[0].all()
    return list(documents.column("text").to_pylist())


# With a condition on a column, the rows are passed over twice.
@pytest.mark.parametrize(("threads", "where"), [(1, None), (4, "id <> ''")])
@pytest.mark.parametrize("name", NOT_SEEKABLE)
def test_consecutive_shards_read_each_byte_of_their_file_once(
    name: str, threads: int, where: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: Counter[str] = Counter()
    read = Fetched.read

    def counted(file: Fetched, size: int = -1, /) -> bytes:
        data = read(file, size)
        fetched[name] += len(data)
        return data

    source = random.Random(5)
    rows = [(f"row-{number}", source.randbytes(6000).hex()) for number in range(640)]
    (tmp_path / name).write_bytes(ENCODERS[name](rows))
    (item,) = find_objects(str(tmp_path / name), tmp_path / "cache")
    shards = cut(item, Columns("text", "id"), 10 * 12_600)
    assert len(shards) >= 64
    monkeypatch.setattr(Fetched, "read", counted)
    with ThreadPoolExecutor(threads) as pool:
        read_texts = [
            text for texts in pool.map(partial(texts_of, where=where), shards) for text in texts
        ]
    assert read_texts == [text for _, text in rows]
    # — each thread, and each pass over the rows, has a reader of its own
    assert fetched[name] < 1.1 * threads * (1 if where is None else 2) * item.size_bytes
    backwards = [text for shard in reversed(shards[:3]) for text in texts_of(shard)]
    assert sorted(backwards) == sorted(text for _, text in rows[: len(backwards)])
