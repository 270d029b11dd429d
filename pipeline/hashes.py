"""SHA-256 hashes of bytes and of local files, and the canonical JSON that identities are made of.

Entry points: `sha256_hex`, `canonical_json`, `parse_json`, `sealed_json` for files with their own
hash, `validated` for files that assay wrote, and, for local files, `content_hash` and
`content_hashes`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from pipeline.errors import StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

HASH_THREADS = 16  # that read local files at once

# One encoder for all values: `json.dumps` would make one per call, a million in a large job.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_hex(data: bytes, digits: int = 64) -> str:
    """The first hex digits of the SHA-256 of the data."""
    return hashlib.sha256(data).hexdigest()[:digits]


def short_hash(data: bytes) -> str:
    """32 hex digits (128 bits) of the SHA-256: among 10^15 contents no collision is expected."""
    return sha256_hex(data, 32)


def canonical_json(value: object) -> bytes:
    """The JSON value as bytes: sorted keys, no spaces, ASCII. Equal values give equal bytes."""
    return _CANONICAL.encode(value).encode("ascii")


def parse_json(data: bytes | str) -> Any:
    """The JSON value; ValueError if it is none, or is nested more deeply than Python can read."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("its objects and lists are nested too deeply") from error


def sealed_json(content: Mapping[str, Any]) -> bytes:
    """The JSON object with its own hash in the key `hash`; `parse_sealed_json` reads it."""
    return canonical_json({**content, "hash": short_hash(canonical_json(content))})


def parse_sealed_json(data: bytes) -> dict[str, Any]:
    """What `sealed_json` wrote, without the hash; ValueError if it was changed since."""
    content = parse_json(data)
    if not isinstance(content, dict) or "hash" not in content:
        raise ValueError("it is cut off, or of another kind")
    if content.pop("hash") != short_hash(canonical_json(content)):
        raise ValueError("its content does not match its hash")
    return content


def validated(kind: type[T], content: object) -> T:
    """The value of this type that JSON values give; ValueError names the first wrong key."""
    try:
        adapter: TypeAdapter[T] = _adapter(cast("Any", kind))
        return adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{place}: {reason}" if place else reason) from error


@cache  # — to make one takes milliseconds, and a gold file has a value on each line
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def content_hash(path: Path, cache_dir: Path) -> str:
    """The SHA-256 of a local file's content, 64 hex digits.

    The hash is cached below `cache_dir` by absolute path, size and modification time, so each file
    is read once. An invalid cache entry is logged and replaced. Processes may share the folder.
    StorageError if the file cannot be read, or changes while it is read.
    """
    absolute = Path(os.path.abspath(path))
    try:
        before = _state(absolute)
        entry = cache_dir / f"{short_hash(os.fsencode(absolute))}.json"
        cached = _cached_hash(entry, before)
        if cached is not None:
            return cached
        with absolute.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _state(absolute) != before:
            raise StorageError(f"{absolute}: changed while it was read; run again")
        _write_entry(entry, {**before, "sha256": digest})
    except OSError as error:
        place = Path(str(error.filename))
        if place in (cache_dir, *cache_dir.parents) or cache_dir in place.parents:
            raise StorageError(
                f"{cache_dir}: the cache cannot be written: {error}; name another folder in "
                f"ASSAY_CACHE"
            ) from error
        raise StorageError(f"{absolute}: its content cannot be hashed: {error}") from error
    return digest


def content_hashes(paths: Sequence[Path], cache_dir: Path) -> list[str]:
    """The hash of each file, as `content_hash` gives it; several files are read at once."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:  # — hashing needs no GIL
        return list(pool.map(partial(content_hash, cache_dir=cache_dir), paths))


def _state(path: Path) -> dict[str, object]:
    status = path.stat()
    return {"path": repr(path), "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _cached_hash(entry: Path, state: dict[str, object]) -> str | None:
    """The cached hash of a file in this state, or None."""
    try:
        content = parse_json(entry.read_bytes())
        digest = content.pop("sha256")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        logger.warning("%s: invalid cache entry, the file is hashed again: %r", entry, error)
        return None
    return str(digest) if content == state else None


def _write_entry(entry: Path, content: dict[str, object]) -> None:
    # — renamed into place: a reader sees the old entry or the new one, never a part
    entry.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=entry.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(canonical_json(content))
    os.replace(temporary, entry)
