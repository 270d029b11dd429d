"""The answers that a spec's output has for the documents of a gold set.

Entry points: `matching_snapshot`, then `answers_for`, then `judged_rows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.fitted.certificate import Certificate
from pipeline.gold.fitted_texts import fitted_texts
from pipeline.gold.labels import Gold
from pipeline.gold.values import UNLABELLED
from pipeline.hashes import validated
from pipeline.ledger.cells import stored_version
from pipeline.ledger.columns import probabilities
from pipeline.ledger.dataset import LabelDataset
from pipeline.ledger.snapshots import Contents, contents, headers
from pipeline.runtime.job import Job, job_of_output, limited
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.id_text import spellings
from pipeline.spec.labels import task_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import Store, open_store


@dataclass(frozen=True, slots=True)
class GoldTaskAnswers:
    """The answers to one task for the documents of a gold set."""

    p: NDArray[np.float64]  # [rows, labels]; NaN: no answer
    status: NDArray[np.object_]  # [rows]; None: the corpus has no such document


@dataclass(frozen=True, slots=True)
class GoldAnswers:
    """The answers of a snapshot for the documents of a gold set, in the order of the gold."""

    doc_ids: NDArray[np.object_]  # [rows]; None: the corpus has no such document
    hashes: NDArray[np.object_]  # [rows]: content hashes; None: the corpus has no such document
    documents: NDArray[np.int64]  # [rows]: of the corpus; the answers are those of the first
    tasks: Mapping[str, GoldTaskAnswers]

    @property
    def in_corpus(self) -> NDArray[np.bool_]:  # [rows]
        return np.asarray(self.documents > 0)


def matching_snapshot(
    spec: JobSpec, store: Store, tasks: Sequence[str], cache_dir: Path
) -> tuple[Contents, int]:
    """The newest snapshot with the tasks' current fingerprints, and the spec's newest number.

    `tasks` may be names of parts. SpecError if there is none: answers to another wording, or of
    another model, do not count.
    """
    names = list(dict.fromkeys(map(task_of, tasks)))
    job = job_of_output(spec, store, cache_dir)
    newest: Mapping[str, Any] | None = None
    for header in headers(store, spec.name):  # — of the others, no table of files is read
        newest = newest or header
        if all(_is_current(header, task, job) for task in names):
            return contents(store, header["number"]), int(newest["number"])
    if newest is None:
        raise StorageError(
            f"{store.url}: has no snapshot of {spec.name} yet; `assay run` publishes one when "
            f"all documents are labelled"
        )
    problems, now = [], limited(job, newest.get("limit")).fp
    for task in names:
        fp, number = _fp(newest, task), newest["number"]
        if fp is None:
            fix = f"snapshot {number} has no answers to it; run: assay run SPEC"
            problems.append(Problem(f"tasks.{task}", fix))
        elif fp != now[task]:
            changes = job.fingerprints[task].changes(stored_version(store, task, fp))
            fix = f"{', '.join(changes)} changed since snapshot {number}; run: assay run SPEC"
            problems.append(Problem(f"tasks.{task}", fix))
    fix = "no snapshot has the current fingerprints of all of them; run: assay run SPEC"
    raise SpecError(problems or [Problem("tasks", fix, names)])


def answers_for(
    spec: JobSpec, snapshot: Contents, by: str, keys: Sequence[str], tasks: Iterable[str]
) -> GoldAnswers:
    """The snapshot's answers for the documents whose column `by` is one of `keys`, or is spelled
    as one of them may be.

    `tasks` are names of parts: of tasks, or of labels of the kind `multi`, whose probabilities are
    [p, 1 - p]. All rows of the corpus are read, and only those of the gold's documents are held.
    """
    store = open_store(spec.output, spec.storage_options)
    asked = frozenset(tasks)
    columns = [task.name for task in spec.tasks if asked & {part.name for part in task.parts}]
    dataset = LabelDataset(store, snapshot, tuple(columns))
    spelled, numbers = spellings(keys), {key: row for row, key in enumerate(keys)}
    gold_keys = pa.array(spelled, pa.string())
    row_of_key = np.array([numbers[key] for key in spelled.values()], np.int64)
    parts = {part.name: part for part in spec.parts if part.name in asked}
    answers: dict[str, GoldTaskAnswers] = {}
    for name, part in parts.items():
        p = np.full((len(keys), len(part.labels)), np.nan)
        answers[name] = GoldTaskAnswers(p, np.full(len(keys), None, object))
    doc_ids, hashes = np.full((2, len(keys)), None, object)
    documents = np.zeros(len(keys), np.int64)
    for batch in dataset.to_batches(columns=["doc_id", "content_hash", *columns]):
        places = pc.index_in(batch.column(by), value_set=gold_keys)
        rows = np.flatnonzero(places.is_valid().to_numpy(zero_copy_only=False))
        gold_rows = row_of_key[places.drop_null().to_numpy()]
        # — only the first row of the corpus for a document of the gold counts
        _, first = np.unique(gold_rows, return_index=True)
        new = np.sort(first[documents[gold_rows[first]] == 0])
        np.add.at(documents, gold_rows, 1)
        chosen = batch.take(pa.array(rows[new]))
        doc_ids[gold_rows[new]] = chosen.column("doc_id").to_pylist()
        hashes[gold_rows[new]] = chosen.column("content_hash").to_pylist()
        for name, task in answers.items():
            column = chosen.column(task_of(name))
            task.p[gold_rows[new]] = _part_probabilities(column, parts[name])
            task.status[gold_rows[new]] = pc.struct_field(column, "status").to_pylist()
    return GoldAnswers(doc_ids, hashes, documents, answers)


def _part_probabilities(answers: pa.StructArray, part: TaskSpec) -> NDArray[np.float64]:
    """[rows, labels] of a task, or of a part from the answers of its task; NaN: no answer."""
    _, _, label = part.name.partition(".")
    if not label:
        return probabilities(answers, tuple(part.labels))
    applies = probabilities(answers, [label])
    return np.concatenate([applies, 1 - applies], axis=1)


def _is_current(header: Mapping[str, Any], task: str, job: Job) -> bool:
    """Whether a snapshot has the task's current version: of a cascade, with any thresholds."""
    own, proved = job.cascades.get(task), header.get("certificates", {}).get(task)
    if own is not None and proved is not None:
        return validated(Certificate, proved).without_proof(0.0) == own.without_proof(0.0)
    return _fp(header, task) == limited(job, header.get("limit")).fp[task]


