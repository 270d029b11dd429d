"""The plan of a run, without the run. Must import neither torch nor Ray.

Entry points: `dry_run`, and `planned_output` with the job and the store of the plan.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.cache import cache_dir as default_cache_dir
from pipeline.ledger.text_index import text_hashes
from pipeline.options import WorkOptions
from pipeline.runtime.conditions import inside, limit_of
from pipeline.runtime.job import Job, job_of_output, limited
from pipeline.runtime.plan import Plan, plan, plan_reuse, reads_little, stored_files
from pipeline.sources.source import read_documents
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store


def dry_run(
    spec: JobSpec, options: WorkOptions = WorkOptions(), *, cache_dir: Path | None = None
) -> Plan:
    """The plan of `run` with these options; nothing is written to the output.

    An answer depends on the number format of the machine. Where the spec does not fix it, it is the
    one in which the output was answered, or else this machine's. Of an input with little text that
    is new, the text is read, so that equal and known texts count as such, and no document that the
    condition of the run leaves out; of a larger one, every new text counts, whatever the condition.

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
    return planned_output(spec, options, cache_dir or default_cache_dir())[-1]


def planned_output(spec: JobSpec, options: WorkOptions, cache_dir: Path) -> tuple[Store, Job, Plan]:
    """As `dry_run`, with the store of the output, and the job under the condition of the run."""
    store = open_store(spec.output, spec.storage_options)
    limit, of_input = limit_of(options.sample, options.where), spec.input.storage_options
    job = limited(job_of_output(spec, store, cache_dir), limit)
    planned = plan(job, store, retry_failed=options.retry_failed, keep=False)
    # — also shards that were read before: a documents file does not have which rows a condition
    # accepts
    shards = {work.shard.id: work.shard for work in planned.work_items if not work.retry}
    read, chosen = {}, {}
    for sid, shard in shards.items() if reads_little(shards.values()) else ():
        documents = pa.concat_tables(read_documents(shard, of_input))
        rows, _ = inside(shard, limit, documents, of_input)
        read[sid] = np.unique(text_hashes(documents.filter(pa.array(rows))))
        chosen[sid] = int(rows.sum())
    if read:
        items = [
            replace(work, rows_without_answer=min(work.asked_rows, len(read[work.shard.id])))
            if not work.retry
            else work
            for work in planned.work_items
        ]
        distinct = len(np.unique(np.concatenate([*read.values()])))
        planned = replace(planned, work_items=tuple(items), distinct=distinct, inside=chosen)
    stored = stored_files(job, store, planned)
    if stored.by_version:
        texts = ((sid, read[sid]) for sid in stored.new & read.keys())
        planned = plan_reuse(job, store, planned, stored, texts, keep=False)
    return store, job, planned
