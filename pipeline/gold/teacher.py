"""Another run's answers as gold labels: those of a larger model, or of another wording.

Entry point: `read_teacher`.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.gold.files import FORMATS
from pipeline.gold.labels import (
    UNLABELLED,
    By,
    Gold,
    GoldTask,
    label_names,
    task_columns,
    without_repeats,
)
from pipeline.ledger.columns import probabilities, versions
from pipeline.ledger.dataset import LabelDataset, open_labels
from pipeline.options import GoldOptions
from pipeline.spec.schema import JobSpec, TaskSpec

_SNAPSHOT = re.compile(r"(?P<output>.+?)/+snapshots/(?P<number>\d{8,})\.json")


def read_teacher(source: str, spec: JobSpec, options: GoldOptions) -> Gold:
    """The answers of the output at `source`, joined by content hash, or by id with `options.id`.

    A label is the most probable one. Soft targets are the teacher's probabilities, calibrated where
    the output has calibrated ones. A document without an answer to any task is left out.
    """
    teacher = _opened(source, spec)
    by: By = "doc_id" if options.id else "content_hash"
    columns = task_columns(spec, options, tuple(teacher.labels), source)
    table = teacher.to_table(columns=[by, *dict.fromkeys(column for _, column in columns)])
    tasks = {
        task.name: _gold_task(table.column(column), teacher.labels[column], task, options)
        for task, column in columns
    }
    answered = np.any([task.truth != UNLABELLED for task in tasks.values()], axis=0)
    kept = np.flatnonzero(answered)
    keys = table.column(by).take(pa.array(kept)).to_pylist()
    return without_repeats(
        Gold(
            source,
            by,
            tuple(keys),
            {name: _only(task, kept) for name, task in tasks.items()},
            None,
        )
    )


def _opened(source: str, spec: JobSpec) -> LabelDataset:
    found = _SNAPSHOT.fullmatch(source)
    output, snapshot = (found["output"], int(found["number"])) if found else (source, None)
    try:
        return open_labels(output, snapshot=snapshot, storage_options=spec.storage_options)
    except StorageError as error:
        if "has no snapshot yet" not in str(error):
            raise
        formats = " ".join(f".{format}" for format in FORMATS)
        fix = f"is neither a file of gold labels ({formats}) nor an output of assay with a snapshot"
        raise SpecError([Problem("--gold", fix, source)]) from error


def _gold_task(
    column: pa.ChunkedArray, teacher_labels: tuple[str, ...], task: TaskSpec, options: GoldOptions
) -> GoldTask:
    names = label_names(task, options)
    unknown = [label for label in teacher_labels if label not in names]
    if unknown:
        fix = f"is not a label of task {task.name}; its labels are {', '.join(task.labels)}; "
        fix += "write --value TEACHERS_LABEL=LABEL"
        raise SpecError([Problem(f"--gold, task {task.name}", fix, label) for label in unknown])
    answers = column.combine_chunks()
    p = probabilities(
        answers, versions(answers.type)[-1], teacher_labels
    )  # [rows, teacher's labels]
    soft = np.zeros((len(p), len(task.labels)))
    for index, label in enumerate(teacher_labels):
        soft[:, names[label]] += p[:, index]
    return GoldTask(tuple(task.labels), _hard(soft), soft)


def _hard(soft: NDArray[np.float64]) -> NDArray[np.int64]:  # [rows, labels] -> [rows]
    unanswered = np.isnan(soft).any(axis=1)
    truth: NDArray[np.int64] = np.where(unanswered, UNLABELLED, soft.argmax(axis=1))
    return truth


def _only(task: GoldTask, kept: NDArray[np.int64]) -> GoldTask:
    assert task.soft is not None
    soft = task.soft[kept]
    soft[task.truth[kept] == UNLABELLED] = np.nan
    return GoldTask(task.labels, task.truth[kept], soft)
