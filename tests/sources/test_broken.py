"""Broken rows and files: each row comes out with the reason, and a store's failures never do."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import re
import struct
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fixtures import arrow_bytes, parquet_bytes, wet_record
from fsspec.implementations.memory import MemoryFile
from whole_shards import all_documents

from pipeline.errors import AssayError, SpecError, StorageError, UnreadableError
from pipeline.sources.formats import READERS
from pipeline.sources.records import SAMPLE_ROWS
from pipeline.sources.source import InputObject, cut, find_objects
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]
ROWS = 2_000


# Texts that do not compress, so that a place in the file is a place among the rows.
TEXTS = [random.Random(row).randbytes(100).hex() for row in range(ROWS)]


def data_of(name: str) -> bytes:
    """A file of these texts in the format of its name."""
    table = pa.table({"text": TEXTS, "id": [f"d{i}" for i in range(ROWS)]})
    if name.endswith("parquet"):
        pages = {"data_page_size": 20_000, "write_batch_size": 10}
        return parquet_bytes(table, use_dictionary=False, **pages)
    if name.endswith("arrow"):
        return arrow_bytes(table, 100)
    lines = "\n".join(map(json.dumps, table.to_pylist())).encode()
    return gzip.compress(lines) if name.endswith("gz") else lines


def broken(data: bytes, share: float) -> bytes:
    """As long as before, with a hole."""
    at = int(len(data) * share)
    return data[:at] + b"\xff" * 400 + data[at + 400 :]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
NOTHING = hashlib.sha256(b"").hexdigest()[:32]  # the id of a row without a text
LINES = [
    (b'\xef\xbb\xbf{"id": 1, "text": "ok"}', "1", "ok"),
    (b'{"id": 2}', "2", "error:no text"),
    (b'{"id": 3, "text": null}', "3", "error:no text"),
    (b'{"id": 4, "text": 5}', "4", "error:text is not a string"),
    (b'{"id": 5, "text": "\xff"}', NOTHING, "error:invalid UTF-8"),
    (b'{"id": 6, "text": "\\ud83d"}', "6", "error:invalid UTF-8"),
    (b'{"id": 7, "text": "cut', NOTHING, "error:not JSON"),
    (b'["text"]', NOTHING, "error:not an object"),
    (b"[" * 100_000, NOTHING, "error:not JSON"),
    (b"\x00{\x00}", NOTHING, "error:not JSON"),
    (b'{"id": 11, "text": " "}', "11", "empty"),
    (b'{"id": {"a": 1}, "text": "ok"}', '{"a": 1}', "ok"),
]
RECORDS = [
    (b"id,text\n1,ok", "1", "ok"),
    (b"2,caf\xe9", "2", "error:invalid UTF-8"),  # Latin-1
    (b"3,Hello, world", NOTHING, "error:3 fields, and the header has 2"),
    (b"4", NOTHING, "error:1 fields, and the header has 2"),
    (b"5,ok,,", "5", "ok"),  # empty fields are no text that would be lost
    (b"6,", "6", "empty"),
    (b'7,"never closed\n8,ok', NOTHING, "error:a quote is not closed"),
]
WET = [
    (gzip.compress(wet_record(b"\xff", id="1"), mtime=0), "1", "error:invalid UTF-8"),
    (gzip.compress(wet_record(b"fine", id="2"), mtime=0), "2", "ok"),
]


@pytest.mark.parametrize("target_bytes", [1, 10**6])
@pytest.mark.parametrize(
    ("name", "separator", "rows"),
    [
        ("a.jsonl", b"\n", LINES),
        ("a.json", b"\n", LINES),
        ("a.csv", b"\n", RECORDS),
        ("a.warc.wet.gz", b"", WET),
    ],
)
def test_a_row_that_cannot_be_read_says_why_and_the_others_are_read(
    write: Write, name: str, separator: bytes, rows: list[tuple[bytes, str, str]], target_bytes: int
) -> None:
    data = separator.join(written for written, _, _ in rows)
    shards = cut(write(name, data), Columns("text", "id"), target_bytes)
    documents = [row for shard in shards for row in all_documents(shard).to_pylist()]
    assert [(row["doc_id"], row["status"]) for row in documents] == [row[1:] for row in rows]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.csv", "id,text\n".encode("utf-16"), "it is UTF-16 text; save it as UTF-8"),
        ("a.csv", "id,text,Größe\n".encode("latin-1"), "its header is not UTF-8"),
        ("a.csv", b'id,"text\n', "a quote in its header is not closed"),
        ("a.json", b'{\n "data": [\n{"text": "a"}]}', "it is JSON over several lines; write an"),
        ("a.json", b'"text"\n{"text": "a"}\n', "line 1 is no object; write one in each line, or"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16"), "it is UTF-16 text; save it as UTF-8"),
        ("a.parquet", POINTER, "it is a Git LFS pointer; run `git lfs pull`"),
        ("a.json.gz", POINTER, "it is a Git LFS pointer; run `git lfs pull`"),
        ("a.tar", b"<!DOCTYPE html>\n<html>", "it is an HTML page; download the file itself"),
        ("a.arrow", b"PAR1" + bytes(100), "it is Parquet; name it .parquet"),
        *(
            (f"a.{format}.gz", gzip.compress(b"text\n", mtime=0)[:10] + b"\xff" * 9, "Error -3")
            for format in ("csv", "jsonl")
        ),
        *(
            (
                "a.warc.wet.gz",
                gzip.compress(wet_record(b"content", length=n), mtime=0),
                "a WARC record",
            )
            for n in (1, 500)
        ),
        *(
            (f"a.{format}", b"these are plain words, of no format at all " * 50, "")
            for reader in READERS
            for format in reader.formats
            # — words are valid there; a file of Lance is a part of a folder
            if format not in ("jsonl", "ndjson", "csv", "tsv", "txt", "lance")
        ),
        ("a.lance", b"words", "it is a file of a Lance dataset; name the folder of the dataset"),
    ],
)
def test_a_file_that_violates_its_format_is_one_line(
    write: Write, name: str, data: bytes, reason: str
) -> None:
    input_object = write(name, data)
    with pytest.raises(UnreadableError) as raised:
        cut(input_object, Columns("text", None), 3000)
    line = str(raised.value)
    assert line.startswith(f"{input_object.path}: cannot be read: ") and reason in line
    assert "\n" not in line and raised.value.exit_code == (2 if reason.startswith("it is ") else 1)


@pytest.mark.parametrize(
    ("name", "data", "fix"),
    [
        ("a.jsonl", POINTER, "is a Git LFS pointer; run `git lfs pull`"),
        ("a.csv", POINTER, "is a Git LFS pointer; run `git lfs pull`"),
        ("a.ndjson", b"\n <HTML><head>", "is an HTML page; download the file itself"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("a.jsonl", b'[{"text": "a"},\n{"text": "b"}]', "is a JSON array; convert it: duckdb -c"),
        ("a.jsonl", gzip.compress(b'{"text": "a"}\n', mtime=0), "is compressed with gzip; add .gz"),
        ("a.jsonl", b"text\nplain words\n", "line 1 is not JSON: 'text'; write a JSON object in"),
        (
            "a.jsonl.gz",
            gzip.compress(b"\n3\n4\n", mtime=0),
            "line 1 is not an object: '3'; write a JSON",
        ),
        ("a.csv", b'{"text": "a"}\n', "is JSON; name it .json"),
    ],
)
def test_a_file_of_another_format_is_an_error_that_names_it(
    write: Write, name: str, data: bytes, fix: str
) -> None:
    file = write(name, data)
    with pytest.raises(SpecError) as raised:
        cut(file, Columns("text", None), 3000)
    (problem,) = raised.value.problems
    assert problem.place == "input.path" and fix in problem.fix
    assert problem.fix.startswith(file.path) and "it has" not in problem.fix


def tar_of(texts: Iterable[str]) -> bytes:
    """An archive with one member of 512 bytes, behind one header, for each text."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return sink.getvalue()


