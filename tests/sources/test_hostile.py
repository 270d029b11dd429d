"""Malicious files are read in bounded memory, and each row that they claim to have comes out.

Each is a few kilobytes or megabytes on disk. The memory of reading it is measured in a separate
process, so that the peak does not include other tests.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fixtures import wet_record
from transformers import PreTrainedTokenizerFast
from whole_shards import all_documents

from pipeline.sources import documents, records, tables
from pipeline.sources.shards import ObjectVersion, Piece, Shard
from pipeline.sources.source import cut, find_objects
from pipeline.sources.tables import opened_table
from pipeline.spec.schema import Columns

MEGABYTE = 1024 * 1024
# Reads every shard of argv[1], as a run does, and prints counts and the growth of memory.
READ = """
import json, sys
from collections import Counter
from pathlib import Path
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.spec.schema import Columns
from pipeline.errors import StorageError

def peak_mb():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

chunked = None
if len(sys.argv) > 2:
    from transformers import PreTrainedTokenizerFast
    from pipeline.inference.chunking import chunk_text
    from pipeline.spec.stages import DocumentsSpec
    from pipeline.inference.labels.tokenizer import DocumentTokenizer
    encoder = DocumentTokenizer(PreTrainedTokenizerFast.from_pretrained(sys.argv[2]))
    def chunked(text):
        return chunk_text(encoder, text, DocumentsSpec(max_tokens=2048, too_long="middle"))

before = peak_mb()
status, chars, tokens, error = Counter(), 0, [], None
try:
    (input_object,) = find_objects(sys.argv[1], Path(sys.argv[1] + ".cache"))
    for shard in cut(input_object, Columns("text", None), 64 * 1024 * 1024):
        for documents in read_documents(shard):
            status.update(documents.column("status").to_pylist())
            chars += sum(documents.column("n_chars").to_pylist())
            for text in documents.column("text") if chunked else ():
                tokens.append(chunked(text.as_py()).tokens)
except StorageError as raised:
    error = str(raised)
print(json.dumps({"status": status, "chars": chars, "tokens": tokens, "error": error,
                  "grown_mb": peak_mb() - before}))
"""


def read_apart(path: Path, *, tokenizer: Path | None = None) -> dict[str, Any]:
    command = [sys.executable, "-c", READ, str(path), *([str(tokenizer)] if tokenizer else [])]
    output = subprocess.check_output(command, text=True, timeout=120)
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    return measured


def repeated(rows: int) -> pa.Table:
    """One text of a megabyte in every row, stored once."""
    values = pa.array(["a" * MEGABYTE])
    return pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows), values)})


def dictionary_parquet(path: Path) -> None:
    pq.write_table(repeated(2_200), path, compression="zstd", store_schema=False)


def dictionary_typed_parquet(path: Path) -> None:
    pq.write_table(repeated(2_200), path, compression="zstd")


def prefixes_parquet(path: Path, rows: int = 800) -> None:
    pq.write_table(
        pa.table({"text": ["a" * MEGABYTE] * rows}),
        path,
        compression="zstd",
        use_dictionary=False,
        column_encoding={"text": "DELTA_BYTE_ARRAY"},
    )


def dictionary_arrow(path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, repeated(1).schema, options=options) as writer:
        writer.write_table(repeated(2_200))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "rows"),
    [
        ("dictionary.parquet", dictionary_parquet, 2_200),
        ("dictionary_typed.parquet", dictionary_typed_parquet, 2_200),
        ("prefixes.parquet", prefixes_parquet, 800),
        ("dictionary.arrow", dictionary_arrow, 2_200),
    ],
)
def test_a_few_bytes_that_hold_gigabytes_are_read_row_by_row(
    tmp_path: Path, name: str, make: Callable[[Path], None], rows: int
) -> None:
    path = tmp_path / name
    make(path)
    assert path.stat().st_size < 3_000
    measured = read_apart(path)
    assert measured["status"] == {"ok": rows}
    assert measured["chars"] == rows * MEGABYTE
    assert measured["grown_mb"] < 600


@pytest.mark.parametrize(
    "make", [dictionary_parquet, dictionary_typed_parquet, partial(prefixes_parquet, rows=100)]
)
def test_a_batch_of_values_that_are_stored_once_is_bounded(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of a batch, written out, are at most BATCH_BYTES."""
    monkeypatch.setattr(tables, "BATCH_BYTES", 8 * MEGABYTE)
    path = tmp_path / "bomb.parquet"
    make(path)
    version = ObjectVersion(str(path), 0, "", "parquet", "text", None)
    with opened_table(Shard(version, Piece(0, 100, 0, None, None)), {}) as table:
        sizes = [batch.num_rows * MEGABYTE for batch in table.batches(["text"])]
    assert sum(sizes) == 100 * MEGABYTE
    assert max(sizes) <= 8 * MEGABYTE


