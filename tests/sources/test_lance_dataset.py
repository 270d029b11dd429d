"""Shards of Lance datasets that change after the shards were cut."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import lance
import pytest
from lake_tables import Lance, documents, rows, shards_of

from pipeline.errors import ForeignContentError, StorageError
from pipeline.sources import lance_dataset
from pipeline.sources.source import read_rows


def test_a_lance_shard_is_read_as_it_was_cut(tmp_path: Path) -> None:
    lake = Lance(tmp_path)
    lake.append(rows("a"))
    shards, before = shards_of(lake.path, tmp_path), {row["id"]: row["text"] for row in lake.read()}
    lake.dataset.add_columns({"more": "id"})
    assert shards_of(lake.path, tmp_path) == shards
    lake.delete(["a-3"])
    assert documents(shards) == before
    lake.dataset.cleanup_old_versions(timedelta(0))
    lance_dataset._unchanged.cache_clear()
    with pytest.raises(StorageError, match="changed while the job ran: no version of the dataset"):
        documents(shards)
    file = lake.data_files()[0]
    with pytest.raises(ForeignContentError, match="is a file of a Lance dataset; name the folder"):
        shards_of(file, tmp_path)


@pytest.mark.parametrize("folder", ["data", "_deletions"])
def test_a_file_of_lance_that_is_gone_makes_no_rows(tmp_path: Path, folder: str) -> None:
    lake = Lance(tmp_path)
    lake.append(rows("a"))
    lake.delete(["a-3"])
    shards = shards_of(lake.path, tmp_path)
    for file in (lake.folder / folder).iterdir():
        file.rename(tmp_path / "moved")
    lance_dataset._unchanged.cache_clear()
    for _ in range(2):
        with pytest.raises(StorageError, match=rf"cannot be read: .*Not found: .*{folder}"):
            [*read_rows(shards[0], {}, ["text"])]
    (tmp_path / "moved").rename(file)
    assert len(documents(shards)) == 19


def test_broken_content_of_lance_makes_rows_with_the_reason(tmp_path: Path) -> None:
    lake = Lance(tmp_path)
    lake.append(rows("a"))
    shards = shards_of(lake.path, tmp_path)
    [file] = map(Path, lake.data_files())
    data = file.read_bytes()
    file.write_bytes(b"\xff" * (len(data) // 2) + data[len(data) // 2 :])
    lance_dataset._unchanged.cache_clear()
    problems = [row.problem for shard in shards for row in read_rows(shard, {}, ["text"])]
    assert len(problems) == 20 and all("corrupt file" in str(each) for each in problems)


def test_a_store_that_does_not_answer_is_no_changed_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lance(tmp_path)
    lake.append(rows("a"))
    shards = shards_of(lake.path, tmp_path)
    lake.delete(["a-3"])

    def opened(root: str, native: object, version: int | None = None) -> lance.LanceDataset:
        if version == 1:
            raise OSError("no reply")
        return lake.dataset

    monkeypatch.setattr(lance_dataset, "_opened", opened)
    lance_dataset._unchanged.cache_clear()
    with pytest.raises(StorageError, match="cannot be read: no reply"):
        documents(shards)


def test_columns_of_a_named_version_of_lance_are_those_of_the_version(tmp_path: Path) -> None:
    lake = Lance(tmp_path)
    lake.append({"text": ["one", "two"], "id": ["1", "2"], "lang": ["en", "de"]})
    version = lake.version
    shards = shards_of(f"lance+{lake.path}@{version}", tmp_path)
    lake.dataset.drop_columns(["lang"])
    lake.dataset.add_columns({"lang": "'xx'"})
    lance_dataset._unchanged.cache_clear()
    read = [row.values["lang"].decode() for s in shards for row in read_rows(s, {}, ["lang"])]
    assert read == lance.dataset(lake.folder, version).to_table()["lang"].to_pylist()
    assert shards_of(f"lance+{lake.path}@{version}", tmp_path) == shards
