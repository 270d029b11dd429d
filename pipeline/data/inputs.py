"""The cut that lasts: the shards of each input object, written down once in the output.

Knows `inputs/<oid>.json`. A job that goes on elsewhere, or under another version of this program,
thus works on the same shards, and a finished job opens no input. Knows nothing of formats, nor of
labels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.data.hashes import canonical_json, short_hash
from pipeline.data.shards import Shard
from pipeline.data.source import InputObject, cut
from pipeline.data.storage import Store
from pipeline.errors import Problem, SpecError, StorageError

FOLDER = "inputs/"


def input_key(found: InputObject, text_column: str, id_column: str | None) -> str:
    """The key of an object's cut: its name changes when the object, or a wanted column, does."""
    identity = {
        "path": found.path,
        "size_bytes": found.size_bytes,
        "etag": found.etag,
        "format": found.format,
        "text_column": text_column,
        "id_column": id_column,
    }
    return f"{FOLDER}{short_hash(canonical_json(identity))}.json"


def load_or_cut(
    store: Store,
    objects: Sequence[InputObject],
    text_column: str,
    id_column: str | None,
    target_bytes: int,
) -> list[Shard]:
    """The shards of all objects, in order. What was cut before is read; the rest is cut and kept.

    `target_bytes` is for what is cut now: an object keeps the shards that it has.
    """
    there = {stored.key for stored in store.list(FOLDER)}
    shards: list[Shard] = []
    for found in objects:
        key = input_key(found, text_column, id_column)
        if key in there:
            shards += _read(store, key)
        else:
            shards += _keep(store, key, cut(found, text_column, id_column, target_bytes))
    if not shards:
        files = f"none of the {len(objects)} files has a row"
        raise SpecError([Problem("input.path", f"{files}; name files with rows", _first(objects))])
    return shards


def _keep(store: Store, key: str, shards: Sequence[Shard]) -> list[Shard]:
    """The shards as they now stand: another process may have cut the object otherwise, before."""
    content = canonical_json({"shards": [shard.to_json() for shard in shards]})
    return list(shards) if store.create(key, content) else _read(store, key)


def _read(store: Store, key: str) -> list[Shard]:
    try:
        return [Shard.from_json(entry) for entry in json.loads(store.read(key))["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{store.url}/{key}: is not a list of shards: {error!r}; "
            f"delete it to have the file cut again"
        ) from error


def _first(objects: Sequence[InputObject]) -> str | None:
    return objects[0].path if objects else None
