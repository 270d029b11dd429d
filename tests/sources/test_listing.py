"""What a folder may hold beside files, and names that fsspec would take for more than one URL."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError, UnreadableError
from pipeline.ledger.cuts import load_or_cut
from pipeline.options import InitOptions
from pipeline.sources.listing import remote_etag
from pipeline.sources.source import cut, find_objects
from pipeline.spec.schema import Columns
from pipeline.stores.local import LocalStore
from pipeline.verbs.init import init

KINDS = ("fifo", "zero", "socket", "dangling", "loop")
NO_FILE = "is no file, but a FIFO, a device, or a link that leads nowhere"


def make(folder: Path, kind: str, format: str) -> str:
    """Makes the entry in the folder; its path."""
    path = folder / f"{kind}.{format}"
    target = {"zero": "/dev/zero", "dangling": "nowhere", "loop": path.name}
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        earlier_folder = os.open(".", os.O_RDONLY)
        os.chdir(folder)  # — the path of a socket has at most 108 bytes
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
        finally:
            os.fchdir(earlier_folder)
            os.close(earlier_folder)
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
    with pytest.raises(SpecError, match=f"data: {NO_FILE}"):
        init(f"{folder}/*", InitOptions(to=str(tmp_path / "spec.yaml")))
    (folder / f"good.{format}").write_text('{"text": "a", "id": "1"}\n')
    objects = find_objects(f"{folder}/*", tmp_path / "cache")
    cuts = load_or_cut(LocalStore(tmp_path / "out"), objects, Columns("text", "id"), 10**6)
    assert cuts.unreadable == (f"{path}: {NO_FILE}; remove it",)
    (shard,) = cuts.shards
    assert all_documents(shard).num_rows == 1
    only = find_objects(path, tmp_path / "cache") if kind in ("fifo", "zero") else ()
    for each in only:
        with pytest.raises(UnreadableError, match=NO_FILE):
            cut(each, Columns("text", "id"), 10**6)
        with pytest.raises(StorageError, match=NO_FILE):
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
    (item,) = find_objects(f"{scheme}{path}", tmp_path / "cache")
    assert item.path == str(path)
    (shard,) = cut(item, Columns("text", "id"), 10**6)
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
        objects = find_objects("memory://globbed/day=*/part=[ab[]/x.jsonl", tmp_path / "cache")
        paths = [each.path for each in objects]
        assert paths == [f"memory:///globbed/{n}" for n in sorted(names) if n.endswith("x.jsonl")]
        assert len(listed) == 1 + 8 + 24 and not any("other" in path for path in listed)
    finally:
        memory.rm("/globbed", recursive=True)


TEXT = b'{"text": "a", "id": "1"}\n'
HIDDEN = {
    "_temporary/0/b.jsonl": "_temporary",
    ".ipynb_checkpoints/b-checkpoint.jsonl": ".ipynb_checkpoints",
    "deep/_delta_log/0.jsonl": "deep/_delta_log",
    "deep/._b.jsonl": "deep/._b.jsonl",
    "cache-0123456789abcdef.arrow": "cache-0123456789abcdef.arrow",
}


@pytest.fixture(params=["disk", "memory"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Writes files below a folder of a disk or a remote store; the folder's path or URL."""
    memory = fsspec.filesystem("memory")

    def write(*names: str) -> str:
        for name in names:
            if request.param == "memory":
                memory.pipe(f"/tree/{name}", TEXT)
            else:
                (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "tree" / name).write_bytes(TEXT)
        return "memory:///tree" if request.param == "memory" else f"{tmp_path}/tree"

    yield write
    if memory.exists("/tree"):
        memory.rm("/tree", recursive=True)


def names_at(root: str, path: str, cache: Path, output: str | None = None) -> list[str]:
    objects = find_objects(f"{root}{path}", cache, output=output)
    return [each.path.removeprefix(f"{root}/") for each in objects]


