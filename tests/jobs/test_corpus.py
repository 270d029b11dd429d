"""The demo corpus: what is shipped, and the script that built it.

Knows the corpus files, their source and jobs/corpus/build.py. Knows nothing of the pipeline.
"""

import csv
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
import zstandard

from jobs.corpus import build as corpus

SHIPPED = Path(corpus.__file__).parent
SOURCE = SHIPPED / "source" / "toxicity_en.csv"
COMMENT_FILES = tuple(f"parts/comments-{n:03d}.jsonl.zst" for n in range(4))
THREAD_FILES = tuple(f"parts/threads-{n:03d}.parquet" for n in range(4))
FILES = (*COMMENT_FILES, *THREAD_FILES, "gold.jsonl")

# Both libraries may compress the same rows to other bytes in another version.
BUILT_WITH = {"pyarrow": "26.0.1", "libzstd": (1, 5, 7)}
INSTALLED = {"pyarrow": pyarrow.__version__, "libzstd": zstandard.ZSTD_VERSION}

Row = dict[str, Any]


def json_lines(data: bytes) -> list[Row]:
    return [json.loads(line) for line in data.decode().split("\n")[:-1]]


def read_rows(path: Path) -> list[Row]:
    """The rows of one file of the corpus, whatever its format."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    data = path.read_bytes()
    return json_lines(zstandard.decompress(data) if path.suffix == ".zst" else data)


def comments_of(document: Row) -> list[str]:
    """The comments of a document, split by the numbers in front of them."""
    if document["kind"] == "comment":
        return [document["text"]]
    return re.split(r"(?:^|\n)Comment \d+: ", document["text"])[1:]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_source(folder: Path, data: str | bytes) -> Path:
    source = folder / "source.csv"
    source.write_bytes(data if isinstance(data, bytes) else data.encode())
    return source


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("corpus")
    corpus.build(SOURCE, out)
    return out


@pytest.fixture(scope="module")
def documents() -> list[Row]:
    return [row for name in (*COMMENT_FILES, *THREAD_FILES) for row in read_rows(SHIPPED / name)]


@pytest.fixture(scope="module")
def threads(documents: Sequence[Row]) -> list[Row]:
    return [document for document in documents if document["kind"] == "thread"]


@pytest.fixture(scope="module")
def gold() -> list[Row]:
    return read_rows(SHIPPED / "gold.jsonl")


@pytest.fixture(scope="module")
def source_toxicity() -> dict[str, bool]:
    """Each text of the source with its label, read without the script."""
    with SOURCE.open(encoding="utf-8", newline="") as lines:
        return {row["text"].strip(): row["is_toxic"] == "Toxic" for row in csv.DictReader(lines)}


@pytest.mark.parametrize("name", FILES)
def test_rebuilding_gives_the_rows_that_are_shipped(rebuilt: Path, name: str) -> None:
    assert read_rows(rebuilt / name) == read_rows(SHIPPED / name)


@pytest.mark.skipif(INSTALLED != BUILT_WITH, reason=f"shipped files were built with {BUILT_WITH}")
@pytest.mark.parametrize("name", FILES)
def test_rebuilding_gives_the_bytes_that_are_shipped(rebuilt: Path, name: str) -> None:
    assert digest(rebuilt / name) == digest(SHIPPED / name)


def test_building_twice_gives_the_same_bytes(rebuilt: Path, tmp_path: Path) -> None:
    corpus.build(SOURCE, tmp_path)
    assert [name for name in FILES if digest(tmp_path / name) != digest(rebuilt / name)] == []


def test_the_order_of_the_source_does_not_change_the_documents() -> None:
    comments = corpus.distinct(corpus.read_comments(SOURCE))
    assert corpus.compose(comments) == corpus.compose(comments[::-1])


def test_building_writes_no_other_file(rebuilt: Path) -> None:
    written = {path.relative_to(rebuilt).as_posix() for path in rebuilt.rglob("*.*")}
    assert written == set(FILES)


@pytest.mark.parametrize(
    "name, rows", [*((f, 50) for f in COMMENT_FILES), *((f, 6) for f in THREAD_FILES)]
)
def test_each_file_has_its_rows(name: str, rows: int) -> None:
    assert len(read_rows(SHIPPED / name)) == rows


@pytest.mark.parametrize("name", THREAD_FILES)
def test_row_groups_have_three_threads(name: str) -> None:
    metadata = pq.read_metadata(SHIPPED / name)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [3, 3]


def test_every_document_id_is_unique_and_in_gold_in_order(
    documents: Sequence[Row], gold: Sequence[Row]
) -> None:
    ids = [document["id"] for document in documents]
    assert len(set(ids)) == len(ids)
    assert [row["id"] for row in gold] == ids


def test_no_comment_is_in_two_documents(documents: Sequence[Row]) -> None:
    comments = [comment for document in documents for comment in comments_of(document)]
    assert len(set(comments)) == len(comments)


def test_gold_follows_from_the_labels_of_the_source(
    documents: Sequence[Row], gold: Sequence[Row], source_toxicity: dict[str, bool]
) -> None:
    for document, row in zip(documents, gold, strict=True):
        toxicity = [source_toxicity[comment] for comment in comments_of(document)]
        assert row == {
            "id": document["id"],
            "toxic": "toxic" if any(toxicity) else "clean",
            "toxic_share": pytest.approx(sum(toxicity) / len(toxicity), abs=5e-5),
            "n_comments": len(toxicity),
        }


def test_no_text_has_a_byte_order_mark_a_carriage_return_or_outer_spaces(
    documents: Sequence[Row],
) -> None:
    texts = [document["text"] for document in documents]
    assert [text for text in texts if re.search("[\ufeff\r]", text) or text != text.strip()] == []


def test_threads_have_ten_to_forty_comments(threads: Sequence[Row]) -> None:
    counts = [len(comments_of(thread)) for thread in threads]
    assert min(counts) >= 10 and max(counts) <= 40


def test_threads_have_about_a_thousand_tokens_of_text(threads: Sequence[Row]) -> None:
    lengths = [len(thread["text"]) for thread in threads]
    assert min(lengths) >= 3_800 and max(lengths) <= 4_200


def test_half_of_the_single_comments_are_toxic(gold: Sequence[Row]) -> None:
    labels = [row["toxic"] for row in gold if row["id"].startswith("comment-")]
    assert (labels.count("toxic"), labels.count("clean")) == (100, 100)


def test_threads_go_from_no_toxic_comment_to_mostly_toxic(gold: Sequence[Row]) -> None:
    shares = sorted(row["toxic_share"] for row in gold if row["id"].startswith("thread-"))
    assert shares.count(0.0) == 7
    assert 0 < shares[8] < 0.1
    assert shares[-1] > 0.85


def test_a_source_is_cleaned_of_everything_but_its_human_text(tmp_path: Path) -> None:
    source = write_source(
        tmp_path,
        "\ufeffis_toxic,text\r\n"
        'Not Toxic,"\ufeff  two\r\nlines, ""quoted"" 🖕 "\r\n'
        "\r\n"
        'Toxic,"a\rb"\r\n',
    )
    assert corpus.read_comments(source) == [
        corpus.Comment(text='two\nlines, "quoted" 🖕', toxic=False),
        corpus.Comment(text="a\nb", toxic=True),
    ]


@pytest.mark.parametrize(
    "data, message",
    [
        ("text\nhello\n", "line 1: the columns must be text, is_toxic .got text.; rename"),
        ("", "line 1: the columns must be text, is_toxic .got none.; rename"),
        ("text,is_toxic\nhi,Toxic\nho,Rude\n", "line 3: is_toxic must be .* .got 'Rude'.; correct"),
        ("text,is_toxic\na,b,Toxic\n", "line 2: 3 fields, not 2 .got .*; quote a text"),
        ('text,is_toxic\n"open,Toxic\n', "line 2: unexpected end of data; double each quote"),
        (b"text,is_toxic\n\xff,Toxic\n", r"byte 14 is not UTF-8 .got b'\\xff'.; save the file"),
    ],
    ids=["missing column", "empty file", "unknown label", "bare comma", "open quote", "not UTF-8"],
)
def test_a_malformed_source_is_refused_with_place_value_and_fix(
    tmp_path: Path, data: str | bytes, message: str
) -> None:
    source = write_source(tmp_path, data)
    with pytest.raises(ValueError, match=f"^{re.escape(str(source))}: {message}"):
        corpus.read_comments(source)


def test_one_text_with_two_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="'hi' is both Toxic and Not Toxic; keep one"):
        corpus.distinct([corpus.Comment("hi", toxic=True), corpus.Comment("hi", toxic=False)])


@pytest.mark.parametrize(
    "rows, message",
    [
        (10, "100 with toxic=True are needed .got 10.; use a larger source"),
        (100, "needs one more with toxic=False and none is left .*; use a larger source"),
    ],
)
def test_a_source_that_is_too_small_is_refused(rows: int, message: str) -> None:
    comments = [
        corpus.Comment(f"{toxic} {number}", toxic)
        for number in range(rows)
        for toxic in (True, False)
    ]
    with pytest.raises(ValueError, match=message):
        corpus.compose(comments)


def test_the_command_writes_where_it_is_told(tmp_path: Path) -> None:
    assert corpus.main(["--source", str(SOURCE), "--out", str(tmp_path)]) == 0
    assert read_rows(tmp_path / "gold.jsonl") == read_rows(SHIPPED / "gold.jsonl")


def test_the_command_says_on_one_line_what_to_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_source(tmp_path, "text\nhello\n")
    assert corpus.main(["--source", str(source), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
