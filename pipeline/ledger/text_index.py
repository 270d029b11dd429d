"""Which shards have a text: `index/<number>.parquet`, from the hash of the text to the shard.

Entry points: `index_missing_shards`, `hashes_of` and `candidates`. An entry says only where to
look: what a documents file says counts. Without the index, or with a damaged one, documents files
are read again; no answer depends on it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key, index_key
from pipeline.ledger.label_files import (
    METADATA_PREFIX,
    metadata_at_end,
    read_source,
    table_in,
    to_parquet,
)
from pipeline.ledger.numbered import free_numbers
from pipeline.ledger.numbered import numbers as object_numbers
from pipeline.sources.documents import OK
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)

# An object has at most this many entries, about 45 MB, unless one shard has more.
MAX_ENTRIES = 4_000_000
# Documents files that are read at once, and before their entries become part of an object.
READ_THREADS = 16
READ_AHEAD = 64

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class IndexObject:
    """The texts of some shards: `hashes` in rising order, and the number of each one's shard."""

    key: str  # empty before the object is stored
    sids: tuple[str, ...]
    hashes: Hashes  # [entries]
    shards: NDArray[np.uint32]  # [entries], of `sids`

    @classmethod
    def of(cls, texts: Mapping[str, Hashes]) -> IndexObject:
        """The object of these shards with the hashes of their texts."""
        hashes = np.concatenate([np.empty(0, np.uint64), *texts.values()])
        shards = np.repeat(np.arange(len(texts), dtype=np.uint32), [*map(len, texts.values())])
        order = np.argsort(hashes, kind="stable")
        return cls("", tuple(texts), hashes[order], shards[order])

    def to_bytes(self) -> bytes:
        """The object as a Parquet file; `from_bytes` is the inverse."""
        table = pa.table({"hash": self.hashes, "shard": self.shards})
        return to_parquet(table, {"sids": json.dumps(self.sids)})

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> IndexObject:
        """ValueError if the file is damaged."""
        try:
            table = table_in(data)
            sids = json.loads(table.schema.metadata[f"{METADATA_PREFIX}sids".encode()])
            hashes, shards = (table.column(name).to_numpy() for name in ("hash", "shard"))
            if hashes.dtype != np.uint64 or (shards >= len(sids)).any():
                raise ValueError("its columns are not those of an index")
            if (hashes[1:] < hashes[:-1]).any():
                raise ValueError("its hashes are not in order")
        except (pa.ArrowException, KeyError, TypeError) as error:
            raise ValueError(str(error)) from error
        return cls(key, tuple(sids), hashes, shards)

    def texts_of(self, sids: Collection[str]) -> dict[str, Hashes]:
        """The hashes of the texts of those of the shards that the object has."""
        numbers = [number for number, sid in enumerate(self.sids) if sid in sids]
        if not numbers:
            return {}
        mine = np.isin(self.shards, numbers)
        hashes, shards = self.hashes[mine], self.shards[mine]
        order = np.argsort(shards, kind="stable")
        edges = np.searchsorted(shards[order], [*numbers, len(self.sids)])
        parts = zip(numbers, edges, edges[1:], strict=False)
        return {self.sids[number]: hashes[order[start:end]] for number, start, end in parts}

    def numbers_of(
        self, queries: Hashes, numbers: Mapping[str, int], asking: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """[queries] the number of a shard with the text, except the one that asks; else -1."""
        by_entry = np.array([numbers.get(sid, -1) for sid in self.sids], np.int32)[self.shards]
        hashes, by_hash = self.hashes[by_entry >= 0], by_entry[by_entry >= 0]
        if not len(hashes):
            return np.full(len(queries), -1, np.int32)
        # — entries of one text are in the order of their shards: if the first and the last one are
        # of the shard that asks, all are
        first = np.minimum(np.searchsorted(hashes, queries), len(hashes) - 1)
        last = np.searchsorted(hashes, queries, side="right") - 1
        at = np.where(by_hash[first] == asking, last, first)
        is_other = (hashes[at] == queries) & (by_hash[at] != asking)
        return np.where(is_other, by_hash[at], np.int32(-1))


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
    indexed = {sid for of_object in shards_of_objects(store).values() for sid in of_object}
    new: dict[str, Hashes] = {}
    entries = 0
    for sid, hashes in _read_texts(store, [sid for sid in sids if sid not in indexed]):
        if new and entries + len(hashes) > MAX_ENTRIES:
            _append(store, IndexObject.of(new))
            new, entries = {}, 0
        new[sid] = hashes
        entries += len(hashes)
    if new:
        _append(store, IndexObject.of(new))


def hashes_of(store: Store, sids: Collection[str]) -> dict[str, Hashes]:
    """The hashes of the texts of these shards; documents files are read if no object has them.

    A shard with a damaged documents file is left out.
    """
    texts: dict[str, Hashes] = {}
    having = [key for key, own in shards_of_objects(store).items() if not own.isdisjoint(sids)]
    for item in _objects(store, having):
        texts |= item.texts_of(sids)
    texts |= _read_texts(store, [sid for sid in sids if sid not in texts])
    return texts


def candidates(
    store: Store,
    hashes: Hashes,
    numbers: Mapping[str, int],
    asking: NDArray[np.int32],
    *,
    unstored: IndexObject | None = None,
) -> NDArray[np.int32]:
    """For each hash the number of a shard that probably has that text; -1 without one.

    Only shards with a number are considered, without the one that asks, whose number, or -1, is in
    `asking`: of several the one that was indexed first. Holds one object of the index at a time;
    `unstored` is one more.
    """
    order = np.argsort(hashes, kind="stable")  # — sorted queries are found in far less time
    queries, by_query = hashes[order], np.full(len(hashes), -1, np.int32)
    more = [] if unstored is None else [unstored]
    stored = map(index_key, object_numbers(store, index_key))
    for index in chain(_objects(store, stored), more) if numbers else ():
        by_object = index.numbers_of(queries, numbers, asking[order])
        by_query = np.where(by_query < 0, by_object, by_query)
    by_hash = np.empty_like(by_query)
    by_hash[order] = by_query
    return by_hash


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

    keys = [*map(index_key, object_numbers(store, index_key))]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        found = zip(keys, pool.map(read, keys), strict=True)
        return {key: sids for key, sids in found if sids is not None}


def _objects(store: Store, keys: Iterable[str]) -> Iterator[IndexObject]:
    """These objects of the index; one is held at a time."""
    for key in keys:
        try:
            yield IndexObject.from_bytes(key, store.read(key))
        except ValueError as error:
            _warn(store, key, error)


def _warn(store: Store, key: str, error: Exception) -> None:
    text = "%s/%s: is damaged: %s; delete it: what it had is read again from the documents files"
    logger.warning(text, store.url, key, error)


def _append(store: Store, new: IndexObject) -> None:
    data = new.to_bytes()
    for number in free_numbers(store, index_key):
        if store.create(index_key(number), data):
            break
    failpoint("indexed")


def _read_texts(store: Store, sids: Sequence[str]) -> Iterator[tuple[str, Hashes]]:
    def read(sid: str) -> Hashes | None:
        documents = read_source(store, documents_key(sid), ["content_hash", "status"])
        return None if documents is None else text_hashes(documents)

    waiting = iter(sids)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        while batch := list(islice(waiting, READ_AHEAD)):
            texts = zip(batch, pool.map(read, batch), strict=True)
            yield from ((sid, hashes) for sid, hashes in texts if hashes is not None)