def _fp(header: Mapping[str, Any], task: str) -> str | None:
    return header["tasks"][task]["fp"] if task in header["tasks"] else None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What happened to a task's gold rows; the other counts add up to `gold`."""

    gold: int
    unlabelled: int  # without a gold label for this task
    not_in_corpus: int
    unanswered: Mapping[str, int]  # by status
    fitted: int  # with a text that the answers were fitted to
    evaluated: int  # the others; not judged if there are fewer than LEAST_ROWS beside fitted ones


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """The rows that a task's scores are of."""

    gold_rows: NDArray[np.int64]  # [evaluated]: the documents, as rows of the gold
    truth: NDArray[np.int64]  # [evaluated]
    p: NDArray[np.float64]  # [evaluated, labels]


def judged_rows(
    spec: JobSpec, task: TaskSpec, gold: Gold, answers: GoldAnswers
) -> tuple[RowCounts, JudgedRows]:
    """The rows with an answer that was not fitted to their text, and why others do not count."""
    of_gold, of_task = gold.tasks[task.name], answers.tasks[task.name]
    answered = ~np.isnan(of_task.p).any(axis=1)
    labelled = of_gold.truth != UNLABELLED
    usable = labelled & answers.in_corpus & answered
    unanswered = np.flatnonzero(labelled & answers.in_corpus & ~answered)
    texts = fitted_texts(spec, task)
    known = np.array([content_hash in texts for content_hash in answers.hashes], np.bool_)
    if gold.texts and texts:  # — those of the gold may differ from the corpus in line breaks
        own = documents_from(RawRow(text) for text in gold.texts)["content_hash"].to_pylist()
        known |= np.array([content_hash in texts for content_hash in own], np.bool_)
    fitted = usable & known
    rows = np.flatnonzero(usable & ~fitted)
    counts = RowCounts(
        gold=gold.rows,
        unlabelled=int((~labelled).sum()),
        not_in_corpus=int((labelled & ~answers.in_corpus).sum()),
        unanswered=dict(Counter(str(of_task.status[row]) for row in unanswered)),
        fitted=int(fitted.sum()),
        evaluated=len(rows),
    )
    return counts, JudgedRows(rows, of_gold.truth[rows], of_task.p[rows])
