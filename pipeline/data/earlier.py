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

from pipeline.data.answer_columns import CALIBRATED
from pipeline.data.documents import OK, QUARANTINED, TRUNCATED
from pipeline.data.ledger import Earlier, Work, documents_key
from pipeline.data.storage import Store
from pipeline.errors import StorageError

# The shards of one object come one after another, and all look into the same earlier shards.
KEPT_SHARDS = 256


class EarlierAnswers:
    """Looks up texts by their hash in the shards that a work names."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hashes: Callable[[str], pa.Array] = lru_cache(KEPT_SHARDS)(self._read_hashes)

    def find(self, work: Work, content_hashes: pa.Array, start: int) -> dict[str, pa.StructArray]:
        """For each of the work's tasks the whole row of an earlier answer, or null.

        The hashes are of the shard's rows from `start` on. A row is answered for all of the tasks
        or for none of them. A failed row is not an answer; a quarantined one is, unless the work is
        to try it again.
        """
        if not work.earlier or not work.tasks:
            return {}
        rows = np.full(
            len(content_hashes), -1, dtype=np.int64
        )  # of the found answers laid end to end
        found: dict[str, list[pa.Table]] = {task: [] for task in work.tasks}
        offset = 0
        for earlier in work.earlier:
            at = self._places(work, earlier, content_hashes, start)
            answers = {task: self._answers(earlier, task) for task in work.tasks}
            usable = _usable(list(answers.values()), again=work.retry > 0)  # [earlier rows]
            taken = (rows < 0) & (at >= 0)
            taken[taken] = usable[at[taken]]
            if not taken.any():
                continue
            rows[taken] = offset + at[taken]
            offset += len(usable)
            for task, answer in answers.items():
                found[task].append(answer)
        if offset == 0:
            return {}
        indices = pa.array(rows, mask=rows < 0)
        return {task: _structs(pa.concat_tables(tables), indices) for task, tables in found.items()}

    def _places(
        self, work: Work, earlier: Earlier, hashes: pa.Array, start: int
    ) -> NDArray[np.int64]:  # [docs], -1: not there
        """Where the earlier shard has the texts; the shard itself has each in its own row.

        Equal texts may have fared differently, and one's failure says nothing of the other.
        """
        there = self._hashes(earlier.sid)
        if earlier.sid != work.shard.id:
            return _places(hashes, there)
        rows = np.arange(start, start + len(hashes))
        same = pc.equal(hashes, there.slice(start, len(hashes)))
        return np.where(same.to_numpy(zero_copy_only=False), rows, -1)

    def _read_hashes(self, sid: str) -> pa.Array:
        table = self._read(documents_key(sid), ["content_hash"])
        return table.column("content_hash").combine_chunks()

    def _answers(self, earlier: Earlier, task: str) -> pa.Table:
        whole = self._read(earlier.labels[task], None)
        # — what is calibrated is so anew: the same answers may have been without, or otherwise
        left_out = {"doc_id", CALIBRATED}.intersection(whole.column_names)
        answers = whole.drop_columns(sorted(left_out))
        if answers.num_rows != len(self._hashes(earlier.sid)):
            raise StorageError(
                f"{self._store.url}/{earlier.labels[task]}: has {answers.num_rows} rows and its "
                f"documents file {len(self._hashes(earlier.sid))}; `assay verify` tells more"
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
    arrays = (np.asarray(mask.to_numpy(), dtype=np.bool_) for mask in masks)
    return reduce(np.logical_and, arrays)


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
