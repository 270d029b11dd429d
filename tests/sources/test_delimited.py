"""CSV and TSV against Python's csv module: any bytes, any blocks, any cut."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from whole_shards import all_documents, rows_read_in_blocks

from pipeline.errors import SpecError
from pipeline.sources.source import InputObject, cut
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]
HEADER = "text,id\n"
PIECES = st.sampled_from(
    ['"', '""', ",", "\t", "\n", "\r", "\r\n", "a", " ", "é", "\x00", "\x85", ',"', '",', "b,c\n"]
)


def rows_of(data: str, delimiter: str = ",") -> list[list[str]]:
    """The rows as the csv module reads them, without blank lines and without the header."""
    lines = csv.reader(io.StringIO(data, newline=""), delimiter=delimiter)
    return [row for row in lines if row][1:]


def is_open(data: str, delimiter: str = ",") -> bool:
    """Whether the data ends within quotes: then what is added is a part of the last field."""
    return len(rows_of(f"{data}\nmore\nrows", delimiter)) < len(rows_of(data, delimiter)) + 2


@given(
    st.lists(PIECES, max_size=25).map("".join),
    st.sampled_from(["csv", "tsv"]),
    st.integers(1, 2_000),
    st.integers(1, 9),
)
@example('"a""\n\r', "csv", 1, 2)
def test_the_rows_of_all_shards_are_those_of_the_csv_module(
    body: str, format: str, target_bytes: int, block_bytes: int
) -> None:
    delimiter = {"csv": ",", "tsv": "\t"}[format]
    data = HEADER.replace(",", delimiter) + body
    expected: list[object] = []
    for row in rows_of(data, delimiter):
        if len(row) < 2 or any(row[2:]):
            expected.append(f"{len(row)} fields, and the header has 2")
        else:
            expected.append((row[0].encode(), row[1].encode()))
    if is_open(data, delimiter):
        expected[-1] = "a quote is not closed"
    rows = rows_read_in_blocks(data.encode(), format, target_bytes, block_bytes)
    assert [row.problem or (row.values["text"], row.values["id"]) for row in rows] == expected


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_a_byte_order_mark_and_every_kind_of_newline_are_read(
    write: Write, mark: bytes, newline: bytes
) -> None:
    lines = [b'"id",text', b'1,"two', b'lines"', b"", b'2,"a ""word"""']
    input_object = write("a.csv", mark + newline.join(lines))
    documents = pa.concat_tables(map(all_documents, cut(input_object, Columns("text", "id"), 1)))
    assert documents.column("doc_id").to_pylist() == ["1", "2"]
    assert documents.column("text").to_pylist() == [f"two{newline.decode()}lines", 'a "word"']


@pytest.mark.parametrize(
    ("name", "header", "fix"),
    [
        ("a.csv", "body,id", "has no such column; it has: body, id"),
        ("a.csv", "text,id,text", "has 2 such columns; it has: id, text, text"),
        ("a.csv", "id;text", "its columns are separated by ';'; separate them by commas"),
        ("a.csv", "id;body", "its columns are separated by ';'; separate them by commas"),
        ("a.csv", "id\ttext", "or by tabs in a .tsv file"),
        ("a.tsv", "id,text", "separated by ','"),
        ("a.csv", "x" * 5_000, "it has: " + "x" * 60 + "..."),
    ],
)
def test_a_header_without_the_column_is_one_line_with_the_fix(
    write: Write, name: str, header: str, fix: str
) -> None:
    with pytest.raises(SpecError) as raised:
        cut(write(name, f"{header}\n1,2\n".encode()), Columns("text", None), 3000)
    (problem,) = raised.value.problems
    assert problem.place == "input.text"
    assert fix in problem.fix
    assert len(problem.fix) < 400
