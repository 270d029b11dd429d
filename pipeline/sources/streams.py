"""Opens an input object as a stream of bytes, decompressed as its format says.

Entry points: `opened`, `decompressed`; `reading` and `fetching` translate errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa

from pipeline.errors import StorageError, UnreadableError
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.retries import (
    REMOTE_ERRORS,
    Cause,
    RetryPolicy,
    as_storage_error,
    cause_of,
    retry,
)

# What the fsspec file system that opens a path is made with: a spec's storage_options.
Options = Mapping[str, Any]

CODECS = {"gz": "gzip", "zst": "zstd"}  # by the last part of a format
BLOCK_BYTES = 1024 * 1024
# Above the client's own tries, which leave out what some clients take for final: s3fs an error 500.
_RETRY_POLICY = RetryPolicy()

Result = TypeVar("Result")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns errors of content that violates its format into an UnreadableError of one line.

    Errors of the store are StorageErrors already: `opened` raises them.
    """
    try:
        yield
    except pa.ArrowMemoryError as error:  # a machine with more memory may read it
        raise StorageError(_message(path, error)) from error
    except (OSError, EOFError, pa.ArrowException) as error:
        raise UnreadableError(_message(path, error)) from error


@contextmanager
def fetching(path: str) -> Iterator[None]:
    """Turns errors of fetching the object at `path` into a StorageError of one line."""
    try:
        yield
    except REMOTE_ERRORS as error:
        is_remote = "://" in path and not path.startswith("file:")
        cause = cause_of(error) if is_remote else Cause.OTHER
        if cause is Cause.EXISTS:  # of another version: s3fs reads on only if the etag is the same
            raise StorageError(
                f"{path}: changed while the job ran; run again to label the new version"
            ) from error
        if cause is not Cause.OTHER:
            raise as_storage_error(error, path, "read") from error
        raise StorageError(_message(path, error)) from error


def retry_transient(call: Callable[[], Result]) -> Result:
    """What a request to an input's store gives, made again where it may well succeed later."""
    return retry(call, _RETRY_POLICY)


def one_line(error: BaseException) -> str:
    """The message of an error on one line, or its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def _message(path: str, error: BaseException) -> str:
    reason = one_line(error)
    return f"{path}: cannot be read: {reason}; replace or remove the file"


@contextmanager
def opened(path: str, options: Options) -> Iterator[Fetched]:
    """The object's bytes as they are stored, to be read with retries."""
    with fetching(path):
        file_system, place = file_system_at(path, options)
        file = retry_transient(partial(file_system.open, place, "rb"))
    with file:
        yield Fetched(file, path)


@contextmanager
def decompressed(path: str, format: str, options: Options) -> Iterator[Stream]:
    """The object's bytes after gzip or zstd, of any number of members or frames.

    Arrow's reader is used because it fails where the data is truncated. The stream reader of
    zstandard ends there without an error, so a truncated file would look like a shorter one.
    """
    codec = CODECS.get(format.rpartition(".")[2])
    with opened(path, options) as file:
        yield file if codec is None else _Inflated(file, codec)


class Fetched:
    """An open file that raises StorageErrors; readers in Arrow pass them on."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file = file
        self._path = path

    def read(self, size: int = -1, /) -> bytes:
        with fetching(self._path):
            # — a read that fails stays where it was
            return retry_transient(partial(self._file.read, size))

    def seek(self, offset: int, whence: int = 0, /) -> int:
        with fetching(self._path):
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


class _Inflated:
    """One compressed stream, read forwards."""

    def __init__(self, file: Fetched, codec: str) -> None:
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
        self._offset = 0

    def read(self, size: int, /) -> bytes:
        data: bytes = self._stream.read(size)
        self._offset += len(data)
        return data

    def seek(self, offset: int, /) -> int:
        """Reads up to the offset, because a compressed stream cannot skip."""
        assert offset >= self._offset, (offset, self._offset)
        while self._offset < offset and self.read(min(BLOCK_BYTES, offset - self._offset)):
            pass
        return self._offset


Stream = Fetched | _Inflated  # what the line and record readers read
