"""Toys for the data tests: seeded rows, written in each format that the input may have."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from command import SLOW_ON_RAY
from servers import Server, start_fake_gcs, start_moto, start_seaweedfs
from shell import Shell, shell_on

from pipeline.hashes import content_hash
from pipeline.sources.formats import format_of
from pipeline.sources.source import InputObject
from pipeline.stores.local import LocalStore

Row = tuple[str, str]  # id, text
WORDS = [
    "yes",
    "naïve",
    "日本語",
    "🙂",
    "a\u2028b",
    "comma, here",
    '"quoted"',
    "back\\slash",
    "\x0b",
]

# Files below a folder, and what a path below it names of them.
FILES_BELOW = ["deep/er/c.jsonl.gz", "deep/b.parquet", "a.jsonl", "deep/README.md"]
PATHS = [
    ("", ["a.jsonl", "deep/b.parquet", "deep/er/c.jsonl.gz"]),
    ("*.jsonl", ["a.jsonl"]),
    ("**/*.parquet", ["deep/b.parquet"]),
    ("deep/b.parquet", ["deep/b.parquet"]),
    ("deep", ["deep/b.parquet", "deep/er/c.jsonl.gz"]),
]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


@pytest.fixture
def rows() -> list[Row]:
    """Ragged texts: mostly short, one far longer than a block, some only white space."""
    source = random.Random(7)
    texts = [" ".join(source.choices(WORDS, k=source.randrange(60))) for _ in range(157)]
    texts[50] = "long " * 300_000
    texts[60] = " \x0b\u3000"
    return [(f"row-{index}", text) for index, text in enumerate(texts)]


def _lines(rows: Sequence[Row]) -> bytes:
    """JSON lines with CRLF in places, blank lines, escapes, and no newline at the end."""
    lines = []
    for index, (identifier, text) in enumerate(rows):
        line = json.dumps({"id": identifier, "text": text}, ensure_ascii=index % 2 == 0)
        lines.append(line + ("\r\n" if index % 3 == 0 else "\n") + ("  \n\n" * (index % 7 == 0)))
    return "".join(lines).rstrip().encode()


def _csv(rows: Sequence[Row]) -> bytes:
    """A byte order mark, CRLF, blank lines, and quotes in a third of the fields or where needed."""
    lines = io.StringIO(newline="")
    lines.write("\ufeff")
    for index, row in enumerate([("id", "text"), *rows]):
        quoting = csv.QUOTE_ALL if index % 3 == 0 else csv.QUOTE_MINIMAL
        csv.writer(lines, quoting=quoting).writerow(row)
        lines.write("\r\n" * (index % 5 == 0))
    return lines.getvalue().removesuffix("\r\n").encode()


def _tsv(rows: Sequence[Row]) -> bytes:
    """A byte order mark, CRLF, blank lines, and quotes as they are."""
    lines = ["\ufeffid\ttext\r\n", *("\t".join(row) + "\r\n" for row in rows)]
    return "".join(line + "\r\n" * (i % 5 == 0) for i, line in enumerate(lines)).encode()


def _table(rows: Sequence[Row]) -> pa.Table:
    ids, texts = zip(*rows, strict=True)
    return pa.table({"other": range(len(rows)), "text": list(texts), "id": list(ids)})


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def arrow_bytes(
    table: pa.Table, most_rows: int | None = None, *, new: Callable[..., Any] = pa.ipc.new_stream
) -> bytes:
    """A stream, or another kind of file, with at most so many rows in a batch."""
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=most_rows)
    return sink.getvalue()


def _wet(rows: Sequence[Row]) -> bytes:
    """Each record its own gzip member, as Common Crawl writes them."""
    information = wet_record(b"software: toy\r\n", kind="warcinfo")
    records = [wet_record(text.encode(), id=identifier) for identifier, text in rows]
    return b"".join(gzip.compress(record) for record in [information, *records])


def wet_record(
    content: bytes, *, kind: str = "conversion", id: str = "row", length: int | None = None
) -> bytes:
    """A record of a WET file, with any Content-Length."""
    headers = [
        "WARC/1.0",
        f"WARC-Type: {kind}",
        "WARC-Target-URI: http://example.org/",
        "WARC-Date: 2026-11-01T00:00:00Z",
        f"WARC-Record-ID: {id}",
        f"Content-Length: {len(content) if length is None else length}",
    ]
    return "\r\n".join([*headers, "", ""]).encode() + content + b"\r\n\r\n"


def _halves(data: bytes, compress: Callable[[bytes], bytes]) -> bytes:
    """Two members or frames, the second starting inside a line."""
    return compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])


ENCODERS: dict[str, Callable[[Sequence[Row]], bytes]] = {
    "corpus.parquet": lambda rows: parquet_bytes(_table(rows), row_group_size=23),
    "corpus.jsonl": _lines,
    "corpus.jsonl.gz": lambda rows: _halves(_lines(rows), gzip.compress),
    "corpus.jsonl.zst": lambda rows: _halves(_lines(rows), zstandard.compress),
    "file.arrow": lambda rows: arrow_bytes(_table(rows), 31, new=pa.ipc.new_file),
    "stream.arrow": lambda rows: arrow_bytes(_table(rows), 31),
    "corpus.warc.wet.gz": _wet,
    "corpus.csv": _csv,
    "corpus.csv.zst": lambda rows: _halves(_csv(rows), zstandard.compress),
    "corpus.tsv.gz": lambda rows: _halves(_tsv(rows), gzip.compress),
    "corpus.json": _lines,
    "corpus.json.gz": lambda rows: _halves(_lines(rows), gzip.compress),
    "corpus.ndjson": _lines,
}


@pytest.fixture(params=list(ENCODERS))
def corpus(request: pytest.FixtureRequest, tmp_path: Path, rows: list[Row]) -> Path:
    """The rows as a file, once in each format."""
    path = tmp_path / request.param
    path.write_bytes(ENCODERS[request.param](rows))
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], InputObject]:
    """Writes a file and gives it as an input object."""

    def write(name: str, data: bytes) -> InputObject:
        path = tmp_path / name
        path.write_bytes(data)
        etag = content_hash(path, tmp_path / "cache")
        format = format_of(name)
        assert format is not None, name
        return InputObject(str(path), len(data), etag, format)

    return write


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start_moto(tmp_path_factory.mktemp("moto"))


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start_seaweedfs(tmp_path_factory.mktemp("seaweedfs"))


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start_fake_gcs(tmp_path_factory.mktemp("gcs"))


@pytest.fixture(scope="session")
def _ray_of_this_process() -> Iterator[None]:
    import ray

    yield
    ray.shutdown()


@pytest.fixture
def shared_ray(_ray_of_this_process: None) -> None:
    """The one Ray of this test process; the first test that needs it starts it.

    Its tests are marked `xdist_group("ray")`, so that one process has them all. It has one
    declared GPU, so the model of a spec that runs on it has `device: cpu`.
    """
    import ray

    if not ray.is_initialized():
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
        ray.init(address="local", num_cpus=3, num_gpus=1, **options)


@pytest.fixture(scope="module", params=["toy", pytest.param("ray", marks=SLOW_ON_RAY)])
def on_ray(request: pytest.FixtureRequest) -> bool:
    """Whether the runs of a test are on Ray; each test is run both ways."""
    return bool(request.param == "ray")


@pytest.fixture
def runner(on_ray: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are on the shared Ray, or in this process without Ray."""
    if on_ray:
        request.getfixturevalue("shared_ray")
    else:
        importlib.import_module("stages").run_without_ray(monkeypatch)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder that runs of the same spec share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(name="shell_on")
def open_shell(
    write_spec: Callable[..., Path], shared_cache: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Shell]]:
    """Opens a shell on a server by its fixture's name."""
    with ExitStack() as stack:

        def open_on(name: str, **faulty: Any) -> Shell:
            server: Server = request.getfixturevalue(name)
            return stack.enter_context(shell_on(server, write_spec, shared_cache, **faulty))

        yield open_on
