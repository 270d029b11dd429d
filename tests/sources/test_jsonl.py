"""Lines in bounded memory: the pieces of a stream never hold the line that they measure."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from whole_shards import all_documents

from pipeline.sources.source import InputObject, cut
from pipeline.sources.streams import BLOCK_BYTES
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]


def test_a_line_longer_than_many_blocks_is_cut_in_the_memory_of_a_few(write: Write) -> None:
    long = b'{"text": "' + b"x" * (40 * BLOCK_BYTES) + b'"}\n'
    input_object = write("corpus.jsonl", b'{"text": "short"}\n' + long)
    tracemalloc.start()
    shards = cut(input_object, Columns("text", None), 10_000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(shard.piece.start_row, shard.piece.end_row) for shard in shards] == [(0, 1), (1, 2)]
    assert peak_bytes < 6 * BLOCK_BYTES
    (length,) = all_documents(shards[1]).column("n_chars").to_pylist()
    assert length == 40 * BLOCK_BYTES


def test_blank_lines_lie_between_pieces_and_are_not_read(write: Write) -> None:
    first, second = b'{"text": "one"}\r\n', b'{"text": "two"}'
    input_object = write("corpus.jsonl", b"\n \n" + first + b"\n" * BLOCK_BYTES + second)
    shards = cut(input_object, Columns("text", None), 600)
    edges = [(shard.piece.start_byte, shard.piece.end_byte) for shard in shards]
    start = 3 + len(first) + BLOCK_BYTES
    assert edges == [(3, 3 + len(first)), (start, start + len(second))]
