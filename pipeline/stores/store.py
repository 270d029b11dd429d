"""The interface of all stores: objects are created once, whole, and never changed.

Entry point: `open_store`. Implementations: `stores.local`, `stores.s3` and `stores.gcs`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import Problem, RefusedError, SpecError, StorageError

ATTEMPTS = "attempts/"
PROBE_KEY = ATTEMPTS + "create-only-probe"
SUPPORTED = "a local path, file:///absolute/path, s3://bucket/prefix or gs://bucket/prefix"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a LIST. Another content has another `etag`."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float  # seconds since the epoch, by the store's clock


class Store(Protocol):
    """Objects by key. Law: no `create` changes an object that exists."""

    @property
    def url(self) -> str:
        """The store's place, for error messages."""

    def create(self, key: str, data: bytes) -> str | None:
        """The etag of the new object, also if the reply was lost; None if one exists, and stays.

        An etag that the store does not return is one that no LIST shows.
        """

    def read(self, key: str) -> bytes:
        """The object's content; StorageError if there is no such object."""

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose key starts with `prefix`, at any depth, in the order of their keys.

        Keys below `attempts/` are listed only if the prefix starts with that.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes the objects; a missing one is not an error.

        Only `assay gc` may delete anything outside `attempts/`.
        """


def open_store(url: str, options: Mapping[str, Any], *, place: str = "output") -> Store:
    """The store at a URL, opened with fsspec options.

    `place` is the key or the option that has the URL, for errors. RefusedError for another kind of
    URL, and SpecError for a local path that is a file.
    """
    scheme, separator, location = url.partition("://")
    protocol = scheme.lower() if separator else "file"
    # — imported here: a run on a local disk loads no client of an object store
    if protocol in ("s3", "s3a"):
        from pipeline.stores.s3 import open_s3

        return open_s3(f"{protocol}://{location}", options)
    if protocol in ("gs", "gcs"):
        from pipeline.stores.gcs import open_gcs

        return open_gcs(f"{protocol}://{location}", options)
    if protocol != "file":
        fix = f"{protocol}:// is not a supported store; write {SUPPORTED}"
        raise RefusedError(Problem(place, fix, url))
    from pipeline.stores.local import LocalStore

    path = Path(location) if separator else Path(os.path.abspath(os.path.expanduser(url)))
    if not path.is_absolute():
        raise RefusedError(Problem(place, "write file:///absolute/path, three slashes", url))
    existing = next((folder for folder in (path, *path.parents) if os.path.exists(folder)), path)
    if os.path.exists(existing) and not os.path.isdir(existing):
        which = "is a file" if existing == path else f"{existing} is a file"
        raise SpecError([Problem(place, f"{which}; name a folder, or a new one", url)])
    return LocalStore(path)


def check_create_only(store: Store, *, place: str = "output", key: str = PROBE_KEY) -> None:
    """RefusedError if a second create of a key succeeds: such a store loses results.

    `place` is the key or the option that named the store, for errors.
    """
    try:
        # — runs share one key, so that no keys accumulate
        store.create(key, b"the content of the first create is kept")
        before = store.read(key)
        second_etag = store.create(key, b"a second create: " + uuid.uuid4().bytes)
        kept = store.read(key) == before
    except (RefusedError, StorageError) as error:
        raise type(error)(Problem(place, str(error))) from error
    if second_etag or not kept:
        fix = f"{store.url}: a second create of {key} was not refused, so one run could overwrite "
        fix += "another's results; use a store that honours conditional create"
        raise RefusedError(Problem(place, fix))


def check_key(key: str) -> None:
    """StorageError unless the key is valid in every store and stays below the store's folder."""
    parts = key.split("/")
    if "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"{key!r} is not a key: write names joined by single slashes, no '..'")


def check_prefix(prefix: str) -> None:
    """StorageError unless a valid key can start with the prefix."""
    if prefix:
        check_key(prefix.removesuffix("/"))


def is_listed(key: str, prefix: str) -> bool:
    """Whether a LIST of `prefix` shows the key."""
    # — the prefix is checked first, because most keys differ in it
    return key.startswith(prefix) and (prefix.startswith(ATTEMPTS) or not key.startswith(ATTEMPTS))
