"""One shard, split by a rule: a file of kept rows, a file of dropped rows, and the counts.

Entry points: `filter_shard`, and `total` for the counts of all shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import TypeAdapter

from pipeline.filters.inputs import with_inputs
from pipeline.filters.labelled import labelled_texts
from pipeline.filters.policy import Judge, Policy
from pipeline.filters.snapshot_rule import SnapshotRule, failed_status
from pipeline.filters.writers import kept_rows
from pipeline.hashes import canonical_json
from pipeline.ledger.label_files import to_parquet, verify
from pipeline.ledger.rows import TEXT_COLUMN, asked_rows, read_shard
from pipeline.ledger.snapshot_files import NamedShard
from pipeline.options import OnError
from pipeline.sources.shards import Shard
from pipeline.sources.streams import Options

WHY_COLUMN = "_dropped_by"  # no task has a name that begins with an underscore


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of documents, with the size of their texts."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class SplitAmounts:
    """What was kept and what was dropped."""

    kept: Amount = Amount()
    dropped: Amount = Amount()

    @property
    def documents(self) -> int:
        return self.kept.documents + self.dropped.documents


@dataclass(frozen=True, slots=True)
class Counts:
    """The amounts of some documents, and why some are dropped."""

    all: SplitAmounts = SplitAmounts()
    reasons: Mapping[str, int] = field(default_factory=dict)  # dropped documents by cause
    several: int = 0  # documents with more than one cause: they are in `reasons` more than once


COUNTS = TypeAdapter(Counts)  # to and from JSON


def filter_shard(
    rule: SnapshotRule, judge: Judge, on_error: OnError, named: NamedShard, shard: Shard
) -> tuple[bytes, bytes, Counts]:
    """A file of dropped rows, a file of kept rows, and the counts; each row is in one file."""
    options, tasks = rule.spec.input.storage_options, list(rule.contents.tasks)
    answers = read_shard(rule.store, named, schema=rule.answers_schema, tasks=tasks)
    answers = asked_rows(rule.contents, answers)
    rows = with_inputs(answers, shard, options, rule.inputs)
    decision = judge.decide(rows, failed_status(answers, judge.columns), on_error)
    keep = ~decision.dropped
    text_bytes, dropped_texts = _texts(shard, options, answers, keep)
    tokens = pc.fill_null(answers.column(rule.counted_task(judge)).field("n_tokens"), 0)
    counts = np.ones(len(keep)), text_bytes, tokens.to_numpy()
    sizes = np.stack([np.asarray(column, np.int64) for column in counts], axis=1)  # [docs, 3]
    kept_inside = np.zeros(shard.rows, np.bool_)  # a run with a condition has some of these rows
    kept_inside[answers.column("row").to_numpy() - shard.piece.start_row] = keep
    kept = kept_rows(shard, options, kept_inside)
    table = _with_reasons(answers, dropped_texts, decision.reasons)
    dropped = _dropped_file(shard, table, judge.policy, on_error)
    amounts = (Amount(*sizes[chosen].sum(axis=0).tolist()) for chosen in (keep, ~keep))
    reasons = Counter(chain.from_iterable(decision.causes))
    several = sum(len(causes) > 1 for causes in decision.causes)
    return dropped, kept, Counts(SplitAmounts(*amounts), dict(reasons), several)


def total(parts: Sequence[Counts]) -> Counts:
    """The sums of the parts."""
    sums = (
        np.array([astuple(amount) for amount in amounts]).sum(axis=0).tolist()
        for amounts in ([part.all.kept for part in parts], [part.all.dropped for part in parts])
    )
    return Counts(
        SplitAmounts(*(Amount(*values) for values in sums)),
        dict(sum((Counter(part.reasons) for part in parts), Counter())),
        sum(part.several for part in parts),
    )


def _with_reasons(answers: pa.RecordBatch, texts: pa.Array, reasons: Sequence[str]) -> pa.Table:
    """The dropped documents as `open_labels` has them, with their texts and the reasons."""
    mask = pa.array([bool(reason) for reason in reasons], pa.bool_())
    why = pa.array(list(filter(None, reasons)), pa.string()).dictionary_encode()
    table = pa.Table.from_batches([answers]).filter(mask)
    return table.append_column(TEXT_COLUMN, texts).append_column(WHY_COLUMN, why)


def _dropped_file(shard: Shard, table: pa.Table, policy: Policy, on_error: OnError) -> bytes:
    """The file of the dropped documents, read back."""
    metadata = {"keep": policy.keep or "", "on_error": on_error}
    if policy.clauses:
        metadata["policy"] = canonical_json(policy.to_json()).decode()
    data = to_parquet(table, {**metadata, "shard": canonical_json(shard.to_json()).decode()})
    verify(data, table.column("doc_id"))
    return data


def _texts(
    shard: Shard,
    options: Options,
    answers: pa.RecordBatch,  # [docs]
    keep: NDArray[np.bool_],  # [docs]
) -> tuple[list[int], pa.Array]:  # [docs], [dropped docs]
    """The sizes of all texts, and the dropped texts; null where a row has no text."""
    sizes: list[int] = []
    dropped = []
    hashes, rows = answers.column("content_hash"), answers.column("row")
    for texts in labelled_texts(shard, options, hashes, rows):
        dropped.append(texts.filter(pa.array(~keep[len(sizes) : len(sizes) + len(texts)])))
        sizes += pc.fill_null(pc.binary_length(texts), 0).to_pylist()
    return sizes, pa.chunked_array(dropped, pa.large_string()).combine_chunks()
