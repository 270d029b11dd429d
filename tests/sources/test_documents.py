"""What becomes of each value that a row can have: always one row, with its status."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pytest

from pipeline.sources import documents
from pipeline.sources.documents import (
    MAX_ID_CHARS,
    SCHEMA,
    RawRow,
    TooLong,
    documents_from,
    slices_from,
)

EMPTY_HASH = hashlib.sha256(b"").hexdigest()[:32]


def only_row(row: RawRow) -> dict[str, object]:
    (document,) = documents_from([row]).to_pylist()
    return dict(document)


@pytest.mark.parametrize("text", ["naïve 🙂".encode(), "naïve 🙂"], ids=["bytes", "str"])
def test_a_text_is_kept_hashed_and_counted_in_characters(text: object) -> None:
    assert only_row(RawRow(text, "a")) == {
        "doc_id": "a",
        "text": "naïve 🙂",
        "content_hash": hashlib.sha256("naïve 🙂".encode()).hexdigest()[:32],
        "n_chars": 7,
        "status": "ok",
    }


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (RawRow(""), "empty"),
        (RawRow(" \n\u3000"), "empty"),
        (RawRow(None), "error:no text"),
        (RawRow(7), "error:text is not a string"),
        (RawRow(["a"]), "error:text is not a string"),
        (RawRow(b"\xff"), "error:invalid UTF-8"),
        (RawRow("\ud83d"), "error:invalid UTF-8"),
        (RawRow(problem="not JSON"), "error:not JSON"),
        (RawRow(TooLong()), "error:longer than 268,435,456 bytes"),
    ],
)
def test_a_row_without_a_text_to_read_has_the_reason(row: RawRow, status: str) -> None:
    document = only_row(row)
    assert document["status"] == status
    if status != "empty":
        assert (document["text"], document["content_hash"]) == (None, EMPTY_HASH)
        assert document["n_chars"] == 0


@pytest.mark.parametrize(
    ("identifier", "doc_id"),
    [
        *[("a", "a"), (7, "7"), (b"x", "x"), ("", ""), (b"\xff", "\\xff"), ("\ud83d", "\\ud83d")],
        *[(1.0, "1"), (1.5, "1.5"), ("1.0", "1.0"), (1e16, "1e+16"), ([1.0], "[1.0]")],
        *[(True, "true"), (["a", False], '["a", false]'), ({}, "{}")],
        ({"b": None, "a": {"é": b"\xff"}}, '{"a": {"é": "\\\\xff"}, "b": null}'),
    ],
)
def test_the_id_is_written_as_a_string(identifier: object, doc_id: str) -> None:
    assert only_row(RawRow("text", identifier))["doc_id"] == doc_id


@pytest.mark.parametrize("missing", [None, float("nan")], ids=["None", "of pandas"])
def test_without_an_id_the_content_is_the_id(missing: object) -> None:
    document = only_row(RawRow("text", missing))
    assert document["doc_id"] == document["content_hash"]


@pytest.mark.parametrize("identifier", ["i" * (MAX_ID_CHARS + 1), TooLong()], ids=["str", "held"])
def test_an_id_that_is_too_long_is_not_kept(identifier: object) -> None:
    document = only_row(RawRow("text", identifier))
    assert document["status"] == "error:its id is longer than 4,096 characters"
    assert len(str(document["doc_id"])) == 32
    assert only_row(RawRow("text", "i" * MAX_ID_CHARS))["status"] == "ok"


@pytest.mark.parametrize("max_rows", [1, 3, 7, 100])
@pytest.mark.parametrize("max_chars", [1, 10, 10_000])
def test_slices_are_the_documents_and_each_is_bounded(
    max_rows: int, max_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "SLICE_ROWS", max_rows)
    monkeypatch.setattr(documents, "SLICE_CHARS", max_chars)
    rows = [RawRow("x" * (place % 9), place) for place in range(40)]
    slices = list(slices_from(iter(rows)))
    assert pa.concat_tables(slices).equals(documents_from(rows))
    for part in slices:
        lengths = part.column("n_chars").to_pylist()
        assert 0 < len(lengths) <= max_rows
        assert sum(lengths[:-1]) < max_chars


def test_no_rows_are_an_empty_table_and_no_slice() -> None:
    assert documents_from([]).equals(SCHEMA.empty_table())
    assert list(slices_from(iter([]))) == []
