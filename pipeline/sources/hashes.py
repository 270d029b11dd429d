"""What a piece of content is called: its hash.

Knows bytes, JSON values and local files. Knows nothing of shards, tasks or models, nor of remote
stores, which name their objects' content themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

from pipeline.errors import StorageError

logger = logging.getLogger(__name__)

# One for all values: `json.dumps` would make one for each, of which a large job has a million.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def short_hash(data: bytes) -> str:
    """32 hex digits (128 bits) of the SHA-256: no two of 10^15 contents are expected to meet."""
    return hashlib.sha256(data).hexdigest()[:32]


def canonical_json(value: object) -> bytes:
    """One byte string for one JSON value: sorted keys, no spaces, ASCII."""
    return _CANONICAL.encode(value).encode("ascii")


def content_hash(path: Path, cache_dir: Path) -> str:
    """64 hex digits of the SHA-256 of a local file's content.

    Remembered below `cache_dir` by absolute path, size and modification time, so that a file is
    read once. A memory that cannot be understood is logged and replaced: it can be made again.
    Any number of processes may share the folder.
    """
    absolute = Path(os.path.abspath(path))
    try:
        before = _state(absolute)
        memory = cache_dir / f"{short_hash(os.fsencode(absolute))}.json"
        remembered = _recall(memory, before)
        if remembered is not None:
            return remembered
        with absolute.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _state(absolute) != before:
            raise StorageError(f"{absolute}: changed while it was read; run again when it is still")
        _remember(memory, {**before, "sha256": digest})
    except OSError as error:
        raise StorageError(f"{absolute}: its content cannot be hashed: {error}") from error
    return digest


def _state(path: Path) -> dict[str, object]:
    status = path.stat()
    return {"path": repr(path), "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _recall(memory: Path, state: dict[str, object]) -> str | None:
    """The hash remembered for a file in this state, or None."""
    try:
        content = json.loads(memory.read_bytes())
        digest = content.pop("sha256")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        logger.warning("%s: ignored, the file is hashed again: %r", memory, error)
        return None
    return str(digest) if content == state else None


def _remember(memory: Path, content: dict[str, object]) -> None:
    # — a reader sees the old memory or the new one, never half of one
    memory.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=memory.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(canonical_json(content))
    os.replace(temporary, memory)
