"""The plan of a run, without the run. Entry point: `dry_run`. Must import neither torch nor Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.cache import cache_dir as default_cache_dir
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.text_index import Hashes, text_hashes
from pipeline.options import RunOptions
from pipeline.runtime.job import Job, Plan, least_work
from pipeline.runtime.matching import matched
from pipeline.sources.shards import Slice
from pipeline.sources.slices import read_inside
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import open_store


def dry_run(
    spec: JobSpec, options: RunOptions = RunOptions(), *, cache_dir: Path | None = None
) -> Plan:
    """The plan of `run`; nothing is written to the output.

    An answer depends on the number format of the machine. Where the spec does not fix it, this is
    the plan of the machine with the least to do. Of an input with little text that is new, the text
    is read, so that equal and known texts count as such; of a larger one, every new text counts.

    Args:
        spec: The job.
        options: The slice of the documents; its shards count with all of their rows, because the
            documents in it are not known before they are read.
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
    return matched(job, store, planned, read=read, keep=False)


def _texts_of(job: Job, work: WorkItem) -> Hashes:
    read = read_inside(work.shard, job.spec.input.storage_options)
    return np.concatenate([np.empty(0, np.uint64), *map(text_hashes, read)])
