"""Which part of a long document an answer is about, in label files, exports and conditions."""

from __future__ import annotations

from typing import Any

import pytest
from changing_corpus import Corpus
from fake_engine import p_of

from pipeline.ledger.dataset import open_labels
from pipeline.ledger.flat import flat_columns

MOST, OVERLAP = 16, 4
CHUNKED = {"documents": {"max_tokens": MOST, "too_long": "chunk", "overlap_tokens": OVERLAP}}
TEXTS = [
    "short",
    "a text of forty and a few more letters...",
    "x" * 100,
    "",
    "été à Noël, où ça " * 4,
]


def parts(text: str) -> dict[tuple[int, int], str]:
    """The chunks of a text of ASCII, whose tokens are its letters, by where they begin and end."""
    last = len(text) - MOST
    return {(n, n + MOST): text[n : n + MOST] for n in [*range(0, last, MOST - OVERLAP), last]}


@pytest.fixture
def chunked(plain: Corpus) -> Corpus:
    plain.settings = CHUNKED
    plain.write("d", TEXTS)
    return plain


def test_the_row_of_a_long_document_has_the_chunk_that_decided(chunked: Corpus) -> None:
    chunked.run()
    rows, question = chunked.rows(), chunked.task["question"]
    for name, text in chunked.texts.items():
        row = rows[name]
        if row["n_chunks"] <= 1:
            assert row["chunk"] is None
            continue
        start, end = row["chunk"]["start"], row["chunk"]["end"]
        if text.isascii():
            p = {place: p_of(question, part) for place, part in parts(text).items()}
            assert (start, end) == min(p, key=lambda place: p[place])
            assert row["p"]["toxic"] == pytest.approx(p[start, end], abs=1e-5)
        else:
            # — a token is a byte, and a letter whose first byte is another chunk's is in both
            assert MOST <= len(text[start:end].encode()) <= MOST + 2
    assert sum(row["chunk"] is not None for row in rows.values()) == 3
    names = [
        column.name for column in flat_columns(open_labels(str(chunked.folder / "out")).schema)
    ]
    assert {"toxic_chunk_start", "toxic_chunk_end"} < {*names}
    chunked.verify()


def test_of_several_labels_it_is_that_of_the_most_probable_one(chunked: Corpus) -> None:
    chunked.task = {"name": "topics", "kind": "multi", "labels": ["art", "law"]}
    chunked.task["question"] = "Is it {label}?"
    chunked.run()
    row = chunked.rows()["d-2"]
    part = "x" * 100
    place = row["chunk"]["start"], row["chunk"]["end"]
    best = max(row["p"], key=lambda label: row["p"][label])
    assert row["p"][best] == pytest.approx(1 - p_of(f"Is it {best}?", parts(part)[place]), abs=1e-5)


@pytest.mark.parametrize("change", [{"chunks": "mean"}, {"documents": {"max_tokens": MOST}}])
def test_where_no_chunk_decides_there_is_no_column(chunked: Corpus, change: dict[str, Any]) -> None:
    if "documents" in change:
        chunked.settings = change
    else:
        chunked.task |= change
    chunked.run()
    assert "chunk" not in chunked.rows()["d-1"]


def test_a_condition_reads_rows_with_a_chunk(chunked: Corpus) -> None:
    chunked.others = [{**chunked.task, "name": "later", "when": "toxic.p.toxic > 0.5"}]
    chunked.run()
    later = chunked.rows("later")
    for name, row in chunked.rows("toxic").items():
        is_asked = (row["p"] or {}).get("toxic", 0) > 0.5
        assert (later[name]["chunk"] is not None) == (is_asked and row["n_chunks"] > 1)
    chunked.verify()
