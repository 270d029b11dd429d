"""Compressed streams: many members, exact offsets, and no quiet end where the data stops short."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from pipeline.errors import StorageError
from pipeline.sources.streams import decompressed, reading

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
        pytest.raises(StorageError, match="file: cannot be read: Truncated"),
        reading(str(path)),
        decompressed(str(path), format, {}) as stream,
    ):
        while stream.read(1 << 20):
            pass
