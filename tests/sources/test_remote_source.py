"""The input on object stores and web servers: read as from a disk, and every change is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from data_fixtures import ENCODERS, FILES_BELOW, PATHS
from fake_hub import FakeHub
from fault_proxy import STUBBORN, Faults, proxied
from fsspec.implementations.local import LocalFileSystem
from servers import Server
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.sources.documents import SLICE_ROWS
from pipeline.sources.shards import Shard
from pipeline.sources.source import cut, find_objects, read_documents
from pipeline.spec.schema import Columns

Row = tuple[str, str]
BUCKETS = ["moto", "seaweedfs", "fake_gcs"]
WEB_REPO = "datasets/org/web"
ONE, TWO = b'{"text": "one"}\n', b'{"text": "two"}\n'


@dataclass
class Folder:
    """A folder of a server or a disk, written by a client that shares nothing with readers."""

    url: str
    options: Mapping[str, Any]
    put: Callable[[str, bytes], object]

    def write(self, name: str, data: bytes) -> str:
        self.put(f"{self.url}/{name}", data)
        return f"{self.url}/{name}"


@pytest.fixture(params=BUCKETS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty folder in a bucket; with other parameters, on a disk or a web server."""
    if request.param == "disk":
        return Folder(f"{tmp_path}/corpus", {}, LocalFileSystem(auto_mkdir=True).pipe_file)
    if request.param == "web":  # a Hub serves the files of a branch with ranges and etags
        hub: FakeHub = request.getfixturevalue("hub")
        url = f"{hub.url}/{WEB_REPO}/resolve/main"
        return Folder(url, {}, lambda file, data: hub.push(WEB_REPO, {Path(file).name: data}))
    server: Server = request.getfixturevalue(request.param)
    return Folder(server.new_url(), server.options, server.file_system().pipe_file)


ON_MOTO = pytest.mark.parametrize("folder", ["moto"], indirect=True)


def only_shard(url: str, options: Mapping[str, Any], tmp_path: Path) -> Shard:
    (input_object,) = find_objects(url, tmp_path / "cache", options)
    (shard,) = cut(input_object, Columns("text", None), 10**7)
    return shard


def texts(shard: Shard, options: Mapping[str, Any]) -> list[str]:
    read: list[str] = all_documents(shard, options).column("text").to_pylist()
    return read


FORMATS = [name for name in ENCODERS if not name.startswith(("corpus.json.", "corpus.nd"))]


@pytest.mark.parametrize("folder", ["moto", "web"], indirect=True)
@pytest.mark.parametrize("corpus", FORMATS, indirect=True)
def test_every_format_is_read_from_a_server_as_from_a_disk(
    folder: Folder, corpus: Path, rows: list[Row], tmp_path: Path
) -> None:
    url = folder.write(corpus.name, corpus.read_bytes())
    (input_object,) = find_objects(url, tmp_path / "cache", folder.options)
    assert (input_object.path, input_object.size_bytes) == (url, corpus.stat().st_size)
    shards = cut(input_object, Columns("text", "id"), 30_000)
    read = [text for shard in shards for text in texts(shard, folder.options)]
    assert read == [text for _, text in rows]
    folder.write(corpus.name, corpus.read_bytes() + b"\n")
    with pytest.raises(StorageError, match="changed while the job ran"):
        all_documents(shards[0], folder.options)


@pytest.mark.parametrize("folder", ["disk", *BUCKETS], indirect=True)
@pytest.mark.parametrize(("path", "names"), PATHS)
def test_a_file_a_glob_and_a_folder_name_their_objects_in_order(
    folder: Folder, tmp_path: Path, path: str, names: list[str]
) -> None:
    for name in FILES_BELOW:
        folder.write(name, name.encode())
    objects = find_objects(f"{folder.url}/{path}", tmp_path / "cache", folder.options)
    assert [(each.path, each.size_bytes) for each in objects] == [
        (f"{folder.url}/{name}", len(name)) for name in names
    ]
    assert len({input_object.etag for input_object in objects}) == len(names)


@pytest.mark.parametrize("folder", [*BUCKETS, "web"], indirect=True)
@pytest.mark.parametrize("path", ["nowhere.jsonl", "*.parquet"])
def test_a_path_that_names_nothing_is_one_problem(
    folder: Folder, path: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=r"^input\.path: names no file"):
        find_objects(f"{folder.url}/{path}", tmp_path / "cache", folder.options)


