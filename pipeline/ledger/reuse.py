"""Reuse of stored answers: of earlier work on the same rows, and of equal texts in other shards.

Entry point: `StoredAnswers.find`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import StorageError
from pipeline.ledger.cells import Source
from pipeline.ledger.columns import STAGE, only, overlaid, structs
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
    """Finds answers to a shard's documents: by row in its own label files, by text in others.

    `documents` is its whole documents file. In a retry, rows that failed are tried again.
    """

    def __init__(self, store: Store, shard: Shard, documents: pa.Table, *, is_retry: bool) -> None:
        self._store, self._shard, self._is_retry = store, shard, is_retry
        self._texts = text_identities(documents)
        # — a document without text has no answer, but its hash may equal another's
        self._has_text = np.array(pc.equal(documents["status"].cast(pa.string()), OK), np.bool_)
        # — each task of a shard looks into the same other shards
        self._texts_of: Callable[[str], pa.StringArray | None]
        self._texts_of = lru_cache(CACHED_SHARDS)(self._read_texts)

    def find(self, sources: Sequence[Source]) -> tuple[pa.StructArray | None, int]:
        """Rows of label files, null without an answer; and how many are of other shards.

        Earlier sources count more. A failed row is not an answer; a quarantined one is, in the same
        shard, unless this is a retry. The rows are without the column `stage`. The first value is
        None if there is no answer.
        """
        answers, is_open, reused = None, self._has_text.copy(), 0
        with ThreadPoolExecutor(READ_THREADS) as pool:
            for source, stored in zip(sources, pool.map(self._read, sources), strict=True):
                if stored is None:
                    continue
                taken = is_open & np.array(stored.is_valid(), np.bool_)
                is_open &= ~taken
                answers = overlaid(answers, only(stored, taken))
                reused += 0 if source.sid == self._shard.id else int(taken.sum())
        return answers, reused

    def _read(self, source: Source) -> pa.StructArray | None:
        """[docs] the answers of a label file; None if it is damaged, or no document has text."""
        is_own = source.sid == self._shard.id
        if not self._has_text.any() or (file := read_source(self._store, source.key)) is None:
            return None
        stored = self._texts if is_own else self._texts_of(source.sid)
        if stored is None:
            return None
        if len(stored) != len(file):
            raise StorageError(
                f"{self._store.url}/{source.key}: has other rows than the {len(stored)} of its "
                f"documents file; `assay verify` reports more"
            )
        accepted = [OK, TRUNCATED] + [QUARANTINED] * (is_own and not self._is_retry)
        is_answer = pc.is_in(file["status"].cast(pa.string()), value_set=pa.array(accepted))
        kept = [name for name in file.column_names if name not in ("doc_id", STAGE)]
        answers = only(structs(file.select(kept)), np.array(is_answer, np.bool_))
        if is_own:
            return answers
        at = pc.indices_nonzero(is_answer)
        # — a null index gives a null row
        return answers.take(at).take(pc.index_in(self._texts, value_set=stored.take(at)))

    def _read_texts(self, sid: str) -> pa.StringArray | None:
        documents = read_source(self._store, documents_key(sid), ["content_hash", "n_chars"])
        return None if documents is None else text_identities(documents)


def text_identities(documents: pa.Table) -> pa.StringArray:
    """Values that are equal for equal texts alone: a hash of 128 bits, and the length."""
    columns = (documents.column(name).cast(pa.string()) for name in ("content_hash", "n_chars"))
    return pc.binary_join_element_wise(*columns, ":").combine_chunks()
