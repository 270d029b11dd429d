"""What a folder may hold beside files, and names that fsspec would take for more than one URL."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError, UnreadableError
from pipeline.ledger.cuts import load_or_cut
from pipeline.options import InitOptions
from pipeline.sources.source import cut, find_objects
from pipeline.spec.schema import Columns
from pipeline.stores.local import LocalStore
from pipeline.verbs.init import init

KINDS = {
    "fifo": "a FIFO",
    "zero": "a device",
    "socket": "a socket",
    "dangling": "a link that leads nowhere (No such file or directory)",
    "folder": "a folder",
    "loop": "a link that leads nowhere (Too many levels of symbolic links)",
}


def make(folder: Path, kind: str, format: str) -> str:
    """Makes the entry in the folder; its path."""
    path = folder / f"{kind}.{format}"
    target = {"zero": "/dev/zero", "dangling": "nowhere", "folder": ".", "loop": path.name}
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.open(".", os.O_RDONLY)
        os.chdir(folder)  # — the path of a socket has at most 108 bytes
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
        finally:
            os.fchdir(here)
            os.close(here)
    else:
        path.symlink_to(target[kind])
    return str(path)


@pytest.mark.parametrize("format", ["jsonl", "txt"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_that_is_no_file_is_named_and_the_files_beside_it_are_read(
    tmp_path: Path, kind: str, format: str
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = make(folder, kind, format)
    with pytest.raises(SpecError, match=r"data: is a .* and not a file"):
        init(f"{folder}/*", InitOptions(to=str(tmp_path / "spec.yaml")))
    (folder / f"good.{format}").write_text('{"text": "a", "id": "1"}\n')
    objects = find_objects(f"{folder}/*", tmp_path / "cache")
    cuts = load_or_cut(LocalStore(tmp_path / "out"), objects, Columns("text", "id"), 10**6)
    assert cuts.unreadable == (f"{path}: is {KINDS[kind]} and not a file; remove it",)
    (shard,) = cuts.shards
    assert all_documents(shard).num_rows == 1
    only = find_objects(path, tmp_path / "cache") if kind in ("fifo", "zero") else ()
    for each in only:
        with pytest.raises(UnreadableError, match="and not a file"):
            cut(each, Columns("text", "id"), 10**6)
        with pytest.raises(StorageError, match="and not a file"):
            load_or_cut(LocalStore(tmp_path / "out"), only, Columns("text", "id"), 10**6)


@pytest.mark.parametrize("name", ["a::b.jsonl", "a::/b.jsonl", "zip::a.jsonl", "a.jsonl::b.jsonl"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_local_name_is_never_taken_for_a_chain_of_urls(
    tmp_path: Path, name: str, scheme: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"text": "right", "id": "1"}\n')
    (tmp_path / name.partition("::")[0]).touch()  # — what fsspec would read
    (found,) = find_objects(f"{scheme}{path}", tmp_path / "cache")
    assert found.path == str(path)
    (shard,) = cut(found, Columns("text", "id"), 10**6)
    assert all_documents(shard).column("text").to_pylist() == ["right"]


def test_the_folders_that_a_glob_matches_are_listed_side_by_side_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        f"day={day}/part={part}/{kind}.jsonl" for day in range(8) for part in "ab[" for kind in "xy"
    ]
    memory = fsspec.filesystem("memory")
    for name in [*names, "other=1/part=a/x.jsonl", "day=0/x.jsonl"]:
        memory.pipe(f"/globbed/{name}", b'{"text": "a"}')
    listed: list[str] = []
    together = threading.Barrier(8)
    whole_glob = MemoryFileSystem.glob

    def glob(self: MemoryFileSystem, path: str, **kwargs: Any) -> Any:
        listed.append(path)
        if path.endswith("/part=[ab[]"):
            together.wait(timeout=60)  # for the listings of the other days
        return whole_glob(self, path, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "glob", glob)
    try:
        found = find_objects("memory://globbed/day=*/part=[ab[]/x.jsonl", tmp_path / "cache")
        paths = [each.path for each in found]
        assert paths == [f"memory:///globbed/{n}" for n in sorted(names) if n.endswith("x.jsonl")]
        assert len(listed) == 1 + 8 + 24 and not any("other" in path for path in listed)
    finally:
        memory.rm("/globbed", recursive=True)
