"""JSON arrays against json.loads of the whole file: any values, any blocks, any cut."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_shards import all_documents

from pipeline.errors import SpecError, UnreadableError
from pipeline.sources import records
from pipeline.sources.source import InputObject, cut, every_row
from pipeline.sources.streams import BLOCK_BYTES
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]
TEXTS = st.text(st.sampled_from('"\\[]{},:a é\n\U0001f642'), max_size=8)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.fixed_dictionaries({"text": TEXTS, "id": TEXTS, "more": VALUES}), max_size=8)


def read(data: bytes, target_bytes: int, block_bytes: int) -> list[tuple[object, object]]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "BLOCK_BYTES", block_bytes)
        path = Path(folder) / "a.json"
        path.write_bytes(data)
        shards = cut(
            InputObject(str(path), len(data), "", "json"), Columns("text", "id"), target_bytes
        )
        return [(row.text, row.id) for shard in shards for row in every_row(shard, {})]


@given(
    ROWS,
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.integers(1, 2_000),
    st.integers(16, 40),
)
def test_the_rows_of_all_shards_are_the_elements_of_the_array(
    rows: list[dict[str, object]],
    indent: int | None,
    ascii: bool,
    target_bytes: int,
    block_bytes: int,
) -> None:
    data = json.dumps(rows, indent=indent, ensure_ascii=ascii).encode()
    expected = [(row["text"], row["id"]) for row in rows]
    assert read(data, target_bytes, block_bytes) == expected


def test_an_element_that_is_no_object_or_has_no_text_is_a_row_that_says_so(write: Write) -> None:
    data = b'\xef\xbb\xbf [ {"text": "a"}, 3, [{"text": "b"}, 1], {"id": 1},'
    data += b'{"text": "\xff"}, , {"text" "c"},]\n'
    for target_bytes in (1, 10**6):
        shards = cut(write("a.json", data), Columns("text", None), target_bytes)
        status = [s for shard in shards for s in all_documents(shard).column("status").to_pylist()]
        assert status == [
            "ok",
            "error:not an object",
            "error:not an object",
            "error:no text",
            "error:invalid UTF-8",
            "error:not JSON",
            "error:not JSON",
            "error:not JSON",
        ]


@pytest.mark.parametrize("data", [b"", b" \n", b"[]", b"[ \n ]\n", b"\xef\xbb\xbf[]"])
def test_an_array_without_elements_makes_no_shard(write: Write, data: bytes) -> None:
    assert cut(write("a.json", data), Columns("text", None), 3000) == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"text": "a"}\n{"text": "b"}\n', "not a JSON array; write .* or name JSON lines .jsonl"),
        (b'{"data": [{"text": "a"}]}', "not a JSON array"),
        (b'[{"text": "a"}, {"text": "b"}', "its JSON array is not closed"),
        (b'[{"text": "a"}][{"text": "b"}]', "something follows its JSON array"),
        ('[{"text": "a"}]'.encode("utf-16"), "not a JSON array; write .* in UTF-8"),
    ],
)
def test_a_file_that_is_no_array_is_one_line(write: Write, data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        cut(write("a.json", data), Columns("text", None), 3000)


def test_a_key_that_no_element_has_is_named_with_those_there_are(write: Write) -> None:
    with pytest.raises(SpecError, match="has no such column; it has: body, id"):
        cut(write("a.json", b'[{"id": 1, "body": "a"}]'), Columns("text", None), 3000)


def test_an_element_longer_than_many_blocks_is_cut_in_the_memory_of_a_few(write: Write) -> None:
    long = b'{"text": "' + b"x\\n" * (10 * BLOCK_BYTES) + b'"}'
    input_object = write("a.json", b'[{"text": "short"}, ' + long + b"]")
    tracemalloc.start()
    shards = cut(input_object, Columns("text", None), 10_000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(shard.piece.start_row, shard.piece.end_row) for shard in shards] == [(0, 1), (1, 2)]
    assert peak_bytes < 9 * BLOCK_BYTES
