"""Text files: each is one row, all are one object, and any change of them is noticed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError
from pipeline.sources.source import check_content, cut, find_objects
from pipeline.spec.schema import Columns

FILES = {
    "b.txt": b"zwei\nZeilen",
    "a.txt": b"\xef\xbb\xbfone",
    "deep/c.TXT": b" \n",
    "deep/er/a.txt": b"caf\xe9",
    "deep/er/d.txt": b"",
    "deep/er/e.txt": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
}
EXPECTED = [
    ("a.txt", "one", "ok"),
    ("b.txt", "zwei\nZeilen", "ok"),
    ("deep/c.TXT", " \n", "empty"),
    ("deep/er/a.txt", None, "error:invalid UTF-8"),
    ("deep/er/d.txt", "", "empty"),
    ("deep/er/e.txt", None, "error:a Git LFS pointer"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "notes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "notes"


def rows_of(path: str, cache_dir: Path, target_bytes: int = 10**6) -> list[tuple[str, str, str]]:
    (item,) = find_objects(path, cache_dir)
    shards = cut(item, Columns("text", "id"), target_bytes)
    documents = pa.concat_tables(map(all_documents, shards)).to_pylist()
    return [(row["doc_id"], row["text"], row["status"]) for row in documents]


@pytest.mark.parametrize("pattern", ["", "/**/*.[tT]*"])
def test_texts_in_the_output_are_left_out_each_time_that_the_files_are_listed(
    folder: Path, tmp_path: Path, pattern: str
) -> None:
    (folder / "out").mkdir()
    path, cache, columns = f"{folder}{pattern}", tmp_path / "cache", Columns("text", "id")
    (before,) = find_objects(path, cache, output=str(folder / "out"))
    (folder / "out" / "log.txt").write_text("not a document")
    (item,) = find_objects(path, cache, output=str(folder / "out"))
    assert before.version(columns).view is None and before.etag == item.etag
    (shard,) = cut(item, columns, 10**6)
    assert all_documents(shard)["doc_id"].to_pylist() == [id for id, _, _ in EXPECTED]
    check_content(shard, cache, since=0)


@pytest.mark.parametrize("target_bytes", [1, 1_200, 10**6])
def test_each_file_is_a_row_and_its_id_is_the_path_below_the_folder(
    folder: Path, tmp_path: Path, target_bytes: int
) -> None:
    assert rows_of(str(folder), tmp_path / "cache", target_bytes) == EXPECTED


@pytest.mark.parametrize(
    ("path", "ids"),
    [
        ("a.txt", ["a.txt"]),
        ("*.txt", ["a.txt", "b.txt"]),
        ("*/er/*.txt", ["deep/er/a.txt", "deep/er/d.txt", "deep/er/e.txt"]),
        ("deep", ["c.TXT", "er/a.txt", "er/d.txt", "er/e.txt"]),
    ],
)
def test_a_file_a_glob_and_a_folder_name_their_ids(
    folder: Path, tmp_path: Path, path: str, ids: list[str]
) -> None:
    named = folder.rename(tmp_path / "[2024] notes")
    assert [row[0] for row in rows_of(f"{named}/{path}", tmp_path / "cache")] == ids


@pytest.mark.parametrize("remote", [False, True])
def test_the_folder_is_listed_once_for_all_of_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    (tmp_path / "many").mkdir()
    for number in range(192):
        (tmp_path / f"many/{number:03}.txt").write_text(f"text {number}")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "many"), "/many", recursive=True)
    path = "memory://many" if remote else str(tmp_path / "many")
    (item,) = find_objects(path, tmp_path / "cache")
    shards = cut(item, Columns("text", "id"), 3 * 530)
    assert len(shards) == 64
    listings: list[str] = []
    kind = type(memory) if remote else LocalFileSystem
    whole_find = kind.find

    def find(self: AbstractFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
        listings.append(path)
        return whole_find(self, path, *args, **kwargs)

    monkeypatch.setattr(kind, "find", find)
    try:
        read = [text for shard in shards for text in all_documents(shard)["text"].to_pylist()]
        if not remote:
            for shard in shards:
                check_content(shard, tmp_path / "cache", since=time.time() + 3600)
        assert read == [f"text {number}" for number in range(192)]
        assert len(listings) == 1
        (tmp_path / "many/100.txt").write_text("a new text")
        memory.pipe("/many/100.txt", b"a new text")
        with pytest.raises(StorageError, match=r"100\.txt: changed while the job ran"):
            all_documents(shards[33])
        assert all_documents(shards[34]).num_rows == 3
    finally:
        memory.rm("/many", recursive=True)


@pytest.mark.parametrize("change", ["more", "fewer", "longer", "renamed"])
def test_another_list_of_files_is_another_version_and_is_not_read_as_the_old_one(
    folder: Path, tmp_path: Path, change: str
) -> None:
    (before,) = find_objects(str(folder), tmp_path / "cache")
    shard = cut(before, Columns("text", "id"), 10**6)[0]
    match change:
        case "more":
            (folder / "e.txt").write_bytes(b"")
        case "fewer":
            (folder / "deep/er/d.txt").unlink()
        case "longer":
            (folder / "a.txt").write_bytes(b"one and more")
        case "renamed":
            (folder / "a.txt").rename(folder / "f.txt")
    with pytest.raises(StorageError, match="changed while the job ran"):
        all_documents(shard)
    (after,) = find_objects(str(folder), tmp_path / "cache")
    assert after.etag != before.etag


def test_other_content_of_the_same_size_is_another_version(folder: Path, tmp_path: Path) -> None:
    (before,) = find_objects(str(folder), tmp_path / "cache")
    shard = cut(before, Columns("text", "id"), 10**6)[0]
    check_content(shard, tmp_path / "cache", since=0)
    state = (folder / "b.txt").stat()
    (folder / "b.txt").write_bytes(b"drei\nZeilen")
    os.utime(folder / "b.txt", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    (after,) = find_objects(str(folder), tmp_path / "cache")
    assert after.etag != before.etag
    with pytest.raises(StorageError, match="with the same size"):
        check_content(shard, tmp_path / "cache", since=state.st_mtime)


def test_another_column_is_named_with_those_there_are(folder: Path, tmp_path: Path) -> None:
    (item,) = find_objects(str(folder), tmp_path / "cache")
    with pytest.raises(SpecError, match=r"input\.text: .* it has: id, text"):
        cut(item, Columns("body", None), 10**6)
