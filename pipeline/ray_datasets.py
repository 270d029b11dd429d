"""Labels a user's own Ray Dataset. Entry point: `label_dataset`.

Writes nothing, so nothing can be resumed after a crash; `assay run` can.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.data

from pipeline.cache import cache_dir as default_cache_dir
from pipeline.errors import Problem, SpecError
from pipeline.runtime.connection import node_resources
from pipeline.runtime.placement import Placement, cluster, place
from pipeline.runtime.weights import locate
from pipeline.spec.parse import as_spec
from pipeline.spec.schema import JobSpec

BATCH_ROWS = 256


def label_dataset(
    ds: ray.data.Dataset,
    spec: str | Path | Mapping[str, Any] | JobSpec,
    *,
    cache_dir: Path | None = None,
    batch_rows: int = BATCH_ROWS,
) -> ray.data.Dataset:
    """The dataset with a struct column of answers for each task, as in a label file.

    Ray computes it when it is read, and raises the workers' errors as its own, with their text. The
    spec, the model's files and the columns are checked now, as far as `ds` knows its columns
    without being computed.

    Args:
        ds: Documents, with their text in the column that `input.text` names (default: `text`), and
            without a column that has a task's name.
        spec: A spec, its YAML file, or a dictionary, as for `Labeller`.
        cache_dir: Folder of models on every node (default: `$ASSAY_CACHE`, or `~/.cache/assay`).
        batch_rows: Rows that an actor labels at once.

    Returns:
        The rows and columns of `ds`, and a column for each task. The order is Ray's.

    Raises:
        SpecError: The spec is wrong, the dataset lacks the text column or has one with a task's
            name, the model does not exist, or a node of the cluster has too few GPUs.
        StorageError: The model's files cannot be listed.

    Examples:
        >>> documents = ray.data.from_items([{"text": "What a day!"}])
        >>> label_dataset(documents, "my.yaml").columns()
        ['text', 'toxic', 'topic']
    """
    job_spec, models = as_spec(spec), cache_dir or default_cache_dir()
    names = ds.columns(fetch_if_missing=False)
    if names is not None:
        check_columns(names, job_spec)
    locate(job_spec.model, models)
    placement = place(job_spec.model, cluster(node_resources()))
    cpus = max(1, placement.threads - 1)
    device: dict[str, Any] = {"num_gpus": placement.gpus} if placement.gpus else {"num_cpus": cpus}
    return ds.map_batches(
        _Label,
        fn_constructor_args=(job_spec, placement, str(models)),
        batch_size=batch_rows,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=placement.actors),
        **device,
    )


class _Label:
    """Builds a `Labeller` on the worker: the driver has no torch."""

    def __init__(self, spec: JobSpec, placement: Placement, cache_dir: str) -> None:
        labeller = importlib.import_module("pipeline.labeller").Labeller
        self._spec = spec
        self._labeller = labeller(spec, cache_dir=Path(cache_dir), placement=placement)

    def __call__(self, block: pa.Table) -> pa.Table:
        check_columns(block.column_names, self._spec)
        answers = self._labeller.label(block.column(self._spec.input.text or "").to_pylist())
        for task in self._spec.tasks:
            block = block.append_column(task.name, answers.column(task.name))
        return block


def check_columns(names: list[str], spec: JobSpec) -> None:
    """SpecError unless the text column exists and no column has a task's name."""
    problems = []
    if spec.input.text not in names:
        fix = f"no such column; the dataset has: {', '.join(names)}"
        problems.append(Problem("input.text", fix, spec.input.text))
    problems += [
        Problem(f"tasks.{place}.name", "the dataset has a column of this name", task.name)
        for place, task in enumerate(spec.tasks)
        if task.name in names
    ]
    if problems:
        raise SpecError(problems)
