"""Reuse of stored answers: of earlier work on the same rows, and of equal texts in other shards.

Entry point: `StoredAnswers.find`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.ledger.cells import Source
from pipeline.ledger.columns import STAGE, structs
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import read_source
from pipeline.sources.documents import OK, QUARANTINED, TRUNCATED
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store

# Sources that are read at once.
READ_THREADS = 16
# Other shards whose texts are kept: about a megabyte each.
CACHED_SHARDS = 64


class StoredAnswers:
    """Finds answers in the label files of the same shard by row, and in others by text."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # — each task of a shard looks into the same other shards
        self._texts: Callable[[str], pa.StringArray | None]
        self._texts = lru_cache(CACHED_SHARDS)(self._read_texts)

    def find(
        self,
        shard: Shard,
        documents: pa.Table,
        sources: Sequence[Source],
        *,
        is_retry: bool,
    ) -> tuple[pa.StructArray | None, Counter[str]]:
        """Rows of label files, null without an answer; and how many are of each other shard.

        The documents are the shard's whole documents file, the sources are of any shard. Earlier
        sources count more. A failed row is not an answer; a quarantined one is, in the same shard,
        unless this is a retry. The rows are without the column `stage`. The first value is None if
        there is no answer.
        """
        texts = text_identities(documents)
        # — a document without text has no answer, but its hash may equal another's
        is_open = _mask(pc.equal(documents.column("status").cast(pa.string()), OK))  # [docs]
        if not is_open.any():
            return None, Counter()
        rows = np.full(len(texts), -1, np.int64)  # of the concatenated `answers`; -1: none
        answers: list[pa.StructArray] = []
        reused: Counter[str] = Counter()
        read = partial(self._read, shard=shard, texts=texts, is_retry=is_retry)
        with ThreadPoolExecutor(READ_THREADS) as pool:
            for source, (at, file) in zip(sources, pool.map(read, sources), strict=True):
                taken = np.flatnonzero(is_open & (at >= 0))
                if not len(taken):
                    continue
                is_open[taken] = False
                rows[taken] = sum(map(len, answers)) + np.arange(len(taken))
                kept = [name for name in file.column_names if name not in ("doc_id", STAGE)]
                answers.append(structs(file.select(kept).take(pa.array(at[taken]))))
                if source.sid != shard.id:
                    reused[source.sid] += len(taken)
        if not answers:
            return None, reused
        # — a null index gives a null row
        return pa.concat_arrays(answers).take(pa.array(rows, mask=rows < 0)), reused

    def _read(
        self, source: Source, *, shard: Shard, texts: pa.StringArray, is_retry: bool
    ) -> tuple[NDArray[np.int64], pa.Table]:
        """A label file, and [docs] the row with the answer to each document, -1 without one."""
        key, is_own = source.key, source.sid == shard.id
        file = read_source(self._store, key, None)
        at = np.full(len(texts), -1, np.int64)
        if file is None:
            return at, pa.table({})
        stored = texts if is_own else self._texts(source.sid)
        if stored is None:
            return at, file
        if len(stored) != len(file):
            raise StorageError(
                f"{self._store.url}/{key}: has other rows than the {len(stored)} of its documents "
                f"file; `assay verify` reports more"
            )
        accepted = [OK, TRUNCATED] + [QUARANTINED] * (is_own and not is_retry)
        status = file.column("status").cast(pa.string())
        is_answer = _mask(pc.is_in(status, value_set=pa.array(accepted)))
        if is_own:
            return np.where(is_answer, np.arange(len(texts)), -1), file
        answers = np.flatnonzero(is_answer)
        places = pc.index_in(texts, value_set=stored.take(pa.array(answers)))
        places = pc.fill_null(places, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        return np.append(answers, -1)[places], file  # — -1 is the last

    def _read_texts(self, sid: str) -> pa.StringArray | None:
        documents = read_source(self._store, documents_key(sid), ["content_hash", "n_chars"])
        return None if documents is None else text_identities(documents)


def text_identities(documents: pa.Table) -> pa.StringArray:
    """What equal texts, and no others, share: the hash of 128 bits and the number of characters."""
    columns = (documents.column(name).cast(pa.string()) for name in ("content_hash", "n_chars"))
    return pc.binary_join_element_wise(*columns, ":").combine_chunks()


def _mask(values: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    return np.array(values.to_numpy(zero_copy_only=False), dtype=np.bool_)
