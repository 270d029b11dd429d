"""The answers that a spec's output has for the documents of a gold set.

Knows snapshots, fingerprints and keys. Knows nothing of what gold says or how answers are judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.ledger.columns import probabilities, statuses, versions
from pipeline.ledger.contents import Contents, contents
from pipeline.ledger.dataset import LabelDataset
from pipeline.ledger.snapshots import snapshot_numbers
from pipeline.runtime.job import jobs_for_each_dtype
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store


@dataclass(frozen=True, slots=True)
class GoldTaskAnswers:
    """One task's answers to the gold's documents."""

    p: Mapping[str, NDArray[np.float64]]  # version -> [rows, labels]; NaN: no answer
    status: tuple[str | None, ...]  # [rows]; None: the corpus has no such document


@dataclass(frozen=True, slots=True)
class GoldAnswers:
    """What a snapshot answers to the gold's documents, in the gold's order."""

    snapshot: int
    newest: int  # the spec's last snapshot; another if that one asks otherwise
    corpus_rows: int
    doc_ids: tuple[str | None, ...]  # [rows]; None: the corpus has no such document
    repeated: int  # further rows of the corpus for documents that were found already
    tasks: Mapping[str, GoldTaskAnswers]


def matching_snapshot(
    spec: JobSpec, store: Store, tasks: Sequence[str], cache_dir: Path
) -> tuple[Contents, int]:
    """The spec's newest snapshot in which the tasks are asked as the spec asks them now, and the
    number of its newest.

    SpecError where none is: answers to another wording, or of another model, are not the spec's.
    """
    wanted = _versions(spec, cache_dir)
    newest: Contents | None = None
    for number in snapshot_numbers(store):
        found = contents(store, number)
        if found.spec != spec.name:
            continue
        newest = newest or found
        if all(_fp(found, task) in wanted[task] for task in tasks):
            return found, newest.number
    if newest is None:
        raise StorageError(
            f"{store.url}: has no snapshot of {spec.name} yet; `assay run` publishes one when all "
            f"is there"
        )
    raise SpecError(
        [
            Problem(
                f"tasks.{task}",
                f"no snapshot of {store.url} has it as the spec asks it now (the newest, "
                f"{newest.number}, has {_fp(newest, task) or 'no such task'}); `assay run` first",
                " or ".join(sorted(wanted[task])),
            )
            for task in tasks
            if _fp(newest, task) not in wanted[task]
        ]
        or [Problem("tasks", "no snapshot has all of them as asked; `assay run` first", tasks)]
    )


def answers_for(
    spec: JobSpec, found: Contents, newest: int, by: str, keys: Sequence[str], tasks: Iterable[str]
) -> GoldAnswers:
    """The snapshot's answers to the documents whose column `by` is one of `keys`.

    The corpus is read through, and only the rows that are wanted are held.
    """
    store = open_store(spec.output, spec.storage_options)
    dataset = LabelDataset(store, found, tuple(tasks))
    wanted = pa.array(keys, pa.string())
    gathered = {
        task.name: _Gathered(
            len(keys), tuple(task.labels), versions(dataset.schema.field(task.name).type)
        )
        for task in spec.tasks
        if task.name in dataset.labels
    }
    doc_ids: list[str | None] = [None] * len(keys)
    repeated = 0
    for batch in dataset.to_batches(columns=list(dict.fromkeys(["doc_id", by, *gathered]))):
        places = pc.index_in(batch.column(by), value_set=wanted)
        rows = np.flatnonzero(places.is_valid().to_numpy(zero_copy_only=False))
        gold_rows = places.drop_null().to_numpy()
        new = _first_times(gold_rows, doc_ids)
        repeated += len(rows) - len(new)
        chosen = batch.take(pa.array(rows[new]))
        for row, doc_id in zip(gold_rows[new], chosen.column("doc_id").to_pylist(), strict=True):
            doc_ids[row] = doc_id
        for name, task in gathered.items():
            task.put(gold_rows[new], chosen.column(name))
    return GoldAnswers(
        found.number,
        newest,
        found.rows,
        tuple(doc_ids),
        repeated,
        {name: GoldTaskAnswers(task.p, tuple(task.status)) for name, task in gathered.items()},
    )


class _Gathered:
    """One task's answers, as they are found."""

    def __init__(self, rows: int, labels: Sequence[str], versions: Sequence[str]) -> None:
        self._labels = labels
        self.p = {version: np.full((rows, len(labels)), np.nan) for version in versions}
        self.status: list[str | None] = [None] * rows

    def put(self, places: NDArray[np.int64], answers: pa.StructArray) -> None:
        for version, p in self.p.items():
            p[places] = probabilities(answers, version, self._labels)
        for place, status in zip(places, statuses(answers), strict=True):
            self.status[place] = status


def _first_times(places: NDArray[Any], doc_ids: Sequence[str | None]) -> NDArray[np.int64]:
    """Which of the places are met for the first time, here and before."""
    _, first = np.unique(places, return_index=True)
    new = [index for index in np.sort(first) if doc_ids[places[index]] is None]
    return np.array(new, np.int64)


def _versions(spec: JobSpec, cache_dir: Path) -> dict[str, set[str]]:
    """Each task's fingerprint; two where the spec leaves the machine the choice of numbers."""
    jobs = jobs_for_each_dtype(spec, cache_dir)
    return {task.name: {job.fp[task.name] for job in jobs} for task in spec.tasks}


def _fp(found: Contents, task: str) -> str | None:
    return found.tasks[task].fp if task in found.tasks else None
