"""WET records: their columns, and which of them are rows."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import pytest
from data_fixtures import wet_record
from whole_shards import all_documents

from pipeline.sources.source import InputObject, cut
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]


@pytest.mark.parametrize(
    ("column", "value"),
    [("id", "row"), ("url", "http://example.org/"), ("date", "2026-11-01T00:00:00Z")],
)
def test_a_header_can_be_the_id(write: Write, column: str, value: str) -> None:
    input_object = write("corpus.warc.wet.gz", gzip.compress(wet_record(b"text")))
    (shard,) = cut(input_object, Columns("text", column), 3000)
    assert all_documents(shard).column("doc_id").to_pylist() == [value]


def test_only_conversion_records_are_rows(write: Write) -> None:
    kinds = ["warcinfo", "conversion", "metadata", "conversion", "response"]
    records = [wet_record(kind.encode() + b"%d" % at, kind=kind) for at, kind in enumerate(kinds)]
    input_object = write("corpus.warc.wet.gz", gzip.compress(b"".join(records)))
    shards = cut(input_object, Columns("text", None), 1)
    texts = [all_documents(shard).column("text").to_pylist() for shard in shards]
    assert texts == [["conversion1"], ["conversion3"]]
