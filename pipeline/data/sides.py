"""What two answerings of a corpus are called: a snapshot's number, or one version of one task.

Knows snapshots, keys and the metadata of documents files. Knows nothing of how they are compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.answer_columns import columns_with
from pipeline.data.commit import METADATA_PREFIX
from pipeline.data.contents import Contents, contents, contents_of
from pipeline.data.ledger import committed, spec_key
from pipeline.data.shards import Shard
from pipeline.data.snapshots import SnapshotTask
from pipeline.data.storage import Store
from pipeline.errors import Problem, SpecError, StorageError

FORM = "write a snapshot's number, or fp:TASK:FINGERPRINT"
_VERSION = re.compile(r"fp:(?P<task>[a-z][a-z0-9_]*):(?P<fp>[0-9a-f]{16})")


def side(store: Store, written: str) -> Contents:
    """What a side names; SpecError if it is no name, StorageError if there is nothing of it."""
    if written.isascii() and written.isdecimal():
        return contents(store, int(written))
    found = _VERSION.fullmatch(written)
    if found is None:
        raise SpecError([Problem("A or B", FORM, written)])
    return version_contents(store, found["task"], found["fp"])


def version_contents(store: Store, task: str, fp: str) -> Contents:
    """All that is there of one version of a task, whatever snapshot it is in, or in none.

    It has the shards of earlier versions of an input file, too.
    """
    folders = (f"labels/{task}/{fp}/", f"retries/{task}/{fp}/")
    keys = [stored.key for folder in folders for stored in store.list(folder)]
    sids = {part for key in keys for part in re.findall(r"[0-9a-f]{32}", key)}
    if not sids:
        raise StorageError(f"{store.url}/{folders[0]}: has no answers; {FORM}")
    done = committed(store, {task: fp}, sids)
    there = sorted(sid for sid in sids if sid in done.documents and sid in done.labels[task])
    shards = sorted((_shard(store, done.documents_file(s).key) for s in there), key=_place)
    version = _version(json.loads(store.read(spec_key(task, fp))), fp)
    return contents_of(f"fp:{task}:{fp}", {task: version}, shards, done)


def _version(words: Mapping[str, Any], fp: str) -> SnapshotTask:
    """What a fingerprint's words say of the task's files."""
    asked = words["task"]
    columns = columns_with(
        ranked="top_k" in asked, levels="separator" in asked, calibrated="calibration" in words
    )
    return SnapshotTask(fp, tuple(label for label, _ in asked["labels"]), columns)


def _shard(store: Store, key: str) -> Shard:
    """The shard that a documents file says it is of."""
    try:
        metadata = pq.read_schema(pa.BufferReader(store.read(key))).metadata
        return Shard.from_json(json.loads(metadata[f"{METADATA_PREFIX}shard".encode()]))
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"{store.url}/{key}: is not a documents file: {error!r}; `assay verify` tells more"
        ) from error


def _place(shard: Shard) -> tuple[str, int]:
    return shard.path, shard.piece.start_row
