"""The input on object stores and web servers: read as from a disk, and every change is noticed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from data_fixtures import FILES_BELOW, PATHS
from fault_proxy import Faults, proxied
from fsspec import AbstractFileSystem
from servers import Server
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.sources.documents import slices_from
from pipeline.sources.shards import Shard
from pipeline.sources.source import InputObject, cut, find_objects
from pipeline.spec.schema import Columns

Row = tuple[str, str]
ONE, TWO = b'{"text": "one"}\n', b'{"text": "two"}\n'


class Bucket:
    """A prefix of a bucket, written and read by clients that share nothing."""

    def __init__(self, server: Server) -> None:
        self.url = server.new_url()
        self.options = server.options
        self._file_system: AbstractFileSystem = server.file_system()

    def write(self, name: str, data: bytes) -> str:
        url = f"{self.url}/{name}"
        self._file_system.pipe_file(url, data)
        return url


@pytest.fixture(params=["moto", "seaweedfs", "fake_gcs"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    return Bucket(request.getfixturevalue(request.param))


@pytest.fixture
def moto_bucket(moto: Server) -> Bucket:
    return Bucket(moto)


def only_shard(url: str, options: dict[str, Any], tmp_path: Path) -> Shard:
    (input_object,) = find_objects(url, tmp_path / "cache", options)
    (shard,) = cut(input_object, Columns("text", None), 3000)
    return shard


def texts(shard: Shard, options: dict[str, Any]) -> list[str]:
    input_object: list[str] = all_documents(shard, options).column("text").to_pylist()
    return input_object


def test_every_format_is_read_from_s3_as_from_a_disk(
    corpus: Path, rows: list[Row], tmp_path: Path, moto_bucket: Bucket
) -> None:
    moto_bucket.write(corpus.name, corpus.read_bytes())
    (input_object,) = find_objects(f"{moto_bucket.url}/*", tmp_path / "cache", moto_bucket.options)
    assert input_object.path == f"{moto_bucket.url}/{corpus.name}"
    assert input_object.size_bytes == corpus.stat().st_size
    read = [
        text
        for shard in cut(input_object, Columns("text", "id"), 30_000)
        for text in texts(shard, input_object.options)
    ]
    assert read == [text for _, text in rows]


@pytest.mark.parametrize(("path", "names"), PATHS)
def test_a_file_a_glob_and_a_folder_name_their_objects_in_order(
    bucket: Bucket, tmp_path: Path, path: str, names: list[str]
) -> None:
    for name in FILES_BELOW:
        bucket.write(name, name.encode())
    objects = find_objects(f"{bucket.url}/{path}", tmp_path / "cache", bucket.options)
    assert [input_object.path for input_object in objects] == [
        f"{bucket.url}/{name}" for name in names
    ]
    assert len({input_object.etag for input_object in objects}) == len(names)


def test_a_path_that_names_nothing_is_one_problem(bucket: Bucket, tmp_path: Path) -> None:
    for path in ("nowhere.jsonl", "*.parquet"):
        with pytest.raises(SpecError, match=r"^input\.path: names no file"):
            find_objects(f"{bucket.url}/{path}", tmp_path / "cache", bucket.options)


def test_an_object_overwritten_after_a_listing_is_noticed(bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.write("a.jsonl", ONE)
    shard = only_shard(f"{bucket.url}/*.jsonl", bucket.options, tmp_path)
    assert texts(shard, bucket.options) == ["one"]
    bucket.write("a.jsonl", TWO)
    # — the client that read has listed the folder, and would answer from memory
    with pytest.raises(StorageError, match=f"{url}: changed while the job ran"):
        all_documents(shard, bucket.options)


def test_an_object_overwritten_while_it_is_read_is_noticed(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.write("a.jsonl", ONE)
    shard = only_shard(f"{bucket.url}/a.jsonl", bucket.options, tmp_path)

    def overwritten_first(rows: Iterator[Any], images: None) -> Any:
        bucket.write("a.jsonl", TWO)
        return slices_from(rows, images)

    monkeypatch.setattr("pipeline.sources.source.slices_from", overwritten_first)
    with pytest.raises(StorageError, match="changed while the job ran"):
        all_documents(shard, bucket.options)


def test_a_new_object_is_found_by_a_process_that_listed_before(
    bucket: Bucket, tmp_path: Path
) -> None:
    for count, name in enumerate(["a.jsonl", "b.jsonl", "c.jsonl"], start=1):
        bucket.write(name, ONE)
        assert len(find_objects(bucket.url, tmp_path / "cache", bucket.options)) == count
        glob = f"{bucket.url}/*.jsonl"
        assert len(find_objects(glob, tmp_path / "cache", bucket.options)) == count


def test_the_same_content_written_again_is_the_same_object(
    moto_bucket: Bucket, tmp_path: Path
) -> None:
    url = moto_bucket.write("a.jsonl", ONE)
    shard = only_shard(url, moto_bucket.options, tmp_path)
    moto_bucket.write("a.jsonl", ONE)
    assert texts(shard, moto_bucket.options) == ["one"]
    assert only_shard(url, moto_bucket.options, tmp_path) == shard


def test_credentials_that_run_out_while_reading_are_told_and_to_be_run_again(
    moto: Server, moto_bucket: Bucket, tmp_path: Path
) -> None:
    url, faults = moto_bucket.write("a.jsonl", ONE), Faults()
    with proxied(moto.endpoint, faults) as endpoint:
        options = {**moto.options, "endpoint_url": endpoint}
        shard = only_shard(url, options, tmp_path)
        faults.shares = {"expired": 1.0}
        with pytest.raises(UnavailableError, match=f"{url}: cannot be read: .*run again") as raised:
            all_documents(shard, options)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize("client_tries", [1, 8])
def test_a_bad_connection_is_outlasted_by_reading(
    client_tries: int, moto: Server, moto_bucket: Bucket, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": f"{number} " * 50}) for number in range(2000)]
    url = moto_bucket.write("a.jsonl", "\n".join(lines).encode())
    shares = {"error_500": 0.06, "slow_down": 0.1, "reset": 0.05, "lost_reply": 0.1, "cut_off": 0.1}
    faults = Faults(shares, seed=3)
    with proxied(moto.endpoint, faults) as endpoint:
        retries = {"total_max_attempts": client_tries, "mode": "standard"}
        patient = {"config_kwargs": {"retries": retries}}
        options = {**moto.options, "endpoint_url": endpoint, **patient}
        (input_object,) = find_objects(url, tmp_path / "cache", options)
        read = [
            text
            for shard in cut(input_object, Columns("text", None), 100_000)
            for text in texts(shard, options)
        ]
    assert read == [json.loads(line)["text"] for line in lines]
    assert faults.counted.total() > 5


def test_options_that_the_file_system_does_not_take_are_a_problem_of_the_spec(
    tmp_path: Path,
) -> None:
    with pytest.raises(SpecError, match=r"^input\.storage_options: .*endpont"):
        find_objects("s3://bucket/*.jsonl", tmp_path / "cache", {"endpont": "x"})


# — web servers


@pytest.fixture
def web() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A web server's address, and the files that it serves, with ranges and etags."""
    with ExitStack() as stack:
        files: dict[str, bytes] = {}

        class Handler(_WebHandler):
            served = files

        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        yield f"http://127.0.0.1:{server.server_port}", files


