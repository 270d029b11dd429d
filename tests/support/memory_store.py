"""A store in this process's memory, with the contract of `stores.store.Store`, for tests."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.errors import StorageError
from pipeline.stores.store import Store, StoredObject, check_key, check_prefix, is_listed


@dataclass(frozen=True, slots=True)
class MemoryStore:
    """A dictionary of objects."""

    url: str = "memory://"
    # content, etag and time of creation
    _objects: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def create(self, key: str, data: bytes) -> str | None:
        """The etag of the object, if this call made it. An existing object stays."""
        check_key(key)
        made = (bytes(data), hashlib.md5(data).hexdigest(), time.time())
        with self._lock:
            return made[1] if self._objects.setdefault(key, made) is made else None

    def read(self, key: str) -> bytes:
        """The object's content."""
        check_key(key)
        if key not in self._objects:
            raise StorageError(f"{self.url}{key}: cannot be read: there is no such object")
        return self._objects[key][0]

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes the objects; a missing one is not an error."""
        with self._lock:
            for key in keys:
                check_key(key)
                self._objects.pop(key, None)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose key starts with `prefix`, in the order of their keys."""
        check_prefix(prefix)
        with self._lock:
            listed = sorted(item for item in self._objects.items() if is_listed(item[0], prefix))
        for key, (data, etag, created_s) in listed:
            yield StoredObject(key, len(data), etag, created_s)


class Recording:
    """Another store, with the keys of what is read, created and deleted, and listed prefixes."""

    def __init__(self, store: Store) -> None:
        self.url, self._store = store.url, store
        self.read_keys: list[str] = []
        self.created: list[str] = []  # also those that existed
        self.deleted: list[str] = []
        self.listed: list[str] = []

    def create(self, key: str, data: bytes) -> str | None:
        self.created.append(key)
        return self._store.create(key, data)

    def read(self, key: str) -> bytes:
        self.read_keys.append(key)
        return self._store.read(key)

    def delete(self, keys: Sequence[str]) -> None:
        self.deleted += keys
        self._store.delete(keys)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        self.listed.append(prefix)
        return self._store.list(prefix)
