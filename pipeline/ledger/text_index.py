"""Which shards have a text: `index/<number>.parquet`, from the hash of the text to the shard.

Entry points: `index_missing_shards`, and `shards_with_texts`, which joins the texts of new shards
with the index. An entry says only where to look: what a documents file says counts. Without the
index, or with a damaged one, documents files are read again; no answer depends on it.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key, index_key
from pipeline.ledger.label_files import (
    METADATA_PREFIX,
    metadata_at_end,
    read_source,
    table_in,
    to_parquet,
)
from pipeline.ledger.numbered import free_numbers, numbers
from pipeline.sources.documents import OK
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)

# An object has at most this many entries, about 45 MB, unless one shard has more.
MAX_ENTRIES = 4_000_000
# Documents files that are read at once, and before their entries become part of an object.
READ_THREADS = 16
READ_AHEAD = 64
# Of the join. What does not fit is in a temporary file; each thread needs some memory of its own.
JOIN_MEMORY, JOIN_THREADS = "250MB", 4

Hashes = NDArray[np.uint64]

# `asked` has a row for each different text of each shard that asks. `found` has, for each of these
# texts that an object of the index has, the first and the last of the shards with answers. If both
# are the shard that asks, no other has the text.
_TABLES = """
    create table asked (shard integer, hash ubigint);
    create table found (hash ubigint, low integer, high integer);
"""
_ASK = "insert into asked select distinct shard, hash from entries semi join asking using (shard)"
_FIND = """
    insert into found select hash, min(shard), max(shard)
    from entries semi join asked using (hash) where shard < {sources} group by hash
"""
_JOIN = """
    with known as (select hash, min(low) as low, max(high) as high from found group by hash),
    placed as (
        select shard, nullif(if(low = shard, high, low), shard) as source
        from asked left join known using (hash)
    ),
    counted as (
        select shard, source, count(*) as texts,
            sum(count(*)) over (partition by shard) as all_texts
        from placed group by shard, source
    )
    select shard, all_texts, source, texts from counted join asking using (shard)
    qualify row_number() over (partition by shard order by source is null, texts desc, source)
        <= most
    order by shard, texts desc, source
