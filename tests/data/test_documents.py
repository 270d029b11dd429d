"""What becomes of each value that a row can have: always one row, with its status."""

from __future__ import annotations

import hashlib

import pytest

from pipeline.data.documents import SCHEMA, RawRow, documents_from

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
    ],
)
def test_a_row_without_a_text_to_read_says_why(row: RawRow, status: str) -> None:
    document = only_row(row)
    assert document["status"] == status
    if status != "empty":
        assert (document["text"], document["content_hash"]) == (None, EMPTY_HASH)
        assert document["n_chars"] == 0


@pytest.mark.parametrize(
    ("identifier", "doc_id"),
    [("a", "a"), (7, "7"), (b"x", "x"), ("", ""), (b"\xff", "\\xff"), ("\ud83d", "\\ud83d")],
)
def test_the_id_is_written_as_a_string(identifier: object, doc_id: str) -> None:
    assert only_row(RawRow("text", identifier))["doc_id"] == doc_id


def test_without_an_id_the_content_is_the_id() -> None:
    document = only_row(RawRow("text"))
    assert document["doc_id"] == document["content_hash"]


def test_no_rows_give_the_same_columns() -> None:
    assert documents_from([]).schema == SCHEMA
