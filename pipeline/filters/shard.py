"""One shard, amounts by a rule: the file of what is kept, the file of what is dropped, the counts.

Knows answers, input rows and what becomes of a document without an answer. Knows nothing of where
the files go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.filters.facts import Facts, read_facts
from pipeline.filters.rule import Rule
from pipeline.filters.writers import kept_rows
from pipeline.hashes import canonical_json
from pipeline.ledger.contents import NamedShard
from pipeline.ledger.label_files import to_parquet, verify
from pipeline.ledger.rows import DOCUMENT_SCHEMA, read_shard
from pipeline.sources.documents import OK, TRUNCATED
from pipeline.sources.shards import Shard
from pipeline.sources.streams import Options
from pipeline.stores.store import Store

# No task's name begins with an underscore.
TEXT_COLUMN, WHY_COLUMN = "_text", "_dropped_by"


@dataclass(frozen=True, slots=True)
class FilterSplit:
    """How documents are amounts, and by which columns they are counted."""

    rule: Rule
    on_error: Literal["fail", "keep", "drop"]
    by: tuple[str, ...]
    schema: pa.Schema  # of `open_labels`: all tasks


@dataclass(frozen=True, slots=True)
class FilteredShard:
    """A shard's two files, and what is in them."""

    kept: bytes
    dropped: bytes
    counts: Counts


def filter_shard(
    store: Store, named: NamedShard, shard: Shard, options: Options, split: FilterSplit
) -> FilteredShard:
    """The shard's rows in two files, each row in one of them."""
    tasks = [name for name in split.schema.names if name not in DOCUMENT_SCHEMA.names]
    answers = read_shard(store, named, schema=split.schema, tasks=tasks)
    reasons = dropped_by(answers, split)
    keep = np.array([not reason for reason in reasons], dtype=np.bool_)
    facts = read_facts(shard, options, split.by, hashes=answers.column("content_hash"), keep=keep)
    if len(facts.text_bytes) != named.rows:
        raise StorageError(
            f"{shard.path}: has {len(facts.text_bytes)} rows of {named.rows} labelled"
        )
    tokens = answers.column(_counted_task(tasks, split.rule.columns)).field("n_tokens")
    sizes = zip(facts.text_bytes, tokens.to_pylist(), strict=True)
    return FilteredShard(
        kept=kept_rows(shard, options, keep),
        dropped=_dropped_file(shard, answers, facts, reasons, split),
        counts=counted(keep.tolist(), sizes, facts.groups, reasons),
    )


def dropped_by(answers: pa.RecordBatch, split: FilterSplit) -> list[str]:
    """Of each document why it is dropped; "" where it is kept.

    A document whose answer is missing is no matter of the rule, and one of which the rule says
    neither true nor false is dropped, as SQL's WHERE does.
    """
    verdicts = split.rule.verdicts(answers).to_pylist()
    failed = failed_status(answers, split.rule.columns)
    keep = split.rule.keep
    why = {True: "", False: f"keep is false: {keep}", None: f"keep is null: {keep}"}
    of_failed = "" if split.on_error == "keep" else "on_error: "
    return [
        why[verdict] if not status else of_failed and of_failed + status
        for verdict, status in zip(verdicts, failed, strict=True)
    ]


def failed_status(answers: pa.RecordBatch, tasks: Collection[str]) -> list[str]:
    """Of each document its first status that is no answer, of reading or of these tasks; or ""."""
    failed: NDArray[np.object_] = np.full(answers.num_rows, "", dtype=object)
    named = [answers.column(name) for name in tasks if name in answers.schema.names]
    columns = [c.field("status") for c in named if pa.types.is_struct(c.type)]
    for status in (*columns[::-1], answers.column("status")):
        is_ok = pc.is_in(status, value_set=pa.array([OK, TRUNCATED]))
        failed = np.where(is_ok.to_numpy(zero_copy_only=False), failed, status.to_pylist())
    return [str(status) for status in failed]


