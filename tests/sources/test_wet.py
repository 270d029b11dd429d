"""WET records: their columns, and which of them are rows."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import pytest
from whole_shards import all_documents

from pipeline.sources.source import InputObject, cut
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]


def record(content: bytes, *, kind: str = "conversion") -> bytes:
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://example.org/a\r\n"
        f"WARC-Date: 2026-11-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:1>\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("column", "value"),
    [("id", "<urn:uuid:1>"), ("url", "http://example.org/a"), ("date", "2026-11-01T00:00:00Z")],
)
def test_a_header_can_be_the_id(write: Write, column: str, value: str) -> None:
    input_object = write("corpus.warc.wet.gz", gzip.compress(record(b"text")))
    (shard,) = cut(input_object, Columns("text", column), 3000)
    assert all_documents(shard).column("doc_id").to_pylist() == [value]


def test_only_conversion_records_are_rows(write: Write) -> None:
    kinds = ["warcinfo", "conversion", "metadata", "conversion", "response"]
    records = [record(kind.encode() + b"%d" % at, kind=kind) for at, kind in enumerate(kinds)]
    input_object = write("corpus.warc.wet.gz", gzip.compress(b"".join(records)))
    shards = cut(input_object, Columns("text", None), 1)
    texts = [all_documents(shard).column("text").to_pylist() for shard in shards]
    assert texts == [["conversion1"], ["conversion3"]]


def test_bytes_that_are_not_utf8_spoil_their_record_alone(write: Write) -> None:
    data = gzip.compress(record(b"\xff")) + gzip.compress(record(b"fine"))
    (shard,) = cut(write("corpus.warc.wet.gz", data), Columns("text", None), 3000)
    statuses = all_documents(shard).column("status").to_pylist()
    assert statuses == ["error:invalid UTF-8", "ok"]