def test_a_dictionary_that_ended_early_does_not_make_batches_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers end the dictionary of values that differ, and store the others as they are."""
    monkeypatch.setattr(tables, "BATCH_BYTES", 8 * MEGABYTE)
    texts = [f"{number:01000}" for number in range(2_000)]
    path = tmp_path / "long.parquet"
    pq.write_table(
        pa.table({"text": texts}), path, dictionary_pagesize_limit=10_000, write_batch_size=10
    )
    assert "RLE_DICTIONARY" in pq.read_metadata(path).row_group(0).column(0).encodings
    version = ObjectVersion(str(path), 0, "", "parquet", "text", None)
    with opened_table(Shard(version, Piece(0, 2_000, 0, None, None)), {}) as table:
        batches = [*table.batches(["text"])]
    assert [text for batch in batches for text in batch.column(0).to_pylist()] == texts
    assert batches[0].num_rows == tables.BATCH_ROWS


def zeros(file: BinaryIO, megabytes: int) -> None:
    block = bytes(MEGABYTE)
    for _ in range(megabytes):
        file.write(block)


WET_BOMB = wet_record(b"", length=700 * MEGABYTE).removesuffix(b"\r\n\r\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before", "behind", "rows"),
    [
        ("a.jsonl.gz", b'{"text": "one"}\n{"text": "', b'"}\n{"text": "behind"}\n', 2),
        ("a.warc.wet.gz", WET_BOMB, b"\r\n\r\n" + wet_record(b"behind"), 1),
    ],
)
def test_a_gzip_bomb_of_one_endless_text_is_a_row_with_the_reason(
    tmp_path: Path, name: str, before: bytes, behind: bytes, rows: int
) -> None:
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
        file.write(before)
        zeros(file, 700)
        file.write(behind)
    measured = read_apart(tmp_path / name)
    assert measured["status"] == {"ok": rows, "error:longer than 268,435,456 bytes": 1}
    assert measured["grown_mb"] < 500


def test_an_endless_header_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bomb.warc.wet.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"WARC/1.0\r\nX: ")
        zeros(file, 60)
    measured = read_apart(path)
    assert measured["error"].startswith(f"{path}: cannot be read: a WARC record's headers are over")
    assert measured["grown_mb"] < 40


def long_jsonl(path: Path) -> None:
    with path.open("w") as file:
        file.write('{"text": "')
        for _ in range(200):
            file.write("word " * 200_000)
        file.write('"}\n{"text": "short"}\n')


def long_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": ["word " * 40_000_000, "short"]}), path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"), [("long.jsonl", long_jsonl), ("long.parquet", long_parquet)]
)
def test_one_document_of_200_megabytes_is_fitted_in_the_memory_of_a_few_of_it(
    tmp_path: Path, name: str, make: Callable[[Path], None], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    make(tmp_path / name)
    byte_tokenizer.save_pretrained(tmp_path / "tokenizer")
    measured = read_apart(tmp_path / name, tokenizer=tmp_path / "tokenizer")
    assert measured["status"] == {"ok": 2}
    assert measured["chars"] == 200_000_005  # as many as there are, however many are read
    assert measured["tokens"] == [2_048, 5]
    assert measured["grown_mb"] < 1_800


def test_a_value_above_the_limit_is_a_row_with_the_reason_in_every_format(
    corpus: Path, rows: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (documents, records, tables):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", MEGABYTE)
    monkeypatch.setattr(tables, "BATCH_BYTES", MEGABYTE)
    (input_object,) = find_objects(str(corpus), tmp_path / "cache")
    shards = cut(input_object, Columns("text", "id"), 100_000)
    read = pa.concat_tables(map(all_documents, shards)).to_pylist()
    assert len(read) == len(rows)
    for document, (identifier, text) in zip(read, rows, strict=True):
        if len(text) > MEGABYTE:
            assert document["status"] == "error:longer than 1,048,576 bytes"
            assert document["text"] is None
            has_id = input_object.format in ("parquet", "arrow")
            assert document["doc_id"] == identifier or not has_id
        else:
            assert (document["doc_id"], document["text"]) == (identifier, text)
    assert sum(document["text"] is None for document in read) == 1