FIVE = tar_of("abcde")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(FIVE[:2148] + b"\xff" + FIVE[2149:], id="a header is damaged"),
        pytest.param(FIVE[:2148], id="it ends inside a header"),
        pytest.param(FIVE + FIVE, id="two archives"),
    ],
)
def test_members_of_an_archive_are_not_lost_behind_what_ends_it(write: Write, data: bytes) -> None:
    with pytest.raises(UnreadableError, match="is a broken tar file, or several in one"):
        cut(write("a.tar", data), Columns("txt", "__key__"), 10**6)


@pytest.mark.parametrize("zeros", [0, 512, 1024, 10**6])
def test_an_archive_may_end_in_any_number_of_zeros(write: Write, zeros: int) -> None:
    (shard,) = cut(write("a.tar", FIVE[:5120] + bytes(zeros)), Columns("txt", "__key__"), 10**6)
    assert all_documents(shard)["text"].to_pylist() == [*"abcde"]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
def test_a_json_array_names_the_line_that_converts_it(
    write: Write, name: str, indent: int | None
) -> None:
    rows = [{"id": str(n), "text": "a"} for n in range(SAMPLE_ROWS)]
    data = json.dumps(rows, indent=indent).encode()
    array = write(name, gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(AssayError, match="a JSON array; convert it: ") as raised:
        cut(array, Columns("text", "id"), 3000)
    command = re.search(r'duckdb -c "(.*?)"', str(raised.value))
    assert command is not None and len(str(raised.value).splitlines()) == 1
    duckdb.sql(command[1])
    assert pq.read_table(f"{array.path}.parquet").to_pylist() == rows


@pytest.mark.parametrize(
    ("name", "plain"),
    [("a.jsonl.gz", b'{"text": "a"}\n' * ROWS), ("a.csv.gz", b"text\n" + b"a\n" * ROWS)],
)
@pytest.mark.parametrize("zeros", [1, 200_000])
def test_zeros_behind_gzip_are_no_data(write: Write, name: str, plain: bytes, zeros: int) -> None:
    file = write(name, gzip.compress(plain[:-9]) + gzip.compress(plain[-9:]) + bytes(zeros))
    shards = cut(file, Columns("text", None), 100_000)
    assert len(shards) > 1
    assert sum(all_documents(shard).num_rows for shard in shards) == ROWS


@pytest.mark.parametrize("id_column", ["id", None])
def test_rows_behind_a_break_are_named_by_their_place_and_say_why(
    write: Write, id_column: str | None
) -> None:
    data = data_of("a.parquet")
    input_object = write("a.parquet", data)
    shards = cut(input_object, Columns("text", id_column), 100_000)
    assert len(shards) > 4
    Path(input_object.path).write_bytes(broken(data, 0.4))
    tables = [all_documents(shard) for shard in shards]
    assert [table.num_rows for table in tables] == [shard.rows for shard in shards]
    documents = pa.concat_tables(tables).to_pylist()
    read = [place for place, row in enumerate(documents) if row["status"] == "ok"]
    unread = [place for place, row in enumerate(documents) if row["status"] != "ok"]
    assert read and unread and len(read) + len(unread) == ROWS
    assert [documents[place]["text"] for place in read] == [TEXTS[place] for place in read]
    for place in unread:
        row = documents[place]
        assert row["doc_id"] == f"a.parquet:{place}"
        assert row["text"] is None and row["n_chars"] == 0
        assert row["status"].startswith("error:cannot be read: ")
        assert "\n" not in row["status"] and str(input_object.path) not in row["status"]
        assert len(row["status"]) <= len("error:cannot be read: ") + 200


def test_rows_that_only_the_footer_counts_have_the_reason(write: Write) -> None:
    data = parquet_bytes(pa.table({"text": ["a"] * 1_000}), compression="none")
    (size,) = struct.unpack("<I", data[-8:-4])
    footer = data[-8 - size : -8].replace(b"\xd0\x0f", b"\xf0\x2e")  # 1,000 and 3,000 in Thrift
    input_object = write("lie.parquet", data[: -8 - size] + footer + data[-8:])
    (shard,) = cut(input_object, Columns("text", None), 10**7)
    status = all_documents(shard).column("status").to_pylist()
    why = "error:cannot be read: its footer has 3000 rows, and its pages have 1000"
    assert status == ["ok"] * 1_000 + [why] * 2_000


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl"])
def test_a_file_that_is_gone_ends_the_run(write: Write, name: str) -> None:
    input_object = write(name, data_of(name))
    (shard, *_) = cut(input_object, Columns("text", None), 10**7)
    Path(input_object.path).unlink()
    with pytest.raises(StorageError, match="No such file") as raised:
        all_documents(shard)
    assert not isinstance(raised.value, UnreadableError)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl", "a.arrow"])
@pytest.mark.parametrize("bytes_before", [0, 60_000])
def test_a_store_that_refuses_to_go_on_ends_the_run(
    name: str, bytes_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's error without a number, as some are: only its origin shows what it is."""
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/refusing/{name}", data_of(name))
    read_bytes = 0
    # — of Parquet, two columns are two reads; the footer was read for the cut
    bytes_allowed = min(bytes_before, 1) if name == "a.parquet" else bytes_before

    def read(self: MemoryFile, size: int = -1) -> bytes:
        nonlocal read_bytes
        if read_bytes >= bytes_allowed:
            raise OSError("Forbidden: the token has run out")
        taken = io.BytesIO.read(self, min(size, 50_000) if name != "a.parquet" else size)
        read_bytes += len(taken)
        return taken

    try:
        (input_object,) = find_objects(f"memory://refusing/{name}", tmp_path / "cache")
        (shard, *_) = cut(input_object, Columns("text", "id"), 10**7)
        monkeypatch.setattr(MemoryFile, "read", read, raising=False)
        with pytest.raises(StorageError, match="cannot be read: Forbidden") as raised:
            all_documents(shard)
        assert not isinstance(raised.value, UnreadableError)
    finally:
        monkeypatch.undo()
        memory.rm("/refusing", recursive=True)
