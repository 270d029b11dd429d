"""Where results are kept: objects that are created whole, once, and never changed.

Knows what every store promises, keys, and which store a URL names. Knows nothing of what the
objects hold, nor of how a store keeps its promise: that is `local_store`, `s3_store`, `gcs_store`
and, for tests, `memory_store`.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import RefusedError, StorageError

ATTEMPTS = "attempts/"
PROBE_KEY = ATTEMPTS + "create-only-probe"
SUPPORTED = "a local path, file:///absolute/path, s3://bucket/prefix or gs://bucket/prefix"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as a LIST shows it; `etag` changes whenever its content does."""

    key: str
    size_bytes: int
    etag: str


class Store(Protocol):
    """A flat space of objects. Law: once an object is there, no `create` changes it."""

    @property
    def url(self) -> str:
        """Where the store is, as errors name it."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """True: this call made the object, whole. False: it was there; nothing was changed."""
        ...

    def read(self, key: str) -> bytes:
        """The object's content; StorageError where there is none."""
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose key starts with `prefix`, at any depth, in the order of their keys.

        Nothing below `attempts/` unless the prefix asks for it.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """The objects are gone; one that was not there is no error.

        For `attempts/` and for `assay gc` alone: nothing else deletes.
        """
        ...


def open_store(url: str, options: Mapping[str, Any]) -> Store:
    """The store at a URL, opened with the user's fsspec options; RefusedError if it is none."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    protocol = scheme[1].lower() if scheme else "file"
    # — imported here: a run on a local disk needs no client of an object store
    if protocol in ("s3", "s3a"):
        from pipeline.stores.s3 import open_s3

        return open_s3(url, options)
    if protocol in ("gs", "gcs"):
        from pipeline.stores.gcs import open_gcs

        return open_gcs(url, options)
    if protocol != "file":
        raise RefusedError(
            f"output: {protocol}:// is not a store that can be written; "
            f"write {SUPPORTED} (got {url!r})"
        )
    from pipeline.stores.local import LocalStore

    path = Path(url[scheme.end() :]) if scheme else Path(os.path.abspath(Path(url).expanduser()))
    if not path.is_absolute():
        raise RefusedError(f"output: write file:///absolute/path, three slashes (got {url!r})")
    return LocalStore(path)


def check_create_only(store: Store) -> None:
    """RefusedError if a second create of one key is let through: such a store loses results."""
    # — one key for all runs: it need not be deleted, which a store cannot do, nor does it pile up
    store.create(PROBE_KEY, b"the first create of a key stands")
    before = store.read(PROBE_KEY)
    again = store.create(PROBE_KEY, b"a second create: " + uuid.uuid4().bytes)
    if again or store.read(PROBE_KEY) != before:
        raise RefusedError(
            f"{store.url}: a second create of {PROBE_KEY} was not refused, so one run could "
            f"overwrite another's results; use a store that honours conditional create"
        )


def check_key(key: str) -> None:
    """StorageError unless every store can hold the key, and no path can leave the store by it."""
    parts = key.split("/")
    if "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"{key!r} is not a key: write names joined by single slashes, no '..'")


def check_prefix(prefix: str) -> None:
    """StorageError unless keys can start with it."""
    if prefix:
        check_key(prefix.removesuffix("/"))


def is_listed(key: str, prefix: str) -> bool:
    """Whether a LIST of `prefix` shows the key."""
    # — the prefix is asked first: of a million keys most have another
    return key.startswith(prefix) and (prefix.startswith(ATTEMPTS) or not key.startswith(ATTEMPTS))
