"""Which shards have a text: `index/<number>.parquet`, from the hash of the text to the shard.

Entry point: `shards_with_texts`, which joins the texts of new shards with the index, and adds what
the index lacks. An entry is only a hint: the documents file decides. Without the index, or with a
damaged one, documents files are read again; no answer depends on it.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import StorageError, one_line
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key, index_key
from pipeline.ledger.label_files import METADATA_PREFIX, read_source, table_in, to_parquet
from pipeline.ledger.numbered import free_numbers, numbers
from pipeline.sources.documents import OK
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)

# A shard takes answers from at most this many other shards, or from one for this many of its texts;
# the model answers the rest.
LEAST_SOURCES = 16
TEXTS_A_SOURCE = 256
# An object has at most this many entries, about 45 MB, unless one shard has more.
MAX_ENTRIES = 4_000_000
# Documents files that are read at once, and before their entries become part of an object.
READ_THREADS = 16
READ_AHEAD = 64
# Of shards that the index lacks, a dry run reads the documents files of this many.
MOST_UNINDEXED = 256
# Of the join. What does not fit is in a temporary file; each thread needs some memory of its own.
JOIN_MEMORY, JOIN_THREADS = "250MB", 4

Hashes = NDArray[np.uint64]

# `queries` has a row for each different text of each asking shard; `matches` has, for each of these
# texts that an object of the index has, the first of the shards with answers.
_TABLES = """
    create table queries (sid varchar, hash ubigint);
    create table matches (hash ubigint, source varchar);
"""
_ASK = "insert into queries select distinct sid, hash from entries"
_FIND = """
    insert into matches select hash, min(sid) from entries
    semi join queries using (hash) semi join sources using (sid) group by hash
"""
_JOIN = f"""
    with known as (select hash, min(source) as source from matches group by hash),
    counted as (
        select sid, source, count(*) as texts,
            sum(count(*)) over (partition by sid) as all_texts
        from queries left join known using (hash) group by sid, source
    )
    select sid, all_texts, source, texts from counted
    qualify row_number() over (partition by sid order by source is null, texts desc, source)
        <= greatest({LEAST_SOURCES}, all_texts // {TEXTS_A_SOURCE})
    order by sid, texts desc, source
"""


@dataclass(slots=True)
class KnownTexts:
    """How many different texts a shard has, and how many of these are in which other shards."""

    texts: int
    sources: dict[str, int] = field(default_factory=dict)  # by shard id, most texts first


def text_hashes(documents: pa.Table) -> Hashes:
    """The hashes of the texts; documents without one are left out."""
    has_text = pc.equal(documents.column("status").cast(pa.string()), OK)
    hashes = documents.column("content_hash").filter(has_text).cast(pa.string())
    return leading_bits(hashes.combine_chunks())


def leading_bits(hashes: pa.StringArray) -> Hashes:
    """The first 64 bits of hashes of 32 hex digits."""
    digits = "".join(pc.utf8_slice_codeunits(hashes, 0, 16).to_pylist())
    assert len(digits) == 16 * len(hashes), hashes
    return np.frombuffer(bytes.fromhex(digits), ">u8").astype(np.uint64)


def shards_with_texts(
    store: Store,
    asking: Iterable[tuple[str, Hashes]],
    sources: Collection[str],
    *,
    keep: bool = True,
) -> dict[str, KnownTexts]:
    """For each asking shard, the shards with answers that probably have most of its texts.

    Each text counts for one shard. `asking` are new shards with the hashes of their texts, and
    `sources` others, with answers. Without `keep` nothing is written, and few documents files are
    read. Holds one object of the index at a time. StorageError if the disk has no space for what
    the memory cannot hold.
    """
    known_texts: dict[str, KnownTexts] = {}
    try:
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

            database.execute(_TABLES)
            database.register("sources", pa.table({"sid": pa.array([*sources], pa.string())}))
            asked = 0
            for texts in _batches(asking):
                insert(_ASK, _entries(texts))
                asked += sum(map(len, texts.values()))
            if not asked:
                return {}
            indexed = set[str]()
            for number in numbers(store, index_key):
                entries, sids = _object(store, index_key(number))
                indexed.update(sids)
                insert(_FIND, entries)
            lacking = [sid for sid in sources if sid not in indexed]
            for texts in _batches(read_texts(store, lacking[: None if keep else MOST_UNINDEXED])):
                insert(_FIND, _entries(texts))
                if keep:
                    _append(store, texts)
            rows = database.execute(_JOIN).fetchall()
    except duckdb.Error as error:
        fix = "set TMPDIR to a folder with more room"
        raise StorageError(f"new texts cannot be compared: {one_line(error)}; {fix}") from error
    for sid, all_texts, source, texts_of_source in rows:
        known = known_texts.setdefault(sid, KnownTexts(int(all_texts)))
        if source is not None:
            known.sources[source] = texts_of_source
    return known_texts


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


def _batches(texts: Iterable[tuple[str, Hashes]]) -> Iterator[dict[str, Hashes]]:
    """The texts of shards, as many at a time as an object of the index may have."""
    batch: dict[str, Hashes] = {}
    entries = 0
    for sid, hashes in texts:
        if batch and entries + len(hashes) > MAX_ENTRIES:
            yield batch
            batch, entries = {}, 0
        batch[sid] = hashes
        entries += len(hashes)
    if batch:
        yield batch


def _entries(texts: dict[str, Hashes]) -> pa.Table:
    """A row for each text of each shard."""
    shards = np.repeat(np.arange(len(texts), dtype=np.int32), [*map(len, texts.values())])
    sids = pa.DictionaryArray.from_arrays(pa.array(shards), pa.array([*texts], pa.string()))
    return pa.table({"hash": np.concatenate([*texts.values()]), "sid": sids})


def _object(store: Store, key: str) -> tuple[pa.Table, list[str]]:
    """The entries of an object of the index, and its shards; none if it is damaged."""
    try:
        entries = table_in(store.read(key)).select(["hash", "sid"])
        return entries, json.loads(entries.schema.metadata[f"{METADATA_PREFIX}sids".encode()])
    except (ValueError, KeyError, TypeError) as error:
        text = "%s/%s: is damaged: %s; delete it: documents files are read in its place"
        logger.warning(text, store.url, key, error)
        return _entries({"": np.empty(0, np.uint64)}), []


def _append(store: Store, texts: dict[str, Hashes]) -> None:
    """Creates an object of these shards."""
    # — hashes in rising order take less space
    data = to_parquet(_entries(texts).sort_by("hash"), {"sids": json.dumps([*texts])})
    for number in free_numbers(store, index_key):
        if store.create(index_key(number), data):
            break
    failpoint("indexed")
