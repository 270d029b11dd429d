"""The fsspec file system of a path or a URL. Entry point: `file_system_at`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem


def file_system_at(path: str, options: Mapping[str, Any]) -> tuple[AbstractFileSystem, str]:
    """The file system of a path, made with the options, and the place in it.

    Without `scheme://`, or with `file://`, a path is local, and no character of it has a meaning.
    fsspec alone would take `a::b.jsonl` for a chain of two URLs, and read `a`.

    Raises:
        ValueError: There is no file system for the scheme, or it refuses an option.
        ImportError: The package of the file system is not installed.
    """
    if "://" in path and not path.startswith("file://"):
        file_system, place = url_to_fs(path, **options)
        return file_system, str(place)
    local = LocalFileSystem(**options)
    return local, str(local._strip_protocol(path))
