"""One shard, parted by a rule: the file of what is kept, the file of what is dropped, the counts.

Knows answers, input rows and what becomes of a document without an answer. Knows nothing of where
the files go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.aligned import DOCUMENT_SCHEMA, read_shard
from pipeline.data.commit import to_parquet, verify
from pipeline.data.contents import NamedShard
from pipeline.data.documents import OK, TRUNCATED
from pipeline.data.filter_counts import Counts, counted
from pipeline.data.hashes import canonical_json
from pipeline.data.kept_rows import kept_rows
from pipeline.data.row_facts import Facts, read_facts
from pipeline.data.rule import Rule
from pipeline.data.shards import Shard
from pipeline.data.storage import Store
from pipeline.data.streams import Options
from pipeline.errors import StorageError

# No task's name begins with an underscore.
TEXT_COLUMN, WHY_COLUMN = "_text", "_dropped_by"


@dataclass(frozen=True, slots=True)
class Parting:
    """How documents are parted, and by which columns they are counted."""

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
    store: Store, named: NamedShard, shard: Shard, options: Options, parting: Parting
) -> FilteredShard:
    """The shard's rows in two files, each row in one of them."""
    tasks = [name for name in parting.schema.names if name not in DOCUMENT_SCHEMA.names]
    answers = read_shard(store, named, schema=parting.schema, tasks=tasks)
    reasons = dropped_by(answers, parting)
    keep = np.array([not reason for reason in reasons], dtype=np.bool_)
    facts = read_facts(shard, options, parting.by, hashes=answers.column("content_hash"), keep=keep)
    if len(facts.text_bytes) != named.rows:
        raise StorageError(
            f"{shard.path}: has {len(facts.text_bytes)} rows of {named.rows} labelled"
        )
    tokens = answers.column(_counted_task(tasks, parting.rule.columns)).field("n_tokens")
    sizes = zip(facts.text_bytes, tokens.to_pylist(), strict=True)
    return FilteredShard(
        kept=kept_rows(shard, options, keep),
        dropped=_dropped_file(shard, answers, facts, reasons, parting),
        counts=counted(keep.tolist(), sizes, facts.groups, reasons),
    )


def dropped_by(answers: pa.RecordBatch, parting: Parting) -> list[str]:
    """Of each document why it is dropped; "" where it is kept.

    A document whose answer is missing is no matter of the rule, and one of which the rule says
    neither true nor false is dropped, as SQL's WHERE does.
    """
    verdicts = parting.rule.verdicts(answers).to_pylist()
    failed = failed_status(answers, parting.rule.columns)
    keep = parting.rule.keep
    why = {True: "", False: f"keep is false: {keep}", None: f"keep is null: {keep}"}
    of_failed = "" if parting.on_error == "keep" else "on_error: "
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
    shard: Shard, answers: pa.RecordBatch, facts: Facts, reasons: Sequence[str], parting: Parting
) -> bytes:
    """The dropped documents: as `open_labels` has them, with their texts and what dropped them."""
    mask = pa.array([bool(reason) for reason in reasons])
    table = pa.Table.from_batches([answers]).filter(mask)
    why = pa.array(list(filter(None, reasons)), pa.string()).dictionary_encode()
    table = table.append_column(TEXT_COLUMN, facts.dropped_texts).append_column(WHY_COLUMN, why)
    told = {"keep": parting.rule.keep, "on_error": parting.on_error}
    data = to_parquet(table, {**told, "shard": canonical_json(shard.to_json()).decode()})
    verify(data, table.num_rows, table.column("doc_id"))
    return data