@pytest.mark.parametrize("path", ["", "/**", "/**/*.*"])
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_names_below_a_folder_are_left_out_and_one_line_says_so(
    tree: Callable[..., str], name: str, path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tree("deep/a.jsonl", name)
    with caplog.at_level(logging.INFO, "pipeline"):
        assert names_at(root, path, tmp_path / "cache") == ["deep/a.jsonl"]
    line = f"input.path: left out: 1 hidden (such as {HIDDEN[name]!r})"
    assert [record.getMessage() for record in caplog.records] == [line]


def test_files_of_another_kind_in_a_folder_are_left_out_and_one_line_says_so(
    tree: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tree("a.jsonl", "b.json", "c.json.gz", "README.md")
    with caplog.at_level(logging.INFO, "pipeline"):
        assert names_at(root, "", tmp_path / "cache") == ["a.jsonl"]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("input.path: left out: 3 of another kind (such as '")


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/_tmp", ["_tmp/b.jsonl"]),
        ("/_tmp/*.jsonl", ["_tmp/b.jsonl"]),
        ("/*/_c.jsonl", ["deep/_c.jsonl"]),
        ("/**/_*.jsonl", ["deep/_c.jsonl"]),
        ("/_tmp/.d.jsonl", ["_tmp/.d.jsonl"]),
        ("/*/*.jsonl", ["deep/a.jsonl"]),
    ],
)
def test_a_hidden_name_that_the_path_writes_is_read(
    tree: Callable[..., str], path: str, names: list[str], tmp_path: Path
) -> None:
    root = tree("deep/a.jsonl", "_tmp/b.jsonl", "deep/_c.jsonl", "_tmp/.d.jsonl")
    assert names_at(root, path, tmp_path / "cache") == names


def test_a_folder_of_hidden_names_alone_is_an_error_that_names_them(
    tree: Callable[..., str], tmp_path: Path
) -> None:
    root = tree("_tmp/b.jsonl", ".a.jsonl")
    with pytest.raises(SpecError, match=r"names nothing but 2 hidden \(such as '.a.jsonl'\); name"):
        find_objects(root, tmp_path / "cache")


@pytest.mark.parametrize("path", ["", "/**", "/*/**"])
def test_the_output_is_no_part_of_the_input_whatever_its_formats(
    tree: Callable[..., str], path: str, tmp_path: Path
) -> None:
    # — of a folder, Parquet would be read instead of CSV
    root = tree("deep/a.csv", "deep/out/labels/t/b.parquet", "deep/output/c.csv")
    names = names_at(root, path, tmp_path / "cache", f"{root}/deep/out")
    assert names == ["deep/a.csv", "deep/output/c.csv"]


def links(folder: Path, **targets: str) -> None:
    for name, target in targets.items():
        (folder / name).symlink_to(folder / target)


@pytest.mark.parametrize("path", ["", "/**/*.jsonl"])
@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ({"linked": "../real"}, ["linked/in/r.jsonl", "own/a.jsonl"]),
        ({"loop": "."}, ["own/a.jsonl"]),
        ({"a_copy": "own", "file.jsonl": "own/a.jsonl"}, ["own/a.jsonl"]),
        ({"one": "../real", "two": "../real/in"}, ["one/in/r.jsonl", "own/a.jsonl"]),
        ({"up": ".."}, ["own/a.jsonl", "up/real/in/r.jsonl"]),
        ({"to_out": "own/out"}, ["own/a.jsonl"]),
        ({".hidden": "../real", "seen": "../real"}, ["own/a.jsonl", "seen/in/r.jsonl"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_links_are_followed_once(
    tmp_path: Path, path: str, targets: dict[str, str], names: list[str]
) -> None:
    folder = tmp_path / "data"
    for name in ("data/own/a.jsonl", "real/in/r.jsonl", "data/own/out/labels/x.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(TEXT)
    links(folder, **targets)
    assert names_at(str(folder), path, tmp_path / "cache", f"{folder}/own/out") == names


def test_an_output_that_a_link_names_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "data/out/labels").mkdir(parents=True)
    (tmp_path / "data/out/labels/x.jsonl").write_bytes(TEXT)
    (tmp_path / "data/a.jsonl").write_bytes(TEXT)
    links(tmp_path, out="data/out", input="data")
    for output in ("out", "data/out", "input/out"):
        assert names_at(f"{tmp_path}/input", "", tmp_path / "cache", f"{tmp_path}/{output}") == [
            "a.jsonl"
        ]


@pytest.mark.parametrize("folder", ["w[1]", "a*b", "what?", "[x"])
def test_a_folder_with_wildcards_in_its_name_is_taken_by_its_name(
    tmp_path: Path, folder: str
) -> None:
    (tmp_path / folder / "deep").mkdir(parents=True)
    (tmp_path / folder / "deep/a.jsonl").write_bytes(TEXT)
    for path in ("", "/**", "/*/a.jsonl", "/deep/*.jsonl", "/deep/a.jsonl", "//deep//*.jsonl"):
        names = names_at(f"{tmp_path}/{folder}", path, tmp_path / "cache")
        assert names == ["deep/a.jsonl"]


def test_an_object_of_gcs_is_the_same_after_a_change_of_its_metadata() -> None:
    before = {"size": 4, "md5Hash": "of the content", "etag": "1"}
    assert remote_etag("gs://b/a", before) == remote_etag("gs://b/a", {**before, "etag": "2"})
