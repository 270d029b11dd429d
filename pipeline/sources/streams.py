"""Opens an input object as a stream of bytes, decompressed by its format.

Entry points: `opened`, `decompressed`, and `stream_at` for a shard, which continues the stream of
an earlier one. `reading` and `fetching` translate errors.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, BinaryIO, Protocol, TypeVar

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from pipeline.errors import StorageError, UnreadableError, one_line
from pipeline.local_files import check_regular
from pipeline.sources.shards import ObjectVersion, fields_of
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.retries import Cause, as_storage_error, cause_of, remote_errors, retry

# What the fsspec file system that opens a path is made with: a spec's storage_options.
Options = Mapping[str, Any]

CODECS = {"gz": "gzip", "zst": "zstd"}  # by the last part of a format
BLOCK_BYTES = 1024 * 1024
GZIP_BUFFER_BYTES = 64 * 1024


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns errors of content that violates its format into an UnreadableError of one line.

    Errors of the store are StorageErrors already: `opened` raises them.
    """
    try:
        yield
    except pa.ArrowMemoryError as error:  # a machine with more memory may read it
        raise StorageError(_message(path, error)) from error
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise UnreadableError(_message(path, error)) from error


@contextmanager
def fetching(path: str) -> Iterator[None]:
    """Turns errors of fetching the object at `path` into a StorageError of one line."""
    try:
        yield
    except remote_errors() as error:
        is_remote = "://" in path and not path.startswith("file:")
        cause = cause_of(error) if is_remote else Cause.OTHER
        if cause is Cause.EXISTS:  # of another version: s3fs reads on only if the etag is the same
            raise changed(path) from error
        if cause is not Cause.OTHER:
            raise as_storage_error(error, path, "read") from error
        raise StorageError(_message(path, error)) from error
    except ValueError as error:
        if not path.startswith(("http://", "https://")):
            raise
        raise StorageError(
            f"{path}: the server gives no ranges of a file; copy the file to a disk or an object "
            f"store"
        ) from error


def changed(path: str, reason: str = "") -> StorageError:
    """The error of an object that is another version than before; the caller raises it."""
    return StorageError(
        f"{path}: changed while the job ran{reason}; run again to label the new version"
    )


def check_same(path: str, now: object, before: object) -> None:
    """StorageError unless the object has the size and the etag that it had before."""
    if now != before:
        raise changed(path, f": size and etag are {now}, and were {before}")


def _message(path: str, error: BaseException) -> str:
    return f"{path}: cannot be read: {one_line(error)}; replace or remove the file"


@contextmanager
def opened(path: str, options: Options, *, ahead: bool = True) -> Iterator[Fetched]:
    """The object's bytes as they are stored, to be read with retries."""
    with closing(Fetched(path, options, ahead=ahead)) as file:
        yield file


@contextmanager
def decompressed(path: str, format: str, options: Options) -> Iterator[Stream]:
    """The object's bytes after gzip or zstd, of any number of members or frames."""
    codec = CODECS.get(format.rpartition(".")[2])
    with opened(path, options) as file:
        yield file if codec is None else _Inflated(file, codec)


@contextmanager
def stream_at(version: ObjectVersion, options: Options, start: int) -> Iterator[Stream]:
    """The bytes of `decompressed` from byte `start` on."""
    codec = CODECS.get(version.format.rpartition(".")[2])
    if codec is None:
        with opened(version.path, options) as file:
            file.seek(start)
            yield file
        return
    with continued(version, options, start, partial(_Inflated, codec=codec)) as stream:
        stream.seek(start)
        yield stream


class Forward(Protocol):
    """A reader of an object that reads forwards only."""

    file: Fetched
    position: int  # in bytes or rows


Reader = TypeVar("Reader", bound=Forward)

# Readers that earlier shards used, each with an idle file, by object, position and identity.
# A use removes its reader first, so that no two threads share one.
_idle: dict[tuple[object, int, int], Any] = {}
# Threads that read consecutive shards, times the passes that each makes over a shard.
MAX_IDLE = 16


