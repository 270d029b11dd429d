"""Reuse of existing answers to equal texts: of other shards, or of a first try.

Entry points: `AnswerCache.find`, and `overlaid`, which puts its answers into computed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.ledger.cells import ReusableShard, WorkItem
from pipeline.ledger.columns import ADDED, plain_type, structs
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import read_file
from pipeline.sources.documents import OK, QUARANTINED, TRUNCATED
from pipeline.stores.store import Store

# The shards of one object are processed in sequence and look into the same earlier shards.
CACHED_SHARDS = 256


@dataclass(frozen=True, slots=True)
class Known:
    """The existing answers to some documents."""

    answers: Mapping[str, pa.StructArray]  # by task: rows of label files, or null; {}: none
    sources: pa.Array  # [docs]: the shard that the row's answers are of; null without any


class AnswerCache:
    """Finds answers by the hash of the text, in the reusable shards of a work item."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hashes: Callable[[str], pa.Array] = lru_cache(CACHED_SHARDS)(self._read_hashes)
        # — the slices of one shard are processed in sequence and look into the same earlier shard
        self._answers: Callable[[str, tuple[str, ...]], list[pa.Table]] = lru_cache(1)(
            self._read_answers
        )

    def find(
        self, work: WorkItem, documents: pa.Table, start: int, *, failed: bool = False
    ) -> Known:
        """For each task of the item, a row of an existing label file per document, or null.

        The documents are the shard's from row `start` on. A document has answers to all tasks or
        to none. Failed rows are no answers, unless `failed` asks for them. The shard's own
        quarantined rows are, unless the item is a retry.
        """
        none = Known({}, pa.nulls(documents.num_rows, pa.string()))
        if not work.reuse or not work.tasks:
            return none
        hashes = _hash_and_length(documents)
        # — a document without text has no answer, but its hash may equal another's
        is_open = _mask(pc.equal(documents.column("status"), OK))  # [docs]
        rows = np.full(len(hashes), -1, dtype=np.int64)  # of concatenated `answers_of`; -1: none
        sources = np.full(len(hashes), None)  # [docs]
        answers_of: list[list[pa.Table]] = [[] for _ in work.tasks]
        offset = 0
        for reusable in work.reuse:
            if not is_open.any():
                break
            at = self._places(work, reusable, hashes, start)
            taken = is_open & (at >= 0)
            if not taken.any():
                continue
            answers = self._answers(
                reusable.sid, tuple(reusable.labels[task] for task in work.tasks)
            )
            if not failed:
                # — machines die, too: one shard's verdict does not hold for equal texts of others
                verdicts = work.retry == 0 and reusable.sid == work.shard.id
                taken[taken] = _usable(answers, verdicts=verdicts)[at[taken]]
            rows[taken] = offset + np.arange(taken.sum())
            offset += int(taken.sum())
            sources[taken] = reusable.sid
            is_open &= ~taken
            for tables, answer in zip(answers_of, answers, strict=True):
                tables.append(answer.take(pa.array(at[taken])))
        if offset == 0:
            return none
        indices = pa.array(rows, mask=rows < 0)
        # — a null index gives a null row
        wholes = (structs(pa.concat_tables(tables)).take(indices) for tables in answers_of)
        return Known(dict(zip(work.tasks, wholes, strict=True)), pa.array(sources, pa.string()))

    def _places(
        self, work: WorkItem, reusable: ReusableShard, hashes: pa.Array, start: int
    ) -> NDArray[np.int64]:  # [docs]; -1: none
        """The rows of the reusable shard with the same texts.

        In the shard itself, a text is only looked up in its own row: of two rows with equal texts,
        one may have failed alone.
        """
        stored = self._hashes(reusable.sid)
        # — of rows with equal texts in a slice, one may have failed alone: it is not asked again
        if reusable.sid != work.shard.id or work.shard.slice is not None:
            places = pc.fill_null(pc.index_in(hashes, value_set=stored), -1)
            return np.asarray(places.to_numpy(zero_copy_only=False), dtype=np.int64)
        if len(stored) != work.shard.rows:
            raise StorageError(
                f"{self._store.url}/{documents_key(reusable.sid)}: has {len(stored)} rows of a "
                f"shard of {work.shard.rows}; `assay verify` reports more"
            )
        same = _mask(pc.equal(hashes, stored.slice(start, len(hashes))))
        return np.where(same, np.arange(start, start + len(hashes)), -1)

    def _read_hashes(self, sid: str) -> pa.Array:
        return _hash_and_length(
            read_file(self._store, documents_key(sid), ["content_hash", "n_chars"])
        )

    def _read_answers(self, sid: str, keys: tuple[str, ...]) -> list[pa.Table]:
        answers = []
        for key in keys:
            whole = read_file(self._store, key, None)
            if whole.num_rows != len(self._hashes(sid)):
                raise StorageError(
                    f"{self._store.url}/{key}: has {whole.num_rows} rows and its "
                    f"documents file {len(self._hashes(sid))}; `assay verify` reports more"
                )
            # — added again later: the stored file may have another calibration, or none
            dropped = {"doc_id", *ADDED}.intersection(whole.column_names)
            answers.append(whole.drop_columns(sorted(dropped)))
        return answers


def text_identities(documents: pa.Table) -> list[str]:
    """What equal texts, and no others, have in common; a string for each document."""
    identities: list[str] = _hash_and_length(documents).to_pylist()
    return identities


def _hash_and_length(documents: pa.Table) -> pa.StringArray:
    """The identity of each text: its hash of 128 bits and its number of characters."""
    columns = (documents.column(name).cast(pa.string()) for name in ("content_hash", "n_chars"))
    return pc.binary_join_element_wise(*columns, ":").combine_chunks()


def unanswered(documents: pa.Table, known: Mapping[str, pa.StructArray]) -> list[int]:
    """The readable documents without an existing answer."""
    reused = known_status(known, documents.num_rows)
    pairs = zip(documents.column("status").to_pylist(), reused, strict=True)
    return [row for row, (read, answered) in enumerate(pairs) if read == OK and not answered]


def overlaid(computed: pa.Table, known: pa.StructArray) -> pa.Table:
    """The computed label rows, with known rows in place of theirs."""
    rows = np.arange(computed.num_rows)
    indices = np.where(known.is_valid().to_numpy(zero_copy_only=False), rows + len(rows), rows)
    columns = {"doc_id": computed.column("doc_id")}
    for field in computed.schema:
        if field.name != "doc_id":
            columns[field.name] = known.field(field.name).cast(plain_type(field.type))
    answers = pa.table(columns).select(computed.column_names)
    plain = computed.cast(answers.schema)
    return pa.concat_tables([plain, answers]).take(pa.array(indices)).cast(computed.schema)


def _usable(answers: Sequence[pa.Table], *, verdicts: bool) -> NDArray[np.bool_]:
    accepted = pa.array([OK, TRUNCATED, *([QUARANTINED] if verdicts else [])])
    masks = (pc.is_in(a.column("status").cast(pa.string()), value_set=accepted) for a in answers)
    return reduce(np.logical_and, map(_mask, masks))


def _mask(values: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    return np.array(values.to_numpy(zero_copy_only=False), dtype=np.bool_)


def known_status(known: Mapping[str, pa.StructArray], rows: int) -> list[str | None]:
    """The status of each row that is answered already; None for the others."""
    for answers in known.values():
        status: list[str | None] = answers.field("status").to_pylist()
        return status
    return [None] * rows
