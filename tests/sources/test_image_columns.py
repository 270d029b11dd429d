"""Rows with images: bytes or paths in tables, JSON and WebDataset; what has none is named."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DocumentError, SpecError, StorageError
from pipeline.filters.writers import kept_rows
from pipeline.sources import image_files
from pipeline.sources.image_files import image_of
from pipeline.sources.shards import Shard
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.spec.schema import Columns
from pipeline.stores.retries import RetryPolicy

IMAGES = [b"first image", b"second image", b"third \x00\xff image"]
IMAGE_ALONE = Columns(None, "id", "image")

Row = dict[str, Any]


def shards_of(path: Path, columns: Columns, target_bytes: int = 10**9) -> list[Shard]:
    (item,) = find_objects(str(path), path.parent / "cache")
    return cut(item, columns, target_bytes)


def read(path: Path, columns: Columns, target_bytes: int = 10**9) -> list[Row]:
    """The rows of all documents of a file."""
    shards = shards_of(path, columns, target_bytes)
    tables = (table for shard in shards for table in read_documents(shard))
    return [row for table in tables for row in table.to_pylist()]


def as_parquet(folder: Path, images: pa.Array) -> Path:
    pq.write_table(
        pa.table({"id": ["a", "b", "c"], "image": images}), folder / "t.parquet", row_group_size=2
    )
    return folder / "t.parquet"


def as_arrow(folder: Path, images: pa.Array) -> Path:
    table = pa.table({"id": ["a", "b", "c"], "image": images})
    with pa.ipc.new_file(folder / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    return folder / "t.arrow"


def as_jsonl(folder: Path, images: pa.Array) -> Path:
    rows = zip("abc", images.to_pylist(), strict=True)
    lines = (json.dumps({"id": id, "image": image}) for id, image in rows)
    (folder / "t.jsonl").write_text("\n".join(lines))
    return folder / "t.jsonl"


def as_tar(path: Path, rows: Sequence[tuple[str, dict[str, bytes]]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for key, members in rows:
            for extension, data in members.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def samples() -> list[tuple[str, dict[str, bytes]]]:
    return [
        ("a/0001", {"png": IMAGES[0], "txt": b"a dog", "json": b"{}"}),
        ("a/0002", {"txt": b"a cat", "png": IMAGES[1] * 2_000}),
        ("b/0001", {"PNG": IMAGES[2], "txt": "größer".encode()}),
        ("no-image", {"txt": b"none"}),
        ("name.with.dots", {"png": b"x", "txt": b"y"}),
    ]


def as_samples(folder: Path, _: pa.Array) -> Path:
    return as_tar(folder / "t.tar", samples())


def as_words(name: str) -> Callable[[Path, pa.Array], Path]:
    def write(folder: Path, _: pa.Array) -> Path:
        (folder / name).write_text("id,image\na,b\n")
        return folder / name

    return write


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The names of the images as files beside the table."""
    (tmp_path / "images").mkdir()
    for number, data in enumerate(IMAGES):
        (tmp_path / "images" / f"{number}.png").write_bytes(data)
    return [f"images/{number}.png" for number in range(len(IMAGES))]