@contextmanager
def continued(
    version: ObjectVersion,
    options: Options,
    start: int,
    make: Callable[[Fetched], Reader],
    *,
    columns: Sequence[str] | None = None,
    ahead: bool = True,
    first: int = 0,
) -> Iterator[Reader]:
    """A reader of the object at or before `start`: the nearest idle one, or a new one.

    A reader of some columns continues one of the same columns. One before `first`, where a new
    reader would begin, is not continued: what is between may be broken. Law: one thread that reads
    the shards of an object in order reads each byte of it once. With a new reader for each of n
    shards, it would read the object n / 2 times.
    """
    key = *fields_of(version).values(), repr(options), None if columns is None else tuple(columns)
    before = [
        place for place in tuple(_idle) if start and place[0] == key and first <= place[1] <= start
    ]
    reader: Reader | None = _idle.pop(max(before, key=itemgetter(1)), None) if before else None
    try:
        own = Fetched(version.path, options, ahead=ahead) if reader is None else reader.file
        with closing(own) as file:
            reader = reader or make(file)
            yield reader
    except GeneratorExit:  # — the caller needs no more rows
        _keep_idle(key, reader)
        raise
    _keep_idle(key, reader)


def _keep_idle(key: object, reader: Any) -> None:
    _idle[key, reader.position, id(reader)] = reader
    for oldest in tuple(_idle)[:-MAX_IDLE]:
        _idle.pop(oldest, None)


class Fetched:
    """A file that raises StorageErrors; readers in Arrow pass them on.

    If it is read after it was closed, it is opened again, and continues where it was. Without
    `ahead`, no more is fetched from a store than is asked for: a reader has buffers of its own.
    """

    closed = False  # for Arrow

    def __init__(self, path: str, options: Options, *, ahead: bool = True) -> None:
        self._path = path
        self._offset = 0
        cache_options: Any = {} if ahead else {"cache_type": "none"}
        with fetching(path):
            file_system, place = file_system_at(path, options)
            if isinstance(file_system, LocalFileSystem):
                check_regular(place)
                cache_options = {}
            self._open = partial(file_system.open, place, "rb", **cache_options)
            self._file: BinaryIO | None = retry(self._open)

    def read(self, size: int = -1, /) -> bytes:
        with fetching(self._path):
            # — a failed read does not move the position
            return retry(partial(self._opened().read, size))

    def seek(self, offset: int, whence: int = 0, /) -> int:
        with fetching(self._path):
            return self._opened().seek(offset, whence)

    def tell(self) -> int:
        return self._opened().tell()

    def close(self) -> None:
        # — one of a store holds no connection, but what was fetched ahead of the next shard
        is_kept = isinstance(self._file, AbstractBufferedFile) and self._file.size is not None
        if self._file is not None and not is_kept:
            self._offset = self._file.tell()
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            file = retry(self._open)
            file.seek(self._offset)
            self._file = file
        return self._file


class _Inflated:
    """One compressed stream, read forwards.

    Both readers fail where the data is truncated. The stream reader of zstandard ends there without
    an error, so a truncated file would look like a shorter one; Arrow's of gzip fails where zeros
    pad the end, as on a tape.
    """

    def __init__(self, file: Fetched, codec: str) -> None:
        self.file = file
        self.position = 0
        raw = pa.PythonFile(file, mode="r")
        if codec == "gzip":
            # — zeros are read one by one
            buffered = pa.BufferedInputStream(raw, GZIP_BUFFER_BYTES)
            self._stream = gzip.GzipFile(fileobj=buffered, mode="rb")
        else:
            self._stream = pa.CompressedInputStream(raw, codec)

    def read(self, size: int, /) -> bytes:
        data: bytes = self._stream.read(size)
        self.position += len(data)
        return data

    def seek(self, offset: int, /) -> int:
        """Reads up to the offset, because a compressed stream cannot skip."""
        assert offset >= self.position, (offset, self.position)
        while self.position < offset and self.read(min(BLOCK_BYTES, offset - self.position)):
            pass
        return self.position


Stream = Fetched | _Inflated | io.BytesIO  # what the line and record readers read
