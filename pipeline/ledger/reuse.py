"""Reuse of stored answers: of earlier work on the same rows, and of equal texts in other shards.

Entry points: `StoredAnswers.find`, and `overlaid`, which puts answers into other label rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.ledger.cells import Source
from pipeline.ledger.columns import ADDED, ROW, plain_type, structs
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import read_file, shard_in
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
        self._texts: Callable[[str], pa.StringArray] = lru_cache(CACHED_SHARDS)(self._read_texts)

    def find(
        self,
        shard: Shard,
        documents: pa.Table,
        sources: Sequence[Source],
        *,
        is_retry: bool,
        is_whole: bool = False,
    ) -> tuple[pa.StructArray | None, Counter[str]]:
        """Rows of label files, null without an answer; and how many are of each other shard.

        The documents are the shard's whole documents file. Earlier sources count more. A failed row
        is no answer; a quarantined one is, in the same shard, unless this is a retry. With
        `is_whole` the rows have the columns that are added to answers, such as the calibrated ones.
        The first value is None if there is no answer at all.
        """
        texts = text_hashes_and_lengths(documents)
        # — a document without text has no answer, but its hash may equal another's
        is_open = _mask(pc.equal(documents.column("status").cast(pa.string()), OK))  # [docs]
        rows = np.full(len(texts), -1, np.int64)  # of the concatenated `answers`; -1: none
        answers: list[pa.StructArray] = []
        reused: Counter[str] = Counter()
        count = 0
        with ThreadPoolExecutor(READ_THREADS) as pool:
            for start in range(0, len(sources), READ_THREADS):
                if not is_open.any():
                    break
                batch = sources[start : start + READ_THREADS]
                places = pool.map(lambda source: self._places(source, shard, texts), batch)
                for source, (at, table) in zip(batch, places, strict=True):
                    taken = is_open & (at >= 0)
                    accepted = [OK, TRUNCATED]
                    if source.sid == shard.id and not is_retry:
                        accepted.append(QUARANTINED)
                    status = table.column("status").cast(pa.string())
                    taken[taken] = _mask(pc.is_in(status, value_set=pa.array(accepted)))[at[taken]]
                    number = int(taken.sum())
                    if not number:
                        continue
                    rows[taken] = count + np.arange(number)
                    count += number
                    is_open &= ~taken
                    dropped = {"doc_id", ROW, *(() if is_whole else ADDED)}
                    kept = [name for name in table.column_names if name not in dropped]
                    answers.append(structs(table.select(kept).take(pa.array(at[taken]))))
                    if source.sid != shard.id:
                        reused[source.sid] += number
        if not answers:
            return None, reused
        # — a null index gives a null row
        return pa.concat_arrays(answers).take(pa.array(rows, mask=rows < 0)), reused

    def _places(
        self, source: Source, shard: Shard, texts: pa.StringArray
    ) -> tuple[NDArray[np.int64], pa.Table]:
        """[docs] the row of the source for each document, -1 without one; and the source."""
        file = read_file(self._store, source.key, None)
        if source.sid == shard.id:
            at = np.full(len(texts), -1, np.int64)
            rows = self._rows(source, file, shard.piece.start_row, len(texts))
            at[rows] = np.arange(len(rows))
            return at, file
        stored = self._texts(source.sid)
        if ROW in file.column_names:
            start = shard_in(file).piece.start_row
            stored = stored.take(pa.array(self._rows(source, file, start, len(stored))))
        if len(stored) != len(file):
            raise self._damaged(source, len(file), len(stored))
        places = pc.fill_null(pc.index_in(texts, value_set=stored), -1)
        return places.to_numpy(zero_copy_only=False).astype(np.int64), file

    def _read_texts(self, sid: str) -> pa.StringArray:
        columns = ["content_hash", "n_chars"]
        return text_hashes_and_lengths(read_file(self._store, documents_key(sid), columns))

    def _rows(
        self, source: Source, file: pa.Table, start_row: int, count: int
    ) -> NDArray[np.int64]:
        """The rows of a label file, from 0 in its shard, which has `count` rows."""
        if ROW in file.column_names:
            rows = file.column(ROW).to_numpy() - start_row
            if len(rows) and not 0 <= rows.min() <= rows.max() < count:
                raise self._damaged(source, int(rows.max()) + 1, count)
            return np.asarray(rows, np.int64)
        if len(file) != count:
            raise self._damaged(source, len(file), count)
        return np.arange(count)

    def _damaged(self, source: Source, rows: int, documents: int) -> StorageError:
        return StorageError(
            f"{self._store.url}/{source.key}: has {rows} rows and its documents file {documents}; "
            f"`assay verify` reports more"
        )


def text_hashes_and_lengths(documents: pa.Table) -> pa.StringArray:
    """The identity of each text: its hash of 128 bits and its number of characters."""
    columns = (documents.column(name).cast(pa.string()) for name in ("content_hash", "n_chars"))
    return pc.binary_join_element_wise(*columns, ":").combine_chunks()


def text_identities(documents: pa.Table) -> list[str]:
    """What equal texts, and no others, have in common; a string for each document."""
    identities: list[str] = text_hashes_and_lengths(documents).to_pylist()
    return identities


def overlaid(rows: pa.Table, answers: pa.StructArray) -> pa.Table:
    """The label rows, with the answers in place of theirs where there is one."""
    numbers = np.arange(rows.num_rows)
    indices = np.where(_mask(answers.is_valid()), numbers + len(numbers), numbers)
    columns = {"doc_id": rows.column("doc_id")}
    for field in rows.schema:
        if field.name != "doc_id":
            columns[field.name] = answers.field(field.name).cast(plain_type(field.type))
    with_answers = pa.table(columns).select(rows.column_names)
    plain = rows.cast(with_answers.schema)
    return pa.concat_tables([plain, with_answers]).take(pa.array(indices)).cast(rows.schema)


def _mask(values: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    return np.array(values.to_numpy(zero_copy_only=False), dtype=np.bool_)