@pytest.mark.parametrize("write", [as_parquet, as_arrow, as_jsonl])
@pytest.mark.parametrize("form", ["bytes", "large bytes", "paths", "absolute paths", "structs"])
def test_images_are_bytes_or_paths_or_structs_of_both(
    write: Callable[[Path, pa.Array], Path], form: str, files: list[str], tmp_path: Path
) -> None:
    structs = [
        {"bytes": IMAGES[0], "path": None},
        {"bytes": None, "path": files[1]},
        {"bytes": IMAGES[2], "path": "images/0.png"},  # the bytes are what counts
    ]
    columns = {
        "bytes": pa.array(IMAGES, pa.binary()),
        "large bytes": pa.array(IMAGES, pa.large_binary()),
        "paths": pa.array(files),
        "absolute paths": pa.array([str(tmp_path / name) for name in files]),
        "structs": pa.array(structs, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    }
    if write is as_jsonl and "paths" not in form:
        pytest.skip("JSON has no bytes")
    rows = read(write(tmp_path, columns[form]), IMAGE_ALONE)
    assert [(row["doc_id"], row["image"], row["text"], row["status"]) for row in rows] == [
        (id, image, "", "ok") for id, image in zip("abc", IMAGES, strict=True)
    ]


def test_an_id_is_the_hash_of_image_and_text(tmp_path: Path) -> None:
    table = pa.table({"image": [b"x", b"x", b"xy", b"x"], "text": ["y", "y", "", "z"]})
    pq.write_table(table, tmp_path / "t.parquet")
    rows = read(tmp_path / "t.parquet", Columns("text", None, "image"))
    first, second, third, fourth = (row["doc_id"] for row in rows)
    assert first == second and len({first, third, fourth}) == 3
    (tmp_path / "text").mkdir()
    pq.write_table(table, tmp_path / "text" / "t.parquet")
    texts = read(tmp_path / "text" / "t.parquet", Columns("text", None))
    assert {row["doc_id"] for row in texts}.isdisjoint({first, third, fourth})
    assert "image" not in texts[0]


def test_what_is_no_image_is_a_row_with_the_reason(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "MAX_IMAGE_BYTES", 20)
    os.mkfifo(tmp_path / "images" / "fifo")
    (tmp_path / "images" / "large").write_bytes(bytes(21))
    (tmp_path / "images" / "loop").symlink_to("loop")
    values: list[Any] = [
        files[0], None, "", "images/none.png", "images", "images/fifo", "images/large", 7,
        "images/0.png/below", "a\0b", {"path": files[1]}, {"bytes": None},
        "A" * 300, "A" * 1_025, "images/loop",
    ]  # fmt: skip
    lines = (json.dumps({"id": f"{n}", "image": value}) for n, value in enumerate(values))
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    rows = read(tmp_path / "t.jsonl", IMAGE_ALONE)
    assert [row["status"].removeprefix("error:") for row in rows] == [
        "ok",
        "no image",
        "its image is neither bytes nor a path",
        "there is no image 'images/none.png'",
        "the image 'images' is not a file",
        "the image 'images/fifo' is not a file",
        "the image is longer than 20 bytes",
        "its image is neither bytes nor a path",
        "there is no image 'images/0.png/below'",
        "the path of its image has a NUL",
        "ok",
        "no image",
        f"there is no image {'A' * 200!r}",
        "its image is a text of 1,025 characters and no path",
        "there is no image 'images/loop'",
    ]


def test_a_store_of_images_that_does_not_answer_fails_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = RetryPolicy(0.2, 0.2, first_wait_s=0.01)
    monkeypatch.setattr("pipeline.stores.retries.retry.__defaults__", (policy,))
    with pytest.raises(StorageError, match=r"http://127.0.0.1:9/a.png: cannot be read"):
        image_of("a.png", path="http://127.0.0.1:9/t.jsonl", options={})


@pytest.mark.parametrize(
    ("table", "image"),
    [
        ("/in/t.jsonl", "http://127.0.0.1:9/a.png"),
        ("/in/t.jsonl", "file:///etc/passwd"),
        ("/in/t.jsonl", "simplecache::http://127.0.0.1:9/a.png"),
        ("s3://bucket/t.jsonl", "/etc/passwd"),
        ("s3://bucket/t.jsonl", "http://127.0.0.1:9/a.png"),
    ],
)
def test_a_row_cannot_make_requests_to_other_file_systems(table: str, image: str) -> None:
    with pytest.raises(DocumentError, match="is in another file system than its row"):
        image_of(image, path=table, options={})


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder of input, in a folder with a file that its rows may not name."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "in2").mkdir()
    (tmp_path / "in2" / "a.png").write_bytes(b"other")
    (tmp_path / "in" / "images").mkdir(parents=True)
    (tmp_path / "in" / "images" / "a.png").write_bytes(b"own")
    (tmp_path / "in" / "images" / "linked.png").symlink_to("../../secret.png")
    (tmp_path / "in" / "out").symlink_to("..")
    (tmp_path / "in" / "own.png").symlink_to("images/a.png")
    (tmp_path / "in" / "img:1.png").write_bytes(b"own")
    return tmp_path / "in"


OUTSIDE = """/etc/passwd ../secret.png images/../../secret.png images/linked.png out/secret.png
    {beside}/../secret.png {beside}2/a.png ../in2/a.png /dev/zero"""


@pytest.mark.parametrize("image", OUTSIDE.split())
def test_an_image_outside_the_folder_of_its_row_is_not_read(image: str, beside: Path) -> None:
    with pytest.raises(DocumentError, match="is outside the folder or bucket of its row"):
        image_of(image.format(beside=beside), path=f"{beside}/t.jsonl", options={})


@pytest.mark.parametrize(
    "image",
    [
        "images/a.png",
        "images/../own.png",
        "own.png",
        "{beside}/images/a.png",
        "./own.png",
        "img:1.png",
    ],
)
def test_an_image_below_the_folder_of_its_row_is_read(image: str, beside: Path) -> None:
    (beside.parent / "link").symlink_to(beside.name)
    for folder in (beside, beside.parent / "link"):
        path = f"{folder}/t.jsonl"
        assert image_of(image.format(beside=beside), path=path, options={}) == b"own"


@pytest.mark.parametrize(
    ("table", "image"),
    [
        ("s3://bucket/in/t.jsonl", "s3://bucket2/a.png"),
        ("s3://bucket/in/t.jsonl", "s3://other/a.png"),
        ("http://host:1/in/t.jsonl", "http://host:12/a.png"),
        ("http://host/in/t.jsonl", "http://host@other/a.png"),
        ("hf://datasets/org/name@main/t.jsonl", "hf://datasets/org/private@main/a.png"),
        ("hf://datasets/org/name@main/t.jsonl", "../../private@main/a.png"),
    ],
)
def test_an_image_of_another_bucket_host_or_repository_is_not_fetched(
    table: str, image: str
) -> None:
    with pytest.raises(DocumentError, match="is outside the folder or bucket of its row"):
        image_of(image, path=table, options={})


@pytest.mark.parametrize(
    ("write", "values", "column", "fix"),
    [
        (as_parquet, pa.array([1, 2, 3]), "image", "int64 there; name a column of bytes or of"),
        (as_parquet, pa.array([{"a": 1}] * 3), "image", "struct<a: int64> there; name a column"),
        (as_parquet, pa.array(["a"] * 3), "picture", "no such column; it has: id, image"),
        (as_jsonl, pa.array(["a"] * 3), "picture", "no such column; it has: id, image"),
        (as_words("t.csv"), None, "image", ".csv files have no images; use parquet, "),
        (as_words("t.tsv"), None, "image", ".tsv files have no images; use parquet, "),
        (as_words("t.txt"), None, "image", ".txt files have no images; use parquet, "),
        (as_samples, None, "jpg", "no such column; it has: __key__, json"),
    ],
)
def test_a_column_that_cannot_have_images_is_named(
    write: Callable[[Path, pa.Array], Path], values: pa.Array, column: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as raised:
        shards_of(write(tmp_path, values), Columns(None, None, column))
    (problem,) = raised.value.problems
    assert (problem.place, problem.value) == ("input.image", column) and fix in problem.fix


# --- WebDataset

KEYED = Columns("txt", "__key__", "png")


@pytest.mark.parametrize("target_bytes", [1, 1_000, 10**9])
def test_members_of_a_key_are_a_row(target_bytes: int, tmp_path: Path) -> None:
    path = as_tar(tmp_path / "t.tar", samples())
    rows = read(path, KEYED, target_bytes)
    assert [(row["doc_id"], row["image"], row["text"]) for row in rows[:3]] == [
        ("a/0001", IMAGES[0], "a dog"),
        ("a/0002", IMAGES[1] * 2_000, "a cat"),
        ("b/0001", IMAGES[2], "größer"),
    ]
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["error:no image"] * 2
    # the first dot of the name ends the key
    assert rows[4]["doc_id"] == "name"


@given(
    st.lists(st.dictionaries(st.sampled_from(["png", "txt", "json"]), st.binary(max_size=2_000))),
    st.lists(st.booleans(), min_size=20, max_size=20),
    st.sampled_from([1, 3_000, 10**9]),
)
def test_kept_rows_are_an_archive_of_the_same_members(
    tmp_path_factory: pytest.TempPathFactory,
    members: list[dict[str, bytes]],
    chosen: list[bool],
    target_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("tar")
    rows = [(f"{number:03}", of_row) for number, of_row in enumerate(members[:20]) if of_row]
    names = {name for _, of_row in rows for name in of_row}
    if not {"png", "txt"} <= names:
        return
    path = as_tar(folder / "t.tar", rows)
    kept = []
    for number, shard in enumerate(shards_of(path, KEYED, target_bytes)):
        keep = np.array(chosen[shard.piece.start_row : shard.piece.end_row], np.bool_)
        (folder / f"{number}.tar").write_bytes(kept_rows(shard, {}, keep))
        with tarfile.open(folder / f"{number}.tar") as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content is not None
                kept.append((member.name, content.read()))
    expected = [
        (f"{key}.{name}", data)
        for (key, of_row), is_kept in zip(rows, chosen, strict=False)
        if is_kept
        for name, data in of_row.items()
    ]
    assert kept == expected


def test_members_that_are_no_files_are_passed_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        for name, kind in (("a", tarfile.DIRTYPE), ("b.png", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        for name in ("README", "c.png", "c.txt"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    assert [row["doc_id"] for row in read(tmp_path / "t.tar", KEYED)] == ["c"]


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    path = as_tar(tmp_path / "t.tar", samples())
    whole = path.read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "t.tar").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "t.tar").write_bytes(b"no archive" * 200)
    for folder in ("cut", "none"):
        with pytest.raises(StorageError, match=r"t\.tar: cannot be read: is "):
            shards_of(tmp_path / folder / "t.tar", KEYED)
