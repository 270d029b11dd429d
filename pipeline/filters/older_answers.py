"""Which models and wordings answered a snapshot, and what changed in the spec since then.

Entry points: `older_answers`, and `changed_since` for a job that is made already.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.errors import AssayError, StorageError, one_line
from pipeline.hashes import parse_json
from pipeline.ledger.cells import stored_version
from pipeline.ledger.label_files import metadata_of, read_file
from pipeline.ledger.snapshots import Contents
from pipeline.runtime.job import Job, job_of_output
from pipeline.runtime.weights import ModelFiles, locate
from pipeline.spec.model import NO_MODEL, ModelSpec
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)


def what_answered(store: Store, contents: Contents, task: str) -> dict[str, Any]:
    """The JSON values in the metadata of the task's first label file; {} without any document.

    `model` and `models` have the hashes of the weights, `models` by the name of each model; `spec`
    is the content of the fingerprint, and `versions` are those of the packages.
    """
    for shard in islice(contents.shards, 1):
        stored = metadata_of(read_file(store, shard.labels[task].key, ["status"]))
        names = ("model", "models", "spec", "versions")
        return {name: parse_json(stored[name].encode()) for name in names if name in stored}
    return {}


def warn_of_older_answers(spec: JobSpec, store: Store, contents: Contents, cache_dir: Path) -> None:
    """Logs each line of `older_answers`."""
    for line in older_answers(spec, store, contents, cache_dir):
        logger.warning("warning: %s", line)


def older_answers(
    spec: JobSpec, store: Store, contents: Contents, cache_dir: Path
) -> Iterator[str]:
    """A line for each task whose answers are of another wording or model than the spec's now.

    No model is fetched: one that is not a local file is compared by its name.
    """
    if not contents.shards:
        return
    of_tasks = [_models(store, contents, task) for task in contents.tasks]
    hashes = {name: of_model for of_task in of_tasks for name, of_model in of_task.items()}
    try:
        job = job_of_output(spec, store, cache_dir, locate=partial(_located, hashes=hashes))
    except AssayError as error:
        yield f"the answers cannot be compared with the current spec: {one_line(error)}"
        return
    yield from changed_since(job, store, contents)


def changed_since(job: Job, store: Store, contents: Contents) -> Iterator[str]:
    """A line for each task whose answers are not those of the job; it reads a label file of it."""
    in_spec = {task: own for task, own in contents.tasks.items() if task in job.fp}
    for task, own in in_spec.items():
        stored = stored_version(store, task, own.fp)
        if job.fp[task] in (own.fp, stored.of_all.id):
            continue
        models = _models(store, contents, task)
        by = f" of {', '.join(models)}" if models else ""
        yield (
            f"{task}: these are answers{by} to an older wording of the spec, which differs in "
            f"{', '.join(job.fingerprints[task].changes(stored))}. A run (assay run) publishes "
            "answers to the current spec"
        )


def _models(store: Store, contents: Contents, task: str) -> dict[str, Any]:
    """The hashes of the models that answered a task, by name."""
    with suppress(StorageError):  # — the reader of the answers reports the file
        return dict(what_answered(store, contents, task).get("models", {}))
    return {}


def _located(
    model: ModelSpec, cache_dir: Path, *, hashes: Mapping[str, Mapping[str, str]]
) -> ModelFiles:
    """The files of a local model; of another one, the hashes of the files that answered, if any."""
    if model == NO_MODEL or os.path.exists(os.path.expanduser(model.path)):
        return locate(model, cache_dir)
    return ModelFiles("none", model.path, model.revision, hashes.get(model.name, {}), 0)
