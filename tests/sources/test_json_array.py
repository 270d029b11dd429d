"""JSON arrays against json.loads of the whole file: any values, any blocks, any cut."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_shards import all_documents, rows_read_in_blocks

from pipeline.errors import UnreadableError
from pipeline.sources.source import InputObject, cut
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]
TEXTS = st.text(st.sampled_from('"\\[]{},:a é\n\U0001f642'), max_size=8)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.fixed_dictionaries({"text": TEXTS, "id": TEXTS, "more": VALUES}), max_size=8)


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
    read = rows_read_in_blocks(data, "json", target_bytes, block_bytes)
    assert [(row.values["text"], row.values["id"]) for row in read] == expected


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
