"""Answers that are there already for the same text: of a file's earlier version, or of a first try.

Knows label and documents files. Knows nothing of where an answer came from, of Ray or of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.ledger.cells import ReusableShard, WorkItem
from pipeline.ledger.columns import CALIBRATED
from pipeline.ledger.keys import documents_key
from pipeline.sources.documents import OK, QUARANTINED, TRUNCATED
from pipeline.stores.store import Store

# The shards of one object come one after another, and all look into the same earlier shards.
KEPT_SHARDS = 256


class AnswerCache:
    """Looks up texts by their hash in the shards that a work names."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hashes: Callable[[str], pa.Array] = lru_cache(KEPT_SHARDS)(self._read_hashes)
        # — the slices of one shard come one after another, and look into the same earlier shard
        self._answers: Callable[[str, tuple[str, ...]], list[pa.Table]] = lru_cache(1)(
            self._read_answers
        )

    def find(self, work: WorkItem, documents: pa.Table, start: int) -> dict[str, pa.StructArray]:
        """For each of the work's tasks the whole row of an earlier answer, or null.

        The documents are the shard's from row `start` on. A row is answered for all of the tasks
        or for none of them. A failed row is not an answer; a quarantined one is, unless the work is
        to try it again.
        """
        if not work.reuse or not work.tasks:
            return {}
        hashes = documents.column("content_hash").combine_chunks()
        # — what has no text has no answer anywhere, though others have the same hash
        is_open = _mask(pc.equal(documents.column("status"), OK))  # [docs]
        rows = np.full(len(hashes), -1, dtype=np.int64)  # of the found answers laid end to end
        found: list[list[pa.Table]] = [[] for _ in work.tasks]
        offset = 0
        for earlier in work.reuse:
            if not is_open.any():
                break
            at = self._places(work, earlier, hashes, start)
            taken = is_open & (at >= 0)
            if not taken.any():
                continue
            answers = self._answers(earlier.sid, tuple(earlier.labels[task] for task in work.tasks))
            taken[taken] = _usable(answers, again=work.retry > 0)[at[taken]]
            rows[taken] = offset + np.arange(taken.sum())
            offset += int(taken.sum())
            is_open &= ~taken
            for tables, answer in zip(found, answers, strict=True):
                tables.append(answer.take(pa.array(at[taken])))
        if offset == 0:
            return {}
        indices = pa.array(rows, mask=rows < 0)
        wholes = (_structs(pa.concat_tables(tables), indices) for tables in found)
        return dict(zip(work.tasks, wholes, strict=True))

    def _places(
        self, work: WorkItem, earlier: ReusableShard, hashes: pa.Array, start: int
    ) -> NDArray[np.int64]:  # [docs], -1: not there
        """Where the earlier shard has the texts; the shard itself has each in its own row.

        Equal texts may have fared differently, and one's failure says nothing of the other.
        """
        there = self._hashes(earlier.sid)
        if earlier.sid != work.shard.id:
            return _places(hashes, there)
        if len(there) != work.shard.rows:
            raise StorageError(
                f"{self._store.url}/{documents_key(earlier.sid)}: has {len(there)} rows of a shard "
                f"of {work.shard.rows}; `assay verify` tells more"
            )
        same = _mask(pc.equal(hashes, there.slice(start, len(hashes))))
        return np.where(same, np.arange(start, start + len(hashes)), -1)

    def _read_hashes(self, sid: str) -> pa.Array:
        table = self._read(documents_key(sid), ["content_hash"])
        return table.column("content_hash").combine_chunks()

    def _read_answers(self, sid: str, keys: tuple[str, ...]) -> list[pa.Table]:
        return [self._read_answer(sid, key) for key in keys]

    def _read_answer(self, sid: str, key: str) -> pa.Table:
        whole = self._read(key, None)
        # — what is calibrated is so anew: the same answers may have been without, or otherwise
        left_out = {"doc_id", CALIBRATED}.intersection(whole.column_names)
        answers = whole.drop_columns(sorted(left_out))
        if answers.num_rows != len(self._hashes(sid)):
            raise StorageError(
                f"{self._store.url}/{key}: has {answers.num_rows} rows and its "
                f"documents file {len(self._hashes(sid))}; `assay verify` tells more"
            )
        return answers

    def _read(self, key: str, columns: list[str] | None) -> pa.Table:
        """These columns, or all of them: what a row of answers has differs from task to task."""
        try:
            return pq.read_table(
                pa.BufferReader(self._store.read(key)), columns=columns, use_threads=False
            )
        except pa.ArrowException as error:
            raise StorageError(f"{self._store.url}/{key}: cannot be read: {error}") from error


def overlaid(computed: pa.Table, known: pa.StructArray) -> pa.Table:
    """The computed label rows, but for those that are known already."""
    rows = np.arange(computed.num_rows)
    indices = np.where(known.is_valid().to_numpy(zero_copy_only=False), rows + len(rows), rows)
    answers = (
        pa.table(
            {
                name: known.field(name).cast(_plain(computed.schema.field(name).type))
                for name in computed.column_names
                if name != "doc_id"
            }
        )
        .append_column("doc_id", computed.column("doc_id"))
        .select(computed.column_names)
    )
    plain = computed.cast(answers.schema)
    return pa.concat_tables([plain, answers]).take(pa.array(indices)).cast(computed.schema)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _places(wanted: pa.Array, there: pa.Array) -> NDArray[np.int64]:
    places = pc.fill_null(pc.index_in(wanted, value_set=there), -1)
    return np.asarray(places.to_numpy(zero_copy_only=False), dtype=np.int64)


def _usable(answers: Sequence[pa.Table], *, again: bool) -> NDArray[np.bool_]:
    accepted = pa.array([OK, TRUNCATED] if again else [OK, TRUNCATED, QUARANTINED])
    masks = (pc.is_in(a.column("status").cast(pa.string()), value_set=accepted) for a in answers)
    return reduce(np.logical_and, map(_mask, masks))


def _mask(values: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return np.array(whole.to_numpy(zero_copy_only=False), dtype=np.bool_)


def _structs(answers: pa.Table, indices: pa.Array) -> pa.StructArray:
    """The answers' rows at the indices, null where an index is; dictionaries as plain strings."""
    plain = [c.cast(_plain(c.type)).combine_chunks() for c in answers.columns]
    whole = pa.StructArray.from_arrays(plain, names=answers.column_names)
    return whole.take(indices)


def known_status(known: Mapping[str, pa.StructArray], rows: int) -> list[str | None]:
    """The status of each row that is answered already; None for the others."""
    for answers in known.values():
        status: list[str | None] = answers.field("status").to_pylist()
        return status
    return [None] * rows
