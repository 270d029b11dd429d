"""The plan of a run, without the run. Entry point: `dry_run`. Must import neither torch nor Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.cache import cache_dir as default_cache_dir
from pipeline.ledger.text_index import text_hashes
from pipeline.options import WorkOptions
from pipeline.runtime.answer_sources import plan_reuse, stored_files
from pipeline.runtime.conditions import inside, limit_of
from pipeline.runtime.job import Job, jobs_for_each_dtype
from pipeline.runtime.plan import Plan, list_missing, plan, plan_limited
from pipeline.runtime.retries import with_retries
from pipeline.sources.source import read_documents
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store


def dry_run(
    spec: JobSpec, options: WorkOptions = WorkOptions(), *, cache_dir: Path | None = None
) -> Plan:
    """The plan of `run` with these options; nothing is written to the output.

    An answer depends on the number format of the machine. Where the spec does not fix it, this is
    the plan of the machine with the least to do. Of an input with little text that is new, the text
    is read, so that equal and known texts count as such, and no document that the condition of the
    run leaves out; of a larger one, every new text counts, whatever the condition.

    Args:
        spec: The job.
        options: The condition of the run, and whether failed rows are tried again; such as the
            options of a run. Those that end a run early do not change the plan.
        cache_dir: Folder of models and file hashes (default: `$ASSAY_CACHE`, or `~/.cache/assay`).

    Returns:
        The shards of the input and the work that is missing.

    Raises:
        SpecError: The spec names missing files, or fits no machine.
        RefusedError: The output is in a store of an unsupported kind.
        StorageError: The input or the output cannot be read.

    Examples:
        >>> dry_run(load_spec("my.yaml")).missing_rows
        0
    """
    store = open_store(spec.output, spec.storage_options)
    limit = limit_of(options.sample, options.where)
    job, planned = least_work(spec, store, cache_dir or default_cache_dir(), limit)
    read, chosen, of_input = {}, {}, spec.input.storage_options
    # — also of shards that were read before: a documents file does not say what a condition accepts
    whole = replace(
        planned, work_items=tuple(replace(w, documents=True) for w in planned.work_items)
    )
    if whole.reads_little:
        for work in whole.unread:
            documents = pa.concat_tables(read_documents(work.shard, of_input))
            rows, _ = inside(work.shard, planned.limit, documents, of_input)
            read[work.shard.id] = np.unique(text_hashes(documents.filter(pa.array(rows))))
            chosen[work.shard.id] = int(rows.sum())
        items = [
            replace(work, rows_without_answer=min(work.asked_rows, len(read[work.shard.id])))
            for work in planned.work_items
        ]
        distinct = len(np.unique(np.concatenate([*read.values()]))) if read else None
        planned = replace(planned, work_items=tuple(items), distinct=distinct)
    if planned.limit is not None:
        planned = replace(planned, inside=chosen)
    if options.retry_failed:
        planned = with_retries(job, store, planned)
    stored = stored_files(job, store, planned)
    if stored.by_version:
        texts = ((sid, read[sid]) for sid in stored.new & read.keys())
        planned = plan_reuse(job, store, planned, stored, texts, keep=False)
    return planned


def least_work(
    spec: JobSpec, store: Store, cache_dir: Path, limit: str | None = None
) -> tuple[Job, Plan]:
    """The job and the plan of the machine with the least to do; writes nothing."""
    first, *others = jobs_for_each_dtype(spec, cache_dir)
    planned = plan(first, store, keep=False)
    plans = [(first, planned), *((job, list_missing(job, store, planned.cuts)) for job in others)]
    return min(
        (plan_limited(job, store, planned, limit) for job, planned in plans),
        key=lambda pair: pair[1].missing_rows,
    )