def _counted_task(tasks: Sequence[str], used: Collection[str]) -> str:
    """Whose tokens are counted: those that the rule looks at were read in any case."""
    return next((task for task in tasks if task in used), tasks[0])


def _dropped_file(
    shard: Shard, answers: pa.RecordBatch, facts: Facts, reasons: Sequence[str], split: FilterSplit
) -> bytes:
    """The dropped documents: as `open_labels` has them, with their texts and what dropped them."""
    mask = pa.array([bool(reason) for reason in reasons])
    table = pa.Table.from_batches([answers]).filter(mask)
    why = pa.array(list(filter(None, reasons)), pa.string()).dictionary_encode()
    table = table.append_column(TEXT_COLUMN, facts.dropped_texts).append_column(WHY_COLUMN, why)
    told = {"keep": split.rule.keep, "on_error": split.on_error}
    data = to_parquet(table, {**told, "shard": canonical_json(shard.to_json()).decode()})
    verify(data, table.num_rows, table.column("doc_id"))
    return data


@dataclass(frozen=True, slots=True)
class Amount:
    """So many documents, with so much text."""

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
    """What was kept and what was dropped; adds up."""

    kept: Amount = Amount()
    dropped: Amount = Amount()

    def __add__(self, other: SplitAmounts) -> SplitAmounts:
        return SplitAmounts(self.kept + other.kept, self.dropped + other.dropped)


@dataclass(frozen=True, slots=True)
class Counts:
    """The sums over some documents; those of two parts of a corpus add up to those of both."""

    all: SplitAmounts = SplitAmounts()
    groups: Mapping[str, Mapping[str, SplitAmounts]] = field(
        default_factory=dict
    )  # by column, by value
    reasons: Mapping[str, int] = field(default_factory=dict)  # documents dropped, by why

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values; `counts_from_json` takes them back."""
        return asdict(self)


def counted(
    kept: Sequence[bool],
    sizes: Iterable[tuple[int, int]],  # [docs]: bytes of text, tokens
    groups: Mapping[str, Sequence[str]],  # by column: [docs]
    reasons: Sequence[str],  # [docs]; "" where kept
) -> Counts:
    """The counts of some documents."""
    amounts = [
        SplitAmounts(kept=Amount(1, *size)) if is_kept else SplitAmounts(dropped=Amount(1, *size))
        for is_kept, size in zip(kept, sizes, strict=True)
    ]
    by_column: dict[str, dict[str, SplitAmounts]] = {}
    for column, values in groups.items():
        of_column = by_column.setdefault(column, {})
        for value, each in zip(values, amounts, strict=True):
            of_column[value] = of_column.get(value, SplitAmounts()) + each
    return Counts(sum(amounts, SplitAmounts()), by_column, dict(Counter(filter(None, reasons))))


def total(parts: Iterable[Counts]) -> Counts:
    """The sums of the parts."""
    whole, reasons = SplitAmounts(), Counter[str]()
    groups: dict[str, dict[str, SplitAmounts]] = {}
    for part in parts:
        whole += part.all
        reasons.update(part.reasons)
        for column, values in part.groups.items():
            of_column = groups.setdefault(column, {})
            for value, each in values.items():
                of_column[value] = of_column.get(value, SplitAmounts()) + each
    return Counts(whole, groups, dict(reasons))


def counts_from_json(content: Mapping[str, Any]) -> Counts:
    """The counts that `Counts.to_json` gave."""
    groups = {
        column: {value: _amounts(each) for value, each in values.items()}
        for column, values in content["groups"].items()
    }
    return Counts(_amounts(content["all"]), groups, dict(content["reasons"]))


def _amounts(content: Mapping[str, Any]) -> SplitAmounts:
    return SplitAmounts(Amount(**content["kept"]), Amount(**content["dropped"]))
