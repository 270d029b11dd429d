"""One shard, split by a rule: a file of kept rows, a file of dropped rows, and the counts.

Entry points: `filter_shard`, and `check_columns_of` before the first shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import TypeAdapter

from pipeline.filters.inputs import input_values, with_inputs
from pipeline.filters.labelled import labelled_texts
from pipeline.filters.policy import Judge
from pipeline.filters.writers import kept_rows
from pipeline.hashes import canonical_json
from pipeline.ledger.label_files import to_parquet, verify
from pipeline.ledger.rows import DOCUMENT_SCHEMA, TEXT_COLUMN, read_shard
from pipeline.ledger.snapshots import NamedShard
from pipeline.options import OnError
from pipeline.sources.documents import OK, TRUNCATED
from pipeline.sources.shards import Shard
from pipeline.sources.streams import Options
from pipeline.stores.store import Store

WHY_COLUMN = "_dropped_by"  # no task has a name that begins with an underscore
SAMPLE_ROWS = 100
NO_VALUE = "null"
FILES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class FilterSplit:
    """How documents are split into kept and dropped, and by which columns they are counted."""

    judge: Judge
    on_error: OnError
    by: tuple[str, ...]
    schema: pa.Schema  # of `open_labels`, with all tasks


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of documents, with the size of their texts."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.documents + other.documents,
            self.text_bytes + other.text_bytes,
            self.tokens + other.tokens,
        )


@dataclass(frozen=True, slots=True)
class SplitAmounts:
    """What was kept and what was dropped. The sum of two parts is the amounts of both."""

    kept: Amount = Amount()
    dropped: Amount = Amount()

    @property
    def documents(self) -> int:
        return self.kept.documents + self.dropped.documents

    def __add__(self, other: SplitAmounts) -> SplitAmounts:
        return SplitAmounts(self.kept + other.kept, self.dropped + other.dropped)


@dataclass(frozen=True, slots=True)
class Counts:
    """The amounts of some documents: all, by group, and by the reason for dropping."""

    all: SplitAmounts = SplitAmounts()
    groups: Mapping[str, Mapping[str, SplitAmounts]] = field(default_factory=dict)  # column, value
    reasons: Mapping[str, int] = field(default_factory=dict)  # dropped documents by cause
    several: int = 0  # documents with more than one cause: they are in `reasons` more than once


COUNTS = TypeAdapter(Counts)  # to and from JSON


def filter_shard(
    store: Store, named: NamedShard, shard: Shard, options: Options, split: FilterSplit
) -> tuple[bytes, bytes, Counts]:
    """A file of dropped rows, a file of kept rows, and the counts; each row is in one file."""
    tasks = [name for name in split.schema.names if name not in DOCUMENT_SCHEMA.names]
    answers = read_shard(store, named, schema=split.schema, tasks=tasks)
    judged = with_inputs(answers, shard, options, split.judge.inputs)
    failed = failed_status(answers, split.judge.columns)
    decision = split.judge.decide(judged, failed, split.on_error)
    keep = ~decision.dropped
    text_bytes, dropped_texts = _texts(shard, options, answers.column("content_hash"), keep)
    # — the tokens of a task that the rule reads: other tasks may have no answer
    counted_task = next((task for task in tasks if task in split.judge.columns), tasks[0])
    tokens = answers.column(counted_task).field("n_tokens")
    amounts = [
        SplitAmounts(kept=Amount(1, *size)) if is_kept else SplitAmounts(dropped=Amount(1, *size))
        for is_kept, *size in zip(keep, text_bytes, tokens.to_pylist(), strict=True)
    ]
    inside, kept_inside = np.zeros((2, shard.rows), np.bool_)  # a slice has some of these rows
    rows = answers.column("row").to_numpy() - shard.piece.start_row
    inside[rows], kept_inside[rows] = True, keep
    kept = kept_rows(shard, options, kept_inside)
    dropped = _dropped_file(shard, answers, dropped_texts, decision.reasons, split)
    groups = {}
    for column in split.by:
        values = (NO_VALUE if v is None else v for v in input_values(shard, column, options))
        groups[column] = _sums(zip(compress(values, inside), amounts, strict=True))
    whole = sum(amounts, SplitAmounts())
    return dropped, kept, Counts(whole, groups, dict(decision.counts), decision.several)


def total(parts: Sequence[Counts]) -> Counts:
    """The sums of the parts."""
    columns = dict.fromkeys(column for part in parts for column in part.groups)
    return Counts(
        sum((part.all for part in parts), SplitAmounts()),
        {
            column: _sums(pair for part in parts for pair in part.groups.get(column, {}).items())
            for column in columns
        },
        dict(sum((Counter(part.reasons) for part in parts), Counter())),
        sum(part.several for part in parts),
    )


def failed_status(answers: pa.RecordBatch, tasks: Collection[str]) -> list[str]:
    """For each document its first failed status, of reading or of these tasks; "" if none is."""
    failed: NDArray[np.object_] = np.full(answers.num_rows, "", dtype=object)
    named = [answers.column(name) for name in tasks if name in answers.schema.names]
    columns = [c.field("status") for c in named if pa.types.is_struct(c.type)]
    for status in (*columns[::-1], answers.column("status")):
        is_ok = pc.is_in(status, value_set=pa.array([OK, TRUNCATED]))
        failed = np.where(is_ok.to_numpy(zero_copy_only=False), failed, status.to_pylist())
    return [str(status) for status in failed]


def _dropped_file(
    shard: Shard,
    answers: pa.RecordBatch,
    texts: pa.Array,  # [dropped docs]
    reasons: Sequence[str],
    split: FilterSplit,
) -> bytes:
    """The dropped documents as `open_labels` has them, with their texts and the reasons."""
    mask = pa.array([bool(reason) for reason in reasons], pa.bool_())
    table = pa.Table.from_batches([answers]).filter(mask)
    why = pa.array(list(filter(None, reasons)), pa.string()).dictionary_encode()
    table = table.append_column(TEXT_COLUMN, texts).append_column(WHY_COLUMN, why)
    policy = split.judge.policy
    metadata = {"keep": policy.keep or "", "on_error": split.on_error}
    if policy.clauses:
        metadata["policy"] = canonical_json(policy.to_json()).decode()
    data = to_parquet(table, {**metadata, "shard": canonical_json(shard.to_json()).decode()})
    verify(data, table.column("doc_id"))
    return data


def _sums(pairs: Iterable[tuple[str, SplitAmounts]]) -> dict[str, SplitAmounts]:
    sums: dict[str, SplitAmounts] = {}
    for value, amounts in pairs:
        sums[value] = sums.get(value, SplitAmounts()) + amounts
    return sums


def _texts(
    shard: Shard,
    options: Options,
    hashes: pa.Array,  # [docs]: of the texts that were labelled
    keep: NDArray[np.bool_],  # [docs]
) -> tuple[list[int], pa.Array]:  # [docs], [dropped docs]
    """The sizes of all texts, and the dropped texts; null where a row has no text."""
    sizes: list[int] = []
    dropped = []
    for texts in labelled_texts(shard, options, hashes):
        dropped.append(texts.filter(pa.array(~keep[len(sizes) : len(sizes) + len(texts)])))
        sizes += pc.fill_null(pc.binary_length(texts), 0).to_pylist()
    return sizes, pa.chunked_array(dropped, pa.large_string()).combine_chunks()
