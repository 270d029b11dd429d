"""Which shards have a text: `index/<number>.parquet`, from the hash of the text to the shard.

Entry points: `cover`, which adds the shards that no object has, and `candidates`. An entry says
only where to look: what a documents file says counts. Without the index, or with a damaged one,
documents files are read again; no answer depends on it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key, index_key
from pipeline.ledger.label_files import METADATA_PREFIX, read_file, to_parquet
from pipeline.ledger.numbered import append_numbered, numbers
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
            table = pq.read_table(pa.BufferReader(data), use_threads=False)
            sids = json.loads(table.schema.metadata[f"{METADATA_PREFIX}sids".encode()])
            hashes, shards = (table.column(name).to_numpy() for name in ("hash", "shard"))
            if hashes.dtype != np.uint64 or (shards >= len(sids)).any():
                raise ValueError("its columns are not those of an index")
            if (hashes[1:] < hashes[:-1]).any():
                raise ValueError("its hashes are not in order")
        except (pa.ArrowException, OSError, KeyError, TypeError) as error:
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

    def places(
        self, hashes: Hashes, numbers: Mapping[str, int]
    ) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """The positions of the hashes that a numbered shard has, and the number of the first."""
        number_of = np.array([numbers.get(sid, -1) for sid in self.sids], np.int32)
        of_entries = number_of[self.shards]
        numbered = of_entries >= 0
        own, of_own = self.hashes[numbered], of_entries[numbered]
        if not len(own):
            return np.empty(0, np.intp), np.empty(0, np.int32)
        at = np.minimum(np.searchsorted(own, hashes), len(own) - 1)
        positions = np.flatnonzero(own[at] == hashes)
        return positions, of_own[at[positions]]


def text_hashes(documents: pa.Table) -> Hashes:
    """The first 64 bits of the hash of each document that has a text, in its order."""
    readable = pc.equal(documents.column("status").cast(pa.string()), OK)
    digits = documents.column("content_hash").filter(readable).combine_chunks()
    return leading_bits(digits)


def leading_bits(hashes: pa.StringArray) -> Hashes:
    """The first 64 bits of hashes of 32 hex digits."""
    if not len(hashes):
        return np.empty(0, np.uint64)
    fixed = hashes.cast(pa.binary()).cast(pa.binary(32))  # ArrowInvalid if one has another length
    digits = np.frombuffer(fixed.buffers()[1], np.uint8)[fixed.offset * 32 :]
    digits = digits[: len(fixed) * 32].reshape(-1, 32)[:, :16]
    values = (digits & 0x0F) + 9 * (digits > ord("9"))  # 0-9 are 0x30.., a-f are 0x61..
    octets = (values[:, ::2] << 4 | values[:, 1::2]).astype(np.uint8)
    return np.ascontiguousarray(octets).view(">u8").ravel().astype(np.uint64)


def cover(
    store: Store,
    sids: Collection[str],
    needed: Collection[str] = frozenset(),
    *,
    keep: bool = True,
) -> dict[str, Hashes]:
    """Adds objects for the shards that no object has; the hashes of the texts of those `needed`.

    Each shard has a documents file. An object that cannot be read is logged; its shards are added
    again. Without `keep` nothing is written, and only documents files of `needed` are read.
    """
    covered: set[str] = set()
    texts: dict[str, Hashes] = {}
    for each in _objects(store, logger.warning):
        covered.update(each.sids)
        texts |= each.texts_of(needed)
    new: dict[str, Hashes] = {}
    entries = 0
    uncovered = [sid for sid in (sids if keep else needed) if sid not in covered]
    for sid, hashes in _read_texts(store, uncovered):
        if new and entries + len(hashes) > MAX_ENTRIES:
            _append(store, IndexObject.of(new))
            new, entries = {}, 0
        if keep:
            new[sid] = hashes
            entries += len(hashes)
        if sid in needed:
            texts[sid] = hashes
    if new:
        _append(store, IndexObject.of(new))
    return texts


def candidates(
    store: Store, hashes: Hashes, numbers: Mapping[str, int], *, unstored: IndexObject | None = None
) -> NDArray[np.int32]:
    """For each hash the number of a shard that probably has that text; -1 without one.

    Only shards with a number are considered: of several the one that was indexed first. Holds one
    object of the index at a time; `unstored` is one more.
    """
    order = np.argsort(hashes, kind="stable")
    queries = hashes[order]
    of_queries = np.full(len(hashes), -1, np.int32)
    more = [] if unstored is None else [unstored]
    for each in chain(_objects(store), more) if numbers else ():
        positions, shards = each.places(queries, numbers)
        chosen = of_queries[positions] < 0
        of_queries[positions[chosen]] = shards[chosen]
    of_hashes = np.empty_like(of_queries)
    of_hashes[order] = of_queries
    return of_hashes


def shards_of_objects(store: Store) -> dict[str, tuple[str, ...]]:
    """The shards of each object of the index, by key; a damaged object is not in it."""
    return {each.key: each.sids for each in _objects(store)}


def _objects(store: Store, log: Callable[..., None] = logger.debug) -> Iterator[IndexObject]:
    """The objects of the index, in the order of their numbers; one is held at a time."""
    for key in map(index_key, numbers(store, index_key)):
        try:
            yield IndexObject.from_bytes(key, store.read(key))
        except ValueError as error:
            log(
                "%s/%s: is damaged: %s; what it had is read again from the documents files, and "
                "`assay gc` deletes it",
                store.url,
                key,
                error,
            )


def _append(store: Store, new: IndexObject) -> None:
    data = new.to_bytes()
    append_numbered(store, index_key, lambda number: store.create(index_key(number), data))
    failpoint("indexed")


def _read_texts(store: Store, sids: Sequence[str]) -> Iterator[tuple[str, Hashes]]:
    def read(sid: str) -> Hashes:
        return text_hashes(read_file(store, documents_key(sid), ["content_hash", "status"]))

    waiting = iter(sids)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        while batch := list(islice(waiting, READ_AHEAD)):
            yield from zip(batch, pool.map(read, batch), strict=True)
