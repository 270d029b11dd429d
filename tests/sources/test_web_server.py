"""A web server that gives no ranges of a file: it is read whole, or refused in one line."""

from __future__ import annotations

import random
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
from data_fixtures import ENCODERS
from fsspec.implementations.http import HTTPFileSystem
from servers import serving
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.sources.source import cut, find_objects
from pipeline.sources.streams import Fetched
from pipeline.spec.schema import Columns
from pipeline.stores.retries import RetryPolicy

ROWS = [(f"row-{n}", random.Random(n).randbytes(4000).hex()) for n in range(900)]  # above 5 MB


NAMES = "corpus.jsonl corpus.jsonl.gz corpus.jsonl.zst corpus.parquet file.arrow stream.arrow"
QUICK = RetryPolicy(0.2, 0.2, first_wait_s=0.01)


class Handler(BaseHTTPRequestHandler):
    """Answers every GET with the whole file."""

    protocol_version = "HTTP/1.1"
    content: ClassVar[bytes] = b""
    ranges: ClassVar[str | None] = None  # its header about ranges
    has_size: ClassVar[bool] = True
    status: ClassVar[int] = 200

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.send_header("ETag", '"version-1"')
        if self.ranges is not None:
            self.send_header("Accept-Ranges", self.ranges)
        if self.has_size:
            self.send_header("Content-Length", str(len(self.content)))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        try:
            if self.has_size:
                self.wfile.write(self.content)
            else:
                self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.content), self.content))
        except ConnectionError:
            self.close_connection = True


@pytest.fixture
def web() -> Iterator[str]:
    with serving(Handler) as url:
        yield url


@pytest.mark.parametrize("ranges", [None, "none", "bytes"])
@pytest.mark.parametrize("name", NAMES.split())
def test_a_file_is_read_whole_or_refused_in_one_line(
    name: str, ranges: str | None, web: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Handler, "content", ENCODERS[name](ROWS))
    monkeypatch.setattr(Handler, "ranges", ranges)
    (file,) = find_objects(f"{web}/{name}", tmp_path)

    def texts() -> list[str]:
        shards = cut(file, Columns("text", "id"), 1_000_000)
        assert len(shards) > 5
        read = (all_documents(shard).column("text").to_pylist() for shard in shards)
        return [text for of_shard in read for text in of_shard]

    try:
        read = texts()
    except StorageError as error:
        assert f"/{name}: the server gives no ranges of a file; copy the file" in str(error)
        assert "\n" not in str(error)
    else:
        assert read == [text for _, text in ROWS]


def test_a_file_without_a_size_is_refused_in_one_line(
    web: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Handler, "content", ENCODERS["corpus.jsonl"](ROWS))
    monkeypatch.setattr(Handler, "has_size", False)
    with pytest.raises(StorageError, match="does not send the file's size"):
        find_objects(f"{web}/corpus.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (500, StorageError, "it may be overloaded"),
        (429, StorageError, "it may be overloaded"),
        (403, SpecError, "names no file"),
        (404, SpecError, "names no file"),
    ],
)
def test_a_server_that_fails_is_not_a_file_that_is_missing(
    status: int,
    error: type[Exception],
    words: str,
    web: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Handler, "status", status)
    monkeypatch.setattr("pipeline.stores.retries.retry.__defaults__", (QUICK,))
    with pytest.raises(error, match=words):
        find_objects(f"{web}/corpus.jsonl", tmp_path)


def test_a_server_that_stopped_is_asked_again_and_no_file_is_called_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    ask = HTTPFileSystem._open

    def counted(self: HTTPFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(path)
        return ask(self, path, *args, **kwargs)

    monkeypatch.setattr(HTTPFileSystem, "_open", counted)
    monkeypatch.setattr("pipeline.stores.retries.retry.__defaults__", (QUICK,))
    words = r"corpus.jsonl: cannot be read: Connect.* may be overloaded or out of reach"
    with pytest.raises(UnavailableError, match=words):
        Fetched("http://127.0.0.1:9/corpus.jsonl", {})
    assert len(asked) > 1