def test_an_object_overwritten_after_a_listing_is_noticed(folder: Folder, tmp_path: Path) -> None:
    url = folder.write("a.jsonl", ONE)
    shard = only_shard(f"{folder.url}/*.jsonl", folder.options, tmp_path)
    assert texts(shard, folder.options) == ["one"]
    folder.write("a.jsonl", TWO)
    # — the client that read has listed the folder, and would answer from memory
    with pytest.raises(StorageError, match=f"{url}: changed while the job ran"):
        all_documents(shard, folder.options)


def test_an_object_overwritten_while_it_is_read_is_noticed(folder: Folder, tmp_path: Path) -> None:
    url = folder.write("a.jsonl", ONE * (SLICE_ROWS + 1))
    shard = only_shard(url, folder.options, tmp_path)
    slices = read_documents(shard, folder.options)
    assert next(slices).num_rows == SLICE_ROWS
    folder.write("a.jsonl", TWO * (SLICE_ROWS + 1))
    with pytest.raises(StorageError, match="changed while the job ran"):
        list(slices)


def test_a_new_object_is_found_by_a_process_that_listed_before(
    folder: Folder, tmp_path: Path
) -> None:
    for count, name in enumerate(["a.jsonl", "b.jsonl", "c.jsonl"], start=1):
        folder.write(name, ONE)
        assert len(find_objects(folder.url, tmp_path / "cache", folder.options)) == count
        glob = f"{folder.url}/*.jsonl"
        assert len(find_objects(glob, tmp_path / "cache", folder.options)) == count


@ON_MOTO
def test_the_same_content_written_again_is_the_same_object(folder: Folder, tmp_path: Path) -> None:
    url = folder.write("a.jsonl", ONE)
    shard = only_shard(url, folder.options, tmp_path)
    folder.write("a.jsonl", ONE)
    assert texts(shard, folder.options) == ["one"]
    assert only_shard(url, folder.options, tmp_path) == shard


@ON_MOTO
def test_credentials_that_expire_while_reading_are_reported_and_to_be_run_again(
    moto: Server, folder: Folder, tmp_path: Path
) -> None:
    url, faults = folder.write("a.jsonl", ONE), Faults()
    with proxied(moto.endpoint, faults) as endpoint:
        options = {**moto.options, "endpoint_url": endpoint}
        shard = only_shard(url, options, tmp_path)
        faults.shares = {"expired": 1.0}
        with pytest.raises(UnavailableError, match=f"{url}: cannot be read: .*run again") as raised:
            all_documents(shard, options)
    assert raised.value.exit_code == 3


@ON_MOTO
@pytest.mark.parametrize("client_tries", [1, 2])
def test_a_bad_connection_is_outlasted_by_reading(
    client_tries: int, moto: Server, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stores.retries.retry.__defaults__", (STUBBORN,))
    lines = [json.dumps({"text": f"{number} " * 50}) for number in range(1000)]
    url = folder.write("a.jsonl", "\n".join(lines).encode())
    shares = {"error_500": 0.06, "slow_down": 0.1, "reset": 0.05, "lost_reply": 0.1, "cut_off": 0.1}
    faults = Faults(shares, seed=3)
    with proxied(moto.endpoint, faults) as endpoint:
        retries = {"total_max_attempts": client_tries, "mode": "standard"}
        patient = {"config_kwargs": {"retries": retries}}
        options = {**moto.options, "endpoint_url": endpoint, **patient}
        (input_object,) = find_objects(url, tmp_path / "cache", options)
        shards = cut(input_object, Columns("text", None), 100_000)
        read = [text for shard in shards for text in texts(shard, options)]
    assert read == [json.loads(line)["text"] for line in lines]
    assert faults.counted.total() > 5


def test_options_that_the_file_system_does_not_take_are_a_problem_of_the_spec(
    tmp_path: Path,
) -> None:
    with pytest.raises(SpecError, match=r"^input\.storage_options: .*endpont"):
        find_objects("s3://bucket/*.jsonl", tmp_path / "cache", {"endpont": "x"})


@pytest.mark.parametrize("folder", ["moto", "fake_gcs"], indirect=True)
@pytest.mark.parametrize("path", ["", "/a.jsonl", "/*.jsonl", "/deep/**/*.jsonl"])
def test_a_bucket_that_is_not_there_is_named(folder: Folder, path: str, tmp_path: Path) -> None:
    scheme = folder.url.partition("://")[0]
    with pytest.raises(SpecError, match=r"^input\.path: there is no bucket 'nobucket-assay', or"):
        find_objects(f"{scheme}://nobucket-assay{path}", tmp_path / "cache", folder.options)
