"""The input against a naive reading: each format, several targets, and what can be wrong."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fixtures import ENCODERS, arrow_bytes, parquet_bytes
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError
from pipeline.sources.source import InputObject, cut, find_objects
from pipeline.spec.schema import Columns

Write = Callable[[str, bytes], InputObject]
Row = tuple[str, str]
TARGETS = [1, 3000, 100_000, 10**9]


def read_all(input_object: InputObject, target_bytes: int, **columns: str | None) -> pa.Table:
    """The documents of all shards of a cut, which must be within the object and in order."""
    named = Columns(columns.get("text_column") or "text", columns.get("id_column"))
    shards = cut(input_object, named, target_bytes)
    edges = [0, *(shard.piece.end_row for shard in shards)]
    assert [shard.piece.start_row for shard in shards] == edges[:-1]
    return pa.concat_tables([all_documents(shard) for shard in shards])


def encoded(table: pa.Table, format: str) -> bytes:
    """A table as Parquet, or as an Arrow stream."""
    return parquet_bytes(table) if format == "parquet" else arrow_bytes(table)


def test_quotes_of_csv_are_no_part_of_the_identity_of_other_formats(write: Write) -> None:
    item = write("a.parquet", parquet_bytes(pa.table({"text": ["a"]})))
    [[plain], [quoted]] = (cut(item, Columns("text", None, None, q), 10**6) for q in (None, True))
    assert plain == quoted


def test_texts_below_a_name_with_a_dot_are_cut_by_their_size(write: Write) -> None:
    table = pa.table({"answers.text": [f"{n:05}" * 200 for n in range(1_000)]})
    shards = cut(write("a.parquet", parquet_bytes(table)), Columns("answers.text", None), 600_000)
    assert len(shards) == 3 and sum(shard.piece.text_bytes for shard in shards) > 10**6


@pytest.mark.parametrize("target_bytes", TARGETS)
def test_all_shards_of_any_cut_hold_the_rows_of_the_file(
    corpus: Path, rows: list[Row], target_bytes: int, tmp_path: Path
) -> None:
    (input_object,) = find_objects(str(corpus), tmp_path / "cache")
    documents = read_all(input_object, target_bytes, id_column="id")
    assert documents.column("doc_id").to_pylist() == [identifier for identifier, _ in rows]
    assert documents.column("text").to_pylist() == [text for _, text in rows]
    assert documents.column("content_hash").to_pylist() == [
        hashlib.sha256(text.encode()).hexdigest()[:32] for _, text in rows
    ]
    assert documents.column("n_chars").to_pylist() == [len(text) for _, text in rows]
    assert documents.column("status").to_pylist() == [
        "ok" if text.strip() else "empty" for _, text in rows
    ]


def test_a_smaller_target_makes_more_shards_and_one_row_is_the_least(
    corpus: Path, rows: list[Row], tmp_path: Path
) -> None:
    (input_object,) = find_objects(str(corpus), tmp_path / "cache")
    cuts, again = (
        [cut(input_object, Columns("text", "id"), target) for target in TARGETS] for _ in range(2)
    )
    assert cuts == again
    counts = list(map(len, cuts))
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (len(rows), 1)
    assert counts[1] > counts[2] > 1


def test_a_missing_column_is_named_with_those_there_are(corpus: Path, tmp_path: Path) -> None:
    (input_object,) = find_objects(str(corpus), tmp_path / "cache")
    with pytest.raises(SpecError) as raised:
        cut(input_object, Columns("body", "key"), 3000)
    text_problem, id_problem = raised.value.problems
    assert (text_problem.place, text_problem.value) == ("input.text", "body")
    assert (id_problem.place, id_problem.value) == ("input.id", "key")
    assert str(corpus) in text_problem.fix
    assert "id" in text_problem.fix.partition("it has: ")[2].split(", ")
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("kept", [0.3, 0.9])
@pytest.mark.parametrize(
    "corpus",
    # — a prefix of plain lines is a file of fewer lines
    [name for name in ENCODERS if not name.endswith((".jsonl", ".ndjson", ".json", ".csv"))],
    indirect=True,
)
def test_a_truncated_file_is_one_line(corpus: Path, tmp_path: Path, kept: float) -> None:
    data = corpus.read_bytes()
    corpus.write_bytes(data[: int(len(data) * kept)])
    (input_object,) = find_objects(str(corpus), tmp_path / "cache")
    with pytest.raises(StorageError) as raised:
        cut(input_object, Columns("text", None), 3000)
    assert str(raised.value).startswith(f"{corpus}: cannot be read: ")
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 1


def test_a_changed_object_is_not_read_under_its_old_name(corpus: Path, tmp_path: Path) -> None:
    (input_object,) = find_objects(str(corpus), tmp_path / "cache")
    shard = cut(input_object, Columns("text", None), 3000)[0]
    corpus.write_bytes(corpus.read_bytes() + b"\n")
    with pytest.raises(StorageError, match="changed while the job ran"):
        all_documents(shard)


def test_other_rows_in_as_many_bytes_are_noticed_by_their_count(write: Write) -> None:
    input_object = write("corpus.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    (shard,) = cut(input_object, Columns("text", None), 3000)
    Path(input_object.path).write_bytes(b'{"text": "one"}\n                \n'[:32])
    with pytest.raises(StorageError, match="it has 1 rows instead of 2"):
        all_documents(shard)


def test_a_key_that_a_later_row_of_the_first_hundred_has_is_there(write: Write) -> None:
    lines = [b"{}"] * 99 + [b'{"text": "late"}']
    assert len(cut(write("corpus.jsonl", b"\n".join(lines)), Columns("text", None), 10**6)) == 1


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.binary()),
    ],
    ids=str,
)
def test_every_kind_of_string_column_is_read(write: Write, kind: pa.DataType) -> None:
    texts = pa.array(["one", None, "thrée"])
    is_dictionary = pa.types.is_dictionary(kind)
    texts = texts.cast(kind.value_type if is_dictionary else kind)
    column = texts.dictionary_encode() if is_dictionary else texts
    table = pa.table({"text": column, "id": pa.array([1, None, 3], pa.uint32())})
    documents = read_all(write("corpus.parquet", parquet_bytes(table)), 600, id_column="id")
    assert documents.column("text").to_pylist() == ["one", None, "thrée"]
    empty_hash = hashlib.sha256(b"").hexdigest()[:32]
    assert documents.column("doc_id").to_pylist() == ["1", empty_hash, "3"]


def test_a_string_that_is_not_utf8_spoils_its_row_alone(write: Write) -> None:
    buffers = pa.array([b"fine", b"\xff\xfe", b"also"]).buffers()
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, buffers)})
    documents = read_all(write("corpus.parquet", parquet_bytes(table)), 10**6)
    assert documents.column("status").to_pylist() == ["ok", "error:invalid UTF-8", "ok"]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize("null", ["text", "id", "both"])
def test_a_column_of_the_type_null_is_one_of_nulls(write: Write, null: str, format: str) -> None:
    table = {"text": pa.array(["a", "b"]), "id": pa.array([1, 2])}
    table |= {name: pa.nulls(2) for name in table if null in (name, "both")}
    documents = read_all(
        write(f"corpus.{format}", encoded(pa.table(table), format)), 10**6, id_column="id"
    )
    status = "ok" if null == "id" else "error:no text"
    assert documents.column("status").to_pylist() == [status] * 2
    hashes = documents.column("content_hash").to_pylist()
    assert documents.column("doc_id").to_pylist() == (["1", "2"] if null == "text" else hashes)


@pytest.mark.parametrize(
    ("columns", "place", "kind"),
    [
        ({"text": pa.array([1])}, "input.text", "has int64 there"),
        ({"text": pa.array([True])}, "input.text", "has bool there; name a column of strings, or"),
        ({"text": pa.array([["a"]])}, "input.text", "has list<element: string> there"),
        ({"text": pa.array(["a"]), "id": pa.array([["a"]])}, "input.id", "has list<"),
    ],
)
def test_a_column_of_another_type_is_refused_with_its_type(
    write: Write, columns: dict[str, pa.Array], place: str, kind: str
) -> None:
    input_object = write("corpus.parquet", parquet_bytes(pa.table(columns)))
    with pytest.raises(SpecError) as raised:
        cut(input_object, Columns("text", "id" if "id" in columns else None), 3000)
    (problem,) = raised.value.problems
    assert problem.place == place
    assert kind in problem.fix


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["a.parquet", "b.csv", "c/d.jsonl"], ["a.parquet", "c/d.jsonl"]),
        (["a.csv", "b/c.tsv.gz", "info.json"], ["a.csv", "b/c.tsv.gz"]),
        (["a.json", "b.json.zst", "LICENSE.txt"], ["a.json", "b.json.zst"]),
    ],
)
def test_a_folder_means_its_files_of_one_kind(
    tmp_path: Path, names: list[str], taken: list[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    objects = find_objects(str(tmp_path), tmp_path / "cache")
    assert [each.path for each in objects] == [str(tmp_path / name) for name in taken]


def test_a_file_url_and_a_relative_path_are_the_same_object(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    input_object = write("corpus.jsonl", b'{"text": "a"}')
    monkeypatch.chdir(tmp_path)
    for form in ("corpus.jsonl", f"file://{input_object.path}", "./*.jsonl"):
        assert find_objects(form, tmp_path / "cache") == [input_object]


def test_a_link_is_read_and_a_bracket_in_a_name_is_no_glob(write: Write, tmp_path: Path) -> None:
    write("one.jsonl", b'{"text": "a"}')
    os.symlink(tmp_path / "one.jsonl", tmp_path / "two[1].jsonl")
    (input_object,) = find_objects(str(tmp_path / "two[1].jsonl"), tmp_path / "cache")
    assert (input_object.path, input_object.size_bytes) == (str(tmp_path / "two[1].jsonl"), 13)
    # — two names of one file
    (item,) = find_objects(f"{tmp_path}/*.jsonl", tmp_path / "cache")
    assert item.path == str(tmp_path / "one.jsonl")


@pytest.mark.parametrize("path", ["", "*.jsonl", os.fsdecode(b"caf\xe9.jsonl")])
def test_a_local_file_whose_name_is_not_utf8_is_refused_by_it(tmp_path: Path, path: str) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    for name in (b"caf\xe9.jsonl", "café.jsonl".encode()):
        (root / os.fsdecode(name)).write_bytes(b'{"text": "a"}')
    with pytest.raises(SpecError) as refused:
        find_objects(f"{root}/{path}", tmp_path / "cache")
    (problem,) = refused.value.problems
    assert (problem.place, problem.value) == ("input.path", f"{root}/caf\\xe9.jsonl")
    assert "not UTF-8; rename" in problem.fix and not (tmp_path / "cache").exists()
    str(refused.value).encode()
    assert len(find_objects(f"{root}/café.jsonl", tmp_path / "cache")) == 1


NO_FILE = "names no file; supported are .parquet "


@pytest.mark.parametrize(
    ("path", "named", "fix"),
    [
        ("xyz", None, NO_FILE),
        ("*.parquet", None, NO_FILE),
        ("nowhere/**", None, NO_FILE),
        ("none/corpus.jsonl", None, NO_FILE),
        ("corpsu.jsonl", None, "names no file; a similar name is 'corpus.jsonl'"),
        ("notes.pdf", "notes.pdf", "this kind of file is not supported; supported are .parquet "),
        ("*", "notes.pdf", "1 of 2 files are not .parquet "),
        # — the folder exists, so a similar name is no help
        ("data", None, "this folder has no supported file; supported are .parquet "),
        ("data2", None, "this folder has no supported file; supported are .parquet "),
        ("nonsense://corpus/*.jsonl", "nonsense://corpus/*.jsonl", "cannot be opened: "),
        ("data/**.jsonl", None, "cannot be opened: Invalid pattern: '**' can only be an entire"),
        ("{corpus,notes}.jsonl", None, "names no file; globs have no {a,b}: write * or ?"),
        ("corpus.json[k]", None, "names no file; in a glob, [ab] is one character: write [[]"),
        ("data[1]/*.jsonl", None, "names no file; in a glob, [ab] is one character: write [[]"),
    ],
)
def test_a_path_that_names_no_document_is_one_problem_with_the_fix(
    tmp_path: Path, path: str, named: str | None, fix: str
) -> None:
    root = "" if "://" in path else f"{tmp_path}/"
    (tmp_path / "notes.pdf").write_bytes(b"")
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    for folder in ("data", "data2"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data2" / "notes.pdf").write_bytes(b"")
    with pytest.raises(SpecError) as refused:
        find_objects(root + path, tmp_path / "cache")
    (problem,) = refused.value.problems
    assert (problem.place, problem.value) == ("input.path", root + (named or path))
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize("corpus", ["corpus.parquet"], indirect=True)
def test_only_the_row_groups_of_a_shard_are_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    original = pq.ParquetFile.iter_batches

    def spy(self: pq.ParquetFile, *args: object, **options: object) -> object:
        asked.append(options["row_groups"])
        assert options["columns"] == ["text"]
        return original(self, *args, **options)

    (input_object,) = find_objects(str(corpus), tmp_path / "cache")
    shards = cut(input_object, Columns("text", None), 30_000)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    assert len(shards) > 1
    groups = []
    for shard in shards:
        all_documents(shard)
        first, last = shard.piece.start_row // 23, (shard.piece.end_row - 1) // 23
        # — a shard continues the reader of the one before it
        assert asked == [[group] for group in range(first, last + 1) if group not in groups]
        groups += [group for (group,) in asked]
        asked.clear()
    assert groups == sorted(set(groups))
