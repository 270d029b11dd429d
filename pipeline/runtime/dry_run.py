"""The plan of a run, without the run. Entry point: `dry_run`. Must import neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.cache import cache_dir as default_cache_dir
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.text_index import Hashes, text_hashes
from pipeline.options import RunOptions
from pipeline.runtime.answer_sources import plan_reuse
from pipeline.runtime.job import Job, Plan, jobs_for_each_dtype, list_missing, plan
from pipeline.runtime.outcome import sliced_rows
from pipeline.runtime.retries import with_retries
from pipeline.sources.shards import Slice
from pipeline.sources.slices import read_inside
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store


def dry_run(
    spec: JobSpec, options: RunOptions = RunOptions(), *, cache_dir: Path | None = None
) -> Plan:
    """The plan of `run` with these options; nothing is written to the output.

    An answer depends on the number format of the machine. Where the spec does not fix it, this is
    the plan of the machine with the least to do. Of an input with little text that is new, the text
    is read, so that equal and known texts count as such, and documents outside a slice do not
    count; of a larger one, every new text counts, and the numbers of a slice are upper bounds.

    Args:
        spec: The job.
        options: The slice of the documents, and whether failed rows are tried again. Options that
            end a run early do not change the plan.
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
    part = Slice.parse(options.sample, options.where)
    job, planned = least_work(spec, store, cache_dir or default_cache_dir(), part)
    read = {}
    if planned.reads_little:
        read = {work.shard.id: _texts_of(job, work) for work in planned.unread}
    planned = replace(planned, inside=_inside(store, planned, read))
    planned = plan_reuse(job, store, planned, read=read, keep=False)
    return with_retries(job, store, planned) if options.retry_failed else planned


def least_work(
    spec: JobSpec, store: Store, cache_dir: Path, part: Slice | None = None
) -> tuple[Job, Plan]:
    """The job and the plan of the machine with the least to do; writes nothing."""
    first, *others = jobs_for_each_dtype(spec, cache_dir)
    planned = plan(first, store, keep=False, part=part)
    plans = [(first, planned), *((job, list_missing(job, store, planned.cuts)) for job in others)]
    return min(plans, key=lambda each: each[1].missing_rows)


def _inside(store: Store, planned: Plan, read: Mapping[str, Hashes]) -> dict[str, int]:
    """How many documents of each sliced shard are in its slice, where this is known."""
    if planned.slice is None:
        return {}
    rows = sliced_rows(store, planned.shards, planned.done)
    return rows | {sid: len(texts) for sid, texts in read.items()}


def _texts_of(job: Job, work: WorkItem) -> Hashes:
    read = read_inside(work.shard, job.spec.input.storage_options)
    return np.concatenate([np.empty(0, np.uint64), *map(text_hashes, read)])
