"""Text formats against Python's own parsers: any rows, any blocks, any cut, in bounded memory."""

from __future__ import annotations

import csv
import gzip
import io
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from whole_shards import all_documents, rows_read_in_blocks

from pipeline.errors import SpecError
from pipeline.sources.shards import Shard
from pipeline.sources.source import InputObject, cut
from pipeline.sources.streams import BLOCK_BYTES
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]
HEADER = "text,id\n"
PIECES = st.sampled_from(
    ['"', '""', ",", "\t", "\n", "\r", "\r\n", "a", " ", "é", "\x00", "\x85", ',"', '",', "b,c\n"]
)
MARKS = st.sampled_from(["\ufeff", "\ufefb", '\ufeff"'])


def rows_of(data: str, delimiter: str, *, quoted: bool) -> list[tuple[list[str], bool]]:
    """The rows after the header as the csv module reads them, and whether a quote is closed."""
    quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    read = partial(csv.reader, delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
    held: list[str] = []

    def lines() -> Iterator[str]:
        for line in io.StringIO(data, newline=""):
            held.append(line)
            yield line

    rows = []
    for row in read(lines()):
        record = "".join(held)
        held.clear()
        several = "\n" in record.rstrip("\r\n")
        try:
            closed = len(list(read([record, ""], strict=several))) == 2
        except csv.Error:  # — text behind the quote that ends several lines
            closed = False
        rows += [(row, closed)] if row else []
    return rows[1:]


@given(
    st.lists(PIECES | MARKS, max_size=25).map("".join),
    st.sampled_from(["csv", "tsv"]),
    st.sampled_from([None, True, False]),
    st.integers(1, 2_000),
    st.integers(1, 9),
)
@example('"a""\n\r', "csv", None, 1, 2)
@example('"a\nb\tc\nd"', "tsv", None, 1, 2)
@example('\ufefb\n\ufeff"a\nb",c\n', "csv", None, 1, 2_000)
def test_the_rows_of_all_shards_are_those_of_the_csv_module(
    body: str, format: str, quoting: bool | None, target_bytes: int, block_bytes: int
) -> None:
    """TSV is read without quoting, unless the spec has `quoted: true`."""
    delimiter = {"csv": ",", "tsv": "\t"}[format]
    quoted = format == "csv" if quoting is None else quoting
    data = HEADER.replace(",", delimiter) + body
    expected: list[object] = []
    for row, closed in rows_of(data, delimiter, quoted=quoted):
        if not closed:
            expected.append("a quote is not closed")
        elif len(row) < 2 or any(row[2:]):
            expected.append(f"{len(row)} fields, and the header has 2")
        else:
            expected.append((row[0].encode(), row[1].encode()))
    rows = rows_read_in_blocks(data.encode(), format, target_bytes, block_bytes, quoting)
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


def test_a_quoted_name_behind_a_byte_order_mark_may_have_a_newline(write: Write) -> None:
    input_object = write("a.csv", '\ufeff"my\ntext",id\none,1\n'.encode())
    (shard,) = cut(input_object, Columns("my\ntext", "id"), 3000)
    assert all_documents(shard).column("text").to_pylist() == ["one"]


@pytest.mark.parametrize(
    ("name", "header", "fix"),
    [
        ("a.csv", "body,id", "has no such column; it has: body, id"),
        ("a.csv", "text,id,text", "has 2 such columns; it has: id, text, text"),
        ("a.csv", "id;text", "its columns are separated by ';'; separate them by commas"),
        ("a.csv", "id;body", "its columns are separated by ';'; separate them by commas"),
        ("a.csv", "id\ttext", "or by tabs in a .tsv file"),
        ("a.tsv", "id,text", "separated by ','"),
        ("a.tsv", '"id"\t"text"', "if its fields are in quotes, set input.quoted: true"),
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


LONG = 10 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("name", "start", "piece", "end", "chars", "blocks"),
    [
        ("a.jsonl", b'{"text": "short"}\n{"text": "', b"xxxx", b'"}\n', 4, 6),
        ("a.csv.gz", b'text\nshort\n"', b"x,\n", b'"', 3, 8),
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
        ("a.json", [b"", b" \n"]),
    ],
)
def test_a_file_without_a_row_makes_no_shard(write: Write, name: str, datas: list[bytes]) -> None:
    assert [cut(write(name, data), Columns("text", "id"), 3000) for data in datas] == [[]] * len(
        datas
    )


MERGED = 'id,text\n1,Good morning.\n2,"Late again\n3,You idiot.\n4,It rains.\n5,{}\n6,Thank you.\n'


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (MERGED.format("so he said."), ["Good morning.", None]),
        (MERGED.format('"so he said.'), ["Good morning.", None, "Thank you."]),
        ('id,text\n1,"fine\nlines"\r\n2,"late\r\n3,more\r\n', ["fine\nlines", None]),
        ('id,text\n1,so "he" said\n2,"done" he said\n', ['so "he" said', "done he said"]),
    ],
)
def test_a_row_of_lines_that_a_quote_merges_is_an_error(
    write: Write, data: str, texts: list[str | None]
) -> None:
    shards = cut(write("a.csv", data.encode()), Columns("text", "id"), 1)
    documents = pa.concat_tables(map(all_documents, shards))
    assert documents.column("text").to_pylist() == texts
    reasons = {status for status in documents.column("status").to_pylist() if status != "ok"}
    assert reasons <= {"error:a quote is not closed"}


