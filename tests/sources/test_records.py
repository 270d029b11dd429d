"""Records of text formats in bounded memory: the cut never holds the record that it measures."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable

import pytest
from whole_shards import all_documents

from pipeline.sources.source import InputObject, cut
from pipeline.sources.streams import BLOCK_BYTES
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]
LONG = 10 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("name", "start", "piece", "end", "chars", "blocks"),
    [
        ("a.jsonl", b'{"text": "short"}\n{"text": "', b"xxxx", b'"}\n', 4, 6),
        ("a.json", b'[{"text": "short"}, {"text": "', b"x\\n", b'"}]', 2, 9),
        ("a.csv.gz", b'text\nshort\n"', b"x,\n", b'"', 3, 6),
    ],
)
def test_a_record_longer_than_many_blocks_is_cut_in_the_memory_of_a_few(
    write: Write, name: str, start: bytes, piece: bytes, end: bytes, chars: int, blocks: int
) -> None:
    data = start + piece * LONG + end
    input_object = write(name, gzip.compress(data, 1) if name.endswith("gz") else data)
    tracemalloc.start()
    shards = cut(input_object, Columns("text", None), 10_000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(shard.piece.start_row, shard.piece.end_row) for shard in shards] == [(0, 1), (1, 2)]
    assert peak_bytes < blocks * BLOCK_BYTES
    (length,) = all_documents(shards[1]).column("n_chars").to_pylist()
    assert length == chars * LONG


def test_blank_lines_lie_between_pieces_and_are_not_read(write: Write) -> None:
    first, second = b'{"text": "one"}\r\n', b'{"text": "two"}'
    input_object = write("corpus.jsonl", b"\n \n" + first + b"\n" * BLOCK_BYTES + second)
    shards = cut(input_object, Columns("text", None), 600)
    edges = [(shard.piece.start_byte, shard.piece.end_byte) for shard in shards]
    start = 3 + len(first) + BLOCK_BYTES
    assert edges == [(3, 3 + len(first)), (start, start + len(second))]


@pytest.mark.parametrize(
    ("name", "datas"),
    [
        ("a.jsonl", [b"", b"\n \n\t\n"]),
        ("a.csv", [b"", b"\n\r\n", b"\xef\xbb\xbf", b"text,id\n", b"text,id"]),
        ("a.json", [b"", b" \n", b"[]", b"[ \n ]\n", b"\xef\xbb\xbf[]"]),
    ],
)
def test_a_file_without_a_row_makes_no_shard(write: Write, name: str, datas: list[bytes]) -> None:
    assert [cut(write(name, data), Columns("text", "id"), 3000) for data in datas] == [[]] * len(
        datas
    )
