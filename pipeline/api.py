"""The functions for Python and notebooks: each takes the file of a spec, and shows its progress.

Entry points: `run`, `fit`, `evaluate`, `filter`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cache import cache_dir as default_cache_dir
from pipeline.filters.result import FilterResult
from pipeline.options import EvalOptions, FilterOptions, FitOptions, RunOptions
from pipeline.report.progress import fit_progress, run_progress
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.progress import Progress
from pipeline.spec.parse import opened
from pipeline.spec.schema import JobSpec

if TYPE_CHECKING:
    from pipeline.verbs.evaluate import Evaluation
    from pipeline.verbs.fit import Fit

logger = logging.getLogger(__name__)


def run(
    spec: str | Path | Mapping[str, Any] | JobSpec,
    *,
    cache_dir: Path | None = None,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    announce: Callable[[Progress], None] | None = None,
) -> Outcome:
    """The outcome of a run, which labels what is missing and publishes a snapshot.

    A second run changes nothing. After an error or a crash, run again: finished shards are kept.
    A snapshot that fails a rule of the spec's `publish` is not published, and the log has the
    reasons.

    Args:
        spec: The job, its YAML file, or a dictionary of its keys.
        cache_dir: Folder of models and file hashes, on every node (default: `$ASSAY_CACHE`, or
            `~/.cache/assay`).
        address: A Ray cluster, such as `auto` (default: a local Ray).
        options: What is labelled and published, and when the run ends.
        announce: Takes the progress at each change, and once a second (default: lines on a
            terminal, in a notebook or in the log).

    Returns:
        Counts of rows and shards, and the number of the snapshot.

    Raises:
        SpecError: The spec names missing files, or does not fit the cluster or the model.
        RefusedError: The store could lose results, no cluster answers at `address`, or the cluster
            there accepts anyone.
        StorageError: A store failed, not for single shards alone; UnavailableError if it may
            succeed later.
        ModelError: The model cannot be loaded, or is not supported exactly.
        FailedRowsError: The share of failed rows exceeds `max_error_rate`.
        StalledError: No worker can go on.

    Examples:
        >>> run("my.yaml").complete
        True
    """
    from pipeline.verbs.run import judged_run

    cache = cache_dir or default_cache_dir()
    progress = run_progress(sys.stderr) if announce is None else nullcontext(announce)
    with opened(spec) as job, progress as show:
        ended = judged_run(job, cache_dir=cache, address=address, options=options, announce=show)
        for reason in ended.reasons:
            logger.warning("not published: %s", reason)
        return ended.outcome


def fit(
    spec: str | Path | Mapping[str, Any] | JobSpec,
    *,
    options: FitOptions = FitOptions(),
    cache_dir: Path | None = None,
) -> Fit:
    """Readouts that are trained on gold labels, and written to files; as `assay fit` does it.

    Args:
        spec: The job, its YAML file, or a dictionary of its keys.
        options: The gold labels, and where the readouts are written.
        cache_dir: Folder of models (default: `$ASSAY_CACHE`, or `~/.cache/assay`).

    Returns:
        For each task the figures of held-out rows, and the path of the readout.

    Raises:
        SpecError: The gold labels, the options or the spec are wrong.
        ModelError: The model cannot be loaded, or is not supported exactly.
        StorageError: The input or the gold labels cannot be read.

    Examples:
        >>> fit("my.yaml", options=FitOptions(gold="gold.jsonl", to="fitted/")).tasks[0].task
        'toxic'
    """
    from pipeline.verbs.fit import fit_readouts

    cache = cache_dir or default_cache_dir()
    folder = os.path.dirname(spec) if isinstance(spec, str | Path) else ""
    with opened(spec) as job, fit_progress(sys.stderr) as show:
        return fit_readouts(job, options, cache_dir=cache, folder=folder, announce=show)


def evaluate(
    spec: str | Path | Mapping[str, Any] | JobSpec,
    *,
    options: EvalOptions = EvalOptions(),
    cache_dir: Path | None = None,
) -> Evaluation:
    """The answers of the last snapshot compared with gold labels; as `assay eval` does it.

    Args:
        spec: The job, its YAML file, or a dictionary of its keys.
        options: The gold labels, and what is reported beside the figures.
        cache_dir: Folder of file hashes (default: `$ASSAY_CACHE`, or `~/.cache/assay`).

    Returns:
        For each task the figures with their intervals, and which gates passed.

    Raises:
        SpecError: The gold labels, the options or the spec are wrong.
        StorageError: The output or the gold labels cannot be read.

    Examples:
        >>> evaluate("my.yaml", options=EvalOptions(gold="gold.jsonl")).passed
        True
    """
    from pipeline.verbs.evaluate import evaluate as evaluate_spec

    with opened(spec) as job:
        return evaluate_spec(job, options, cache_dir=cache_dir or default_cache_dir())


def filter(
    spec: str | Path | Mapping[str, Any] | JobSpec,
    *,
    options: FilterOptions = FilterOptions(),
    cache_dir: Path | None = None,
) -> FilterResult:
    """The documents that the spec's rule keeps, written to files; as `assay filter` does it.

    Args:
        spec: The job, its YAML file, or a dictionary of its keys.
        options: Where the documents are written, or that nothing is.
        cache_dir: Folder of file hashes (default: `$ASSAY_CACHE`, or `~/.cache/assay`).

    Returns:
        What was kept and dropped, with the reasons, and the files.

    Raises:
        SpecError: The rule, the options or the spec are wrong, or there is no snapshot.
        StorageError: The input or the output cannot be read, or the target cannot be written.

    Examples:
        >>> filter("my.yaml", options=FilterOptions(dry_run=True)).documents
        10
    """
    from pipeline.filters.run import preview
    from pipeline.verbs.hub_dataset import write_filter

    work = preview if options.dry_run else partial(write_filter, command="pipeline.filter")
    with opened(spec) as job:
        return work(job, options, cache_dir=cache_dir or default_cache_dir())
