"""JSON arrays against json.loads of the whole file: any values, any blocks, any cut."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from whole_shards import rows_read_in_blocks

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
