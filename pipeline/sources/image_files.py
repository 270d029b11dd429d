"""The bytes of a row's image: the row has them, or their path. Entry: `image_of`."""

from __future__ import annotations

import errno
import os
import re
import stat
from functools import partial

from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import DocumentError
from pipeline.sources.documents import TooLong
from pipeline.sources.streams import Options, fetching
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.retries import Cause, cause_of, retry

MAX_IMAGE_BYTES = 64 * 1024 * 1024
# A longer text, such as an image in base64, is no path.
_MAX_PATH_CHARS = 1_024
# The length of a path in a row's status.
_PATH_CHARS = 200
# The errors of a path that can name no file on this disk.
_NO_PATH = frozenset({errno.ENAMETOOLONG, errno.ELOOP})
_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*(://|::)")  # `::` chains URLs


def image_of(value: object, *, path: str, options: Options) -> bytes:
    """The image file of a value of the image column: bytes, a path, or a struct of both.

    A path is from the folder of the input file `path`, or absolute. It must be below that folder,
    also after links; in a store, in the same bucket or host. DocumentError if the value is none of
    these, or names no file of at most `MAX_IMAGE_BYTES` bytes; StorageError if the store does not
    answer.
    """
    if isinstance(value, dict):  # of JSON; of tables, the reader has chosen
        value = value.get("bytes") or value.get("path")
    if value is None:
        raise DocumentError("no image")
    if isinstance(value, TooLong) or (isinstance(value, bytes) and len(value) > MAX_IMAGE_BYTES):
        raise DocumentError(f"the image is longer than {MAX_IMAGE_BYTES:,} bytes")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise DocumentError("its image is neither bytes nor a path")
    return _read_image_file(value, path.rpartition("/")[0], options)


def _read_image_file(written: str, folder: str, options: Options) -> bytes:
    shown = written[:_PATH_CHARS]
    if len(written) > _MAX_PATH_CHARS:
        raise DocumentError(f"its image is a text of {len(written):,} characters and no path")
    if "\0" in written:
        raise DocumentError("the path of its image has a NUL")
    path = written if _ABSOLUTE.match(written) else f"{folder}/{written}"
    if _scheme(path) != _scheme(folder):  # a row may not make requests elsewhere
        raise DocumentError(f"the image {shown!r} is in another file system than its row")
    if not _scheme(path):
        path, folder = os.path.realpath(path), os.path.realpath(folder or "/")
    if "/../" in path or not path.startswith(f"{_root(folder)}/"):
        raise DocumentError(f"the image {shown!r} is outside the folder or bucket of its row")
    with fetching(path):
        file_system, place = file_system_at(path, options)
        try:
            is_local = isinstance(file_system, LocalFileSystem)
            # — reading a FIFO or a device might never end
            if is_local and not stat.S_ISREG(os.stat(place).st_mode):
                raise DocumentError(f"the image {shown!r} is not a file")
            with retry(partial(file_system.open, place, "rb")) as file:
                data: bytes = retry(partial(file.read, MAX_IMAGE_BYTES + 1))
        except (FileNotFoundError, NotADirectoryError) as error:
            if cause_of(error) is Cause.BUSY:  # — a web server that does not answer
                raise
            raise DocumentError(f"there is no image {shown!r}") from None
        except IsADirectoryError:
            raise DocumentError(f"the image {shown!r} is not a file") from None
        except OSError as error:
            if error.errno not in _NO_PATH:
                raise
            raise DocumentError(f"there is no image {shown!r}") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise DocumentError(f"the image is longer than {MAX_IMAGE_BYTES:,} bytes")
    return data


def _root(folder: str) -> str:
    """What the images of the rows of a file in this folder are below."""
    # — a repository of the Hub is more than the first part of its path
    is_store = _scheme(folder) not in ("", "hf")
    return "/".join(folder.split("/")[:3]) if is_store else folder.rstrip("/")


def _scheme(path: str) -> str:
    """The protocol of a URL; empty for a local path."""
    return path.partition(":")[0] if _ABSOLUTE.match(path) and path[0] != "/" else ""