class _WebHandler(BaseHTTPRequestHandler):
    served: dict[str, bytes]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        data = self.served.get(self.path)
        if data is None:
            self.send_error(404)
            return
        start, stop = 0, len(data)
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, stop) if last else stop
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hash(data):x}"')
        self.end_headers()
        if with_body:
            self.wfile.write(data[start:stop])

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_every_format_is_read_from_a_web_server(
    corpus: Path, rows: list[Row], tmp_path: Path, web: tuple[str, dict[str, bytes]]
) -> None:
    address, files = web
    files[f"/{corpus.name}"] = corpus.read_bytes()
    (input_object,) = find_objects(f"{address}/{corpus.name}", tmp_path / "cache")
    assert input_object == InputObject(
        f"{address}/{corpus.name}", corpus.stat().st_size, input_object.etag, input_object.format
    )
    shards = cut(input_object, Columns("text", "id"), 30_000)
    assert [text for shard in shards for text in texts(shard, {})] == [text for _, text in rows]
    files[f"/{corpus.name}"] += b"\n"
    with pytest.raises(StorageError, match="changed while the job ran"):
        all_documents(shards[0])


def test_a_page_that_is_not_there_names_no_file(
    tmp_path: Path, web: tuple[str, dict[str, bytes]]
) -> None:
    with pytest.raises(SpecError, match=r"^input\.path: names no file"):
        find_objects(f"{web[0]}/none.jsonl", tmp_path / "cache")