"""


@dataclass(slots=True)
class KnownTexts:
    """How many different texts a shard has, and how many of these are in which other shards."""

    texts: int
    sources: dict[str, int] = field(default_factory=dict)  # by shard id, most texts first


def text_hashes(documents: pa.Table) -> Hashes:
    """The first 64 bits of the hash of each document that has a text, in its order."""
    readable = pc.equal(documents.column("status").cast(pa.string()), OK)
    digits = documents.column("content_hash").filter(readable).combine_chunks()
    return leading_bits(digits)


def leading_bits(hashes: pa.StringArray) -> Hashes:
    """The first 64 bits of hashes of 32 hex digits."""
    digits = "".join(pc.utf8_slice_codeunits(hashes, 0, 16).to_pylist())
    assert len(digits) == 16 * len(hashes), hashes
    return np.frombuffer(bytes.fromhex(digits), ">u8").astype(np.uint64)


def index_missing_shards(store: Store, sids: Iterable[str]) -> None:
    """Adds objects for the shards that no object has; each shard has a documents file.

    An object whose shards cannot be read is logged; its shards are added again.
    """
    new: dict[str, Hashes] = {}
    entries = 0
    for sid, hashes in read_texts(store, not_indexed(store, sids)):
        if new and entries + len(hashes) > MAX_ENTRIES:
            _append(store, new)
            new, entries = {}, 0
        new[sid] = hashes
        entries += len(hashes)
    if new:
        _append(store, new)


def not_indexed(store: Store, sids: Iterable[str]) -> list[str]:
    """Those of the shards that no object of the index has."""
    indexed = frozenset[str]().union(*shards_of_objects(store).values())
    return [sid for sid in sids if sid not in indexed]


def read_texts(store: Store, sids: Iterable[str]) -> Iterator[tuple[str, Hashes]]:
    """The hashes of the texts of each shard, from documents files; a damaged one is left out."""

    def read(sid: str) -> Hashes | None:
        documents = read_source(store, documents_key(sid), ["content_hash", "status"])
        return None if documents is None else text_hashes(documents)

    waiting = iter(sids)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        while batch := list(islice(waiting, READ_AHEAD)):
            texts = zip(batch, pool.map(read, batch), strict=True)
            yield from ((sid, hashes) for sid, hashes in texts if hashes is not None)


def shards_with_texts(
    store: Store,
    asking: Mapping[str, int],
    sources: Sequence[str],
    *,
    unstored: Mapping[str, Hashes] | None = None,
) -> dict[str, KnownTexts]:
    """For each asking shard, the other shards that probably have most of its texts.

    Each text counts for one shard. Holds one object of the index at a time. StorageError if the
    disk has no space for what the memory cannot hold.

    Args:
        store: The output.
        asking: By shard id, from how many others it takes answers at most.
        sources: The shards with answers. Of those with the same text, the first or the last counts.
        unstored: The hashes of the texts of shards that the index lacks.
    """
    by_sid = {sid: number for number, sid in enumerate(dict.fromkeys((*sources, *asking)))}
    objects = shards_of_objects(store)
    limits = {"shard": [by_sid[sid] for sid in asking], "most": [*asking.values()]}
    found: dict[str, KnownTexts] = {}
    with (
        tempfile.TemporaryDirectory(prefix="assay-texts-") as folder,
        duckdb.connect(
            f"{folder}/texts.duckdb",
            config={"memory_limit": JOIN_MEMORY, "threads": JOIN_THREADS},
        ) as database,
    ):

        def insert(query: str, entries: pa.Table) -> None:
            database.register("entries", entries).execute(query)
            database.unregister("entries")

        try:
            database.register("asking", pa.table(limits))
            database.execute(_TABLES)
            for query, sids in ((_ASK, asking), (_FIND.format(sources=len(sources)), sources)):
                for key, own in objects.items():
                    if not own.isdisjoint(sids):
                        insert(query, _object(store, key, by_sid))
                insert(query, _entries(unstored or {}, by_sid))
            rows = database.execute(_JOIN).fetchall()
        except duckdb.Error as error:
            raise StorageError(f"the texts of new shards cannot be compared: {error}") from error
    names = [*by_sid]
    for shard, texts, source, count in rows:
        known = found.setdefault(names[shard], KnownTexts(int(texts)))
        if source is not None:
            known.sources[names[source]] = count
    return found


def shards_of_objects(store: Store) -> dict[str, frozenset[str]]:
    """The shards of each object of the index, by key, from the ends of the objects.

    An object whose end is damaged is logged, and not in it.
    """

    def read(key: str) -> frozenset[str] | None:
        try:
            return frozenset(json.loads(metadata_at_end(store, key)["sids"]))
        except (ValueError, KeyError, TypeError) as error:
            _warn(store, key, error)
            return None

    keys = [*map(index_key, numbers(store, index_key))]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        found = zip(keys, pool.map(read, keys), strict=True)
        return {key: sids for key, sids in found if sids is not None}


def _object(store: Store, key: str, by_sid: Mapping[str, int]) -> pa.Table:
    """The entries of an object of the index; of a damaged one, none."""
    try:
        table = table_in(store.read(key))
    except ValueError as error:
        _warn(store, key, error)
        return _entries({}, by_sid)
    sids = json.loads(table.schema.metadata[f"{METADATA_PREFIX}sids".encode()])
    return table.set_column(1, "shard", _numbers(sids, by_sid).take(table["shard"]))


def _entries(texts: Mapping[str, Hashes], by_sid: Mapping[str, int]) -> pa.Table:
    """The hashes of these texts, each with the number of its shard; null without a number."""
    hashes = np.concatenate([np.empty(0, np.uint64), *texts.values()])
    shards = np.repeat(np.arange(len(texts), dtype=np.uint32), [*map(len, texts.values())])
    return pa.table({"hash": hashes, "shard": _numbers([*texts], by_sid).take(pa.array(shards))})


def _numbers(sids: Sequence[str], by_sid: Mapping[str, int]) -> pa.Array:
    return pa.array([by_sid.get(sid) for sid in sids], pa.int32())


def _append(store: Store, texts: Mapping[str, Hashes]) -> None:
    """Creates the object of these shards, with hashes in rising order: these take less space."""
    entries = _entries(texts, {sid: number for number, sid in enumerate(texts)})
    data = to_parquet(entries.sort_by("hash"), {"sids": json.dumps([*texts])})
    for number in free_numbers(store, index_key):
        if store.create(index_key(number), data):
            break
    failpoint("indexed")


def _warn(store: Store, key: str, error: Exception) -> None:
    text = "%s/%s: is damaged: %s; delete it: what it had is read again from the documents files"
    logger.warning(text, store.url, key, error)