@pytest.mark.parametrize(
    ("name", "data", "place"),
    [
        ("a.csv", MERGED.format("so he said."), ", line 3: a quote seems not to be closed, "),
        ("a.csv", MERGED.format('"so he said.'), ", line 3: a quote seems not to be closed, "),
        ("a.csv", MERGED.format('so he said."'), ", line 3: a quote seems not to be closed, "),
        ("a.csv", 'text,id\nfine,1\n"late,2\nnow,"3\n', ", line 3: "),
        ("a.csv", 'id,text\n1,"two\n\nlines"\n2,"late', ", line 5: "),
        ("a.csv", MERGED.format('"x') * 3, "; 3 rows of the file are like this; "),
        ("a.csv", 'id,text\n1,"fine\nlines"\r\n2,"late\r\n3,more\r\n', ", line 4: "),
    ],
)
def test_a_quote_that_may_merge_lines_is_named_with_its_line(
    write: Write, name: str, data: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    cut(write(name, data.encode()), Columns("text", "id"), 1)
    [record] = caplog.records
    assert record.levelname == "WARNING" and place in record.getMessage()
    assert record.getMessage().startswith(f"{write(name, b'').path}, line ")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", 'id,text\n1,"A letter.\n\nDear all,\n2 of us, at least"\n2,"He said ""no""."\n'),
        ("a.csv", 'id,text\r\n"1","a\r\nb"\r\n"2","c"\r\n'),
        ("a.csv", 'id,text\n1,so "he" said\n2,"done" he said\n'),
        ("a.tsv", 'id\ttext\n1\t"Late again\n2\tso he said"\n3\t"open\n'),
    ],
)
def test_quotes_that_are_balanced_or_are_no_quotes_are_no_reason_to_warn(
    write: Write, name: str, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    cut(write(name, data.encode()), Columns("text", "id"), 1)
    assert not caplog.records


def test_quotes_of_a_tsv_file_are_characters_and_no_line_is_lost(write: Write) -> None:
    texts = ["Good.", '"Late again', "No.", 'so he said"', '"both"', 'a "word"']
    data = "id\ttext\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(texts))
    file = write("a.tsv", data.encode())
    shards = cut(file, Columns("text", "id"), 1)
    documents = pa.concat_tables(map(all_documents, shards))
    assert documents.column("text").to_pylist() == texts
    # — with another way to read it, the rows are others, and so are their shards
    quoted_shards = cut(file, Columns("text", "id", quoted=True), 1)
    assert not {shard.id for shard in quoted_shards} & {shard.id for shard in shards}
    assert all(Shard.from_json(shard.to_json()) == shard for shard in [*quoted_shards, *shards])
    assert pa.concat_tables(map(all_documents, quoted_shards)).num_rows == 4


def test_a_file_without_a_column_is_cut_at_the_quotes_of_the_others(write: Write) -> None:
    file = write("a.tsv", b'text\n"p\nq"\nr\n')
    columns = Columns("text", "id", quoted=True)
    shards = cut(file, columns, 1, lacking=True)
    documents = pa.concat_tables(map(all_documents, shards))
    assert documents["text"].to_pylist() == ["p\nq", "r"]


@pytest.mark.parametrize(
    ("header", "shown"),
    [
        ('"a, b",c', "'a, b', c"),
        ('"two\nlines",c', "c, 'two\\nlines'"),
        (" id,date", "' id', date"),
        ("größe,doc.id", "doc.id, größe"),
        ("'x',y", "\"'x'\", y"),
    ],
)
def test_names_that_could_be_taken_for_others_are_quoted(
    write: Write, header: str, shown: str
) -> None:
    with pytest.raises(SpecError) as raised:
        cut(write("a.csv", f"{header}\n1,2\n".encode()), Columns("text", None), 3000)
    assert raised.value.problems[0].fix.endswith(f"no such column; it has: {shown}")
