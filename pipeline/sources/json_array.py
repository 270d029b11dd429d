"""A JSON array of objects, one row for each element, read without the whole array in memory.

Entry points: `array_segments`, `shard_elements`. Only brackets, commas and strings are scanned;
`json` parses each element.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from pipeline.sources.documents import TooLong
from pipeline.sources.records import Segment, records_of, shard_blocks
from pipeline.sources.shards import Shard
from pipeline.sources.streams import Options

_STRUCTURE = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'"|\\.', re.DOTALL)
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")


def shard_elements(shard: Shard, options: Options) -> Iterator[bytes | TooLong]:
    """The elements of the shard's rows, as they are in the stream."""
    return records_of(element_segments(shard_blocks(shard, options), closed=False))


def array_segments(blocks: Iterator[bytes]) -> Iterator[Segment]:
    """The elements of the array that fills the blocks; OSError if they hold something else."""
    head = next(blocks, b"")
    opened = _ARRAY.match(head)
    if opened is not None:
        yield Segment(opened[0], ends=True, blank=True)
        yield from element_segments(chain([head[opened.end() :]], blocks), closed=True)
    elif head.strip():
        raise OSError("not a JSON array; write [{...}, {...}] in UTF-8, or name JSON lines .jsonl")


def element_segments(blocks: Iterator[bytes], *, closed: bool) -> Iterator[Segment]:
    """The elements from the first byte on, up to the array's end, or (not closed) to the last byte.

    A comma between two elements is a blank segment, so an element has exactly its own bytes.
    """
    depth, in_string, held, empty = 0, False, b"", closed
    for block in blocks:
        data = held + block
        start = position = 0
        while match := (_IN_STRING if in_string else _STRUCTURE).search(data, position):
            position, sign = match.end(), match[0]
            if in_string or sign == b'"':
                in_string = in_string != (sign == b'"')
            elif depth == 0 and sign in b",]":
                element = data[start : match.start()]
                empty = empty and sign == b"]" and not element.strip()
                yield Segment(element, ends=True, blank=empty)
                if sign == b"]":
                    _require_end(chain([data[position:]], blocks))
                    return
                yield Segment(sign, ends=True, blank=True)
                start = position
            else:
                depth += 1 if sign in b"[{" else -1 if sign in b"]}" else 0
        # — a backslash and the byte that it escapes are searched together
        held = data[-1:] if in_string and position < len(data) and data.endswith(b"\\") else b""
        if rest := data[start : len(data) - len(held)]:
            empty = empty and not rest.strip()
            yield Segment(rest, ends=False, blank=empty)
    if closed:
        raise OSError("its JSON array is not closed; the file may be incomplete")
    yield Segment(held, ends=True, blank=False)


def _require_end(blocks: Iterator[bytes]) -> None:
    """OSError if something follows the array."""
    if any(block.strip() for block in blocks):
        raise OSError("something follows its JSON array; write one array a file")
