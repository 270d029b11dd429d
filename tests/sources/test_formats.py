"""A new format is two functions in one file and one line in the table of formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError
from pipeline.filters.writers import kept_rows
from pipeline.sources import formats
from pipeline.sources.documents import Names, Row
from pipeline.sources.formats import READERS, Reader
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.source import cut, find_objects, first_rows
from pipeline.sources.streams import Options, decompressed, stream_at
from pipeline.spec.schema import Columns


def verse_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each line; a line of the toy format is `id|text`."""
    check_columns(version, ["text", "id"])
    start = 0
    with decompressed(version.path, version.format, options) as stream:
        for line in stream.read(10**6).splitlines(keepends=True):
            yield Unit(1, len(line), start, start + len(line))
            start += len(line)


def verse_rows(shard: Shard, options: Options, _: Names) -> Iterator[Row]:
    """The shard's lines."""
    start, end = shard.piece.start_byte or 0, shard.piece.end_byte or 0
    with stream_at(shard.version, options, start) as stream:
        for line in stream.read(end - start).splitlines():
            id, _, text = line.partition(b"|")
            yield Row({"id": id, "text": text})


@pytest.fixture(autouse=True)
def toy_format(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Reader(("verse", "verse.gz"), 0, verse_units, verse_rows)
    monkeypatch.setattr(formats, "READERS", (*READERS, toy))


def test_a_toy_format_is_found_cut_read_previewed_and_filtered(tmp_path: Path) -> None:
    path = tmp_path / "a.verse"
    path.write_bytes("a|one\nb|zwei ü\nc|\n".encode())
    (tmp_path / "notes.txt").write_text("of another kind")
    (found,) = find_objects(str(tmp_path), tmp_path / "cache")
    shards = cut(found, Columns("text", "id"), 600)
    assert [shard.piece.start_row for shard in shards] == [0, 1, 2]
    rows = [row for shard in shards for row in all_documents(shard).to_pylist()]
    assert [(row["doc_id"], row["text"], row["status"]) for row in rows] == [
        ("a", "one", "ok"),
        ("b", "zwei ü", "ok"),
        ("c", "", "empty"),
    ]
    assert [row.values["id"] for row in first_rows(str(path), "verse", {}, 2)] == [b"a", b"b"]
    kept = kept_rows(shards[1], {}, np.array([True]))
    assert json.loads(kept) == {"text": "zwei ü", "id": "b"}
    path.write_bytes(b"a|one\n")
    with pytest.raises(StorageError, match="changed while the job ran"):
        all_documents(shards[0])


def test_errors_name_the_toy_format_among_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"supported are \.parquet .* \.verse \.verse\.gz"):
        find_objects(str(tmp_path / "none.verse"), tmp_path / "cache")
