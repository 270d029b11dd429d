"""What a run would do, and how long it would take, for `run --dry-run`. Entry point: `forecast`.

The time is that of the last run of the same questions: the output has the time of each label file.
Loads no model and writes nothing. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import computed_field

from pipeline.errors import option_error
from pipeline.ledger.counts_log import counted
from pipeline.ledger.label_files import read_file
from pipeline.options import WorkOptions
from pipeline.runtime.dry_run import planned_output
from pipeline.runtime.plan import Plan
from pipeline.spec.model import BYTES_A_TOKEN
from pipeline.spec.prompts import messages
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store
from pipeline.verbs import ForPeople
from pipeline.verbs.status import commits, label_files, rate_of_last_run

FILES_FOR_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The counts of a run, and its tokens and time, as far as the output shows them."""

    plan: ForPeople[Plan]
    documents: int
    shards: int
    missing_documents: int
    missing_shards: int
    distinct_texts: int | None  # of the shards with work; None: not known
    documents_for_model: int  # the most that the model reads
    tokens_per_document: float | None  # of those labelled; None: there are none
    docs_per_s: float | None  # that the model read in the last run; None: not known
    price: float | None  # of an hour of the workers of that run
    # That the model's server reads and writes, about; None without a server.
    server_tokens: tuple[float, float] | None = None
    token_price: float | None = None  # of these, by model.price

    @computed_field
    @property
    def tokens(self) -> float | None:
        """The most document tokens that the model reads."""
        tokens = self.tokens_per_document
        return None if tokens is None else self.documents_for_model * tokens

    @computed_field
    @property
    def seconds(self) -> float | None:
        """The duration with the workers of the last run, without their start."""
        if not self.documents_for_model:
            return 0.0
        return self.documents_for_model / self.docs_per_s if self.docs_per_s else None

    @computed_field
    @property
    def cost(self) -> float | None:
        if self.price is None or self.seconds is None:
            return self.token_price
        return self.seconds / 3600 * self.price + (self.token_price or 0.0)


def forecast(
    spec: JobSpec, options: WorkOptions, *, price: float | None = None, cache_dir: Path
) -> Forecast:
    """The plan of a run, with its tokens and its time; SpecError as in a run."""
    if price is not None and not 0 < price < inf:
        raise option_error("price", "write a number above 0", price)
    store, job, planned = planned_output(spec, options, cache_dir)
    missing = {task for work in planned.work_items for task in work.tasks}
    files = label_files(store, job, planned)
    files = files.filter(pc.is_in(files["task"], pa.array(missing, pa.string())))
    files = counted(store, files)
    asked = pc.subtract(pc.subtract(files["rows"], files["skipped"]), files["taken_over"])
    tokens = _server_tokens(spec, planned, missing)
    own = None if spec.server is None else spec.server.price
    return Forecast(
        plan=planned,
        documents=planned.rows,
        shards=len(planned.shards),
        missing_documents=planned.missing_rows,
        missing_shards=planned.missing_shards,
        distinct_texts=planned.distinct,
        server_tokens=tokens,
        token_price=None if tokens is None or own is None else own.of(*tokens),
        documents_for_model=planned.rows_for_model,
        tokens_per_document=_tokens_per_document(store, files),
        docs_per_s=rate_of_last_run(commits(store, files, len(missing), asked)),
        price=price,
    )


def _server_tokens(
    spec: JobSpec, planned: Plan, missing: Collection[str]
) -> tuple[float, float] | None:
    """The tokens of the prompts and answers of missing tasks; four bytes of text are a token."""
    if not spec.server_tasks:
        return None
    pieces = [work.shard.piece for work in planned.work_items]
    rows = sum(piece.end_row - piece.start_row for piece in pieces)
    tokens = sum(piece.text_bytes for piece in pieces) / max(1, rows) / BYTES_A_TOKEN
    rules, chunks = spec.documents, 1.0
    if rules.too_long == "chunk":
        chunks = max(1.0, tokens / (rules.max_tokens - rules.overlap_tokens))
    tokens = min(tokens, rules.max_tokens)
    tasks = (task for task in spec.server_tasks if task.name in missing)
    parts = (part for task in tasks for part in task.parts)
    asked = [messages(spec.prompt, "", part.question or "") for part in parts]
    around = sum(len(turn["content"].encode()) for turns in asked for turn in turns)
    requests = planned.rows_for_model * chunks
    return requests * (len(asked) * tokens + around / BYTES_A_TOKEN), requests * len(asked)


def _tokens_per_document(store: Store, files: pa.Table) -> float | None:
    """The mean of the documents in a few of the files."""
    keys = files["key"].to_pylist()
    spread = keys[:: max(1, -(-len(keys) // FILES_FOR_TOKENS))]
    read = [read_file(store, key, ["n_tokens"])["n_tokens"] for key in spread]
    tokens = pa.chunked_array(read, pa.int32())
    mean: float | None = pc.mean(tokens.filter(pc.greater(tokens, 0))).as_py()
    return mean
