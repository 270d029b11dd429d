"""Gold labels: the labels that people, or a better model, gave to some documents.

Entry point: `read_gold`, from a file with a column for each task, of labels or of scores
(`values`), or from the answers of another run of assay, a teacher. The spec has the columns.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import Option, Problem, SpecError, StorageError
from pipeline.gold.files import FORMATS, HASH, GoldRows, gold_error, gold_format, read_gold_rows
from pipeline.gold.people import is_audit, label_columns, majority
from pipeline.gold.values import UNLABELLED, GoldTask, column_tasks, teacher_tasks
from pipeline.ledger.dataset import open_labels
from pipeline.sources.documents import RawRow, documents_from
from pipeline.spec.gold import GoldSpec
from pipeline.spec.labels import task_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

logger = logging.getLogger(__name__)

By = Literal["doc_id", "content_hash"]
Kind = Literal["people", "chosen", "scores", "teacher"]
SHOWN_TIES = 5
# How people label a random sample.
RANDOM = "assay review --by random"
_NO_ROW = -1
_FORMATS = " ".join(f".{format}" for format in FORMATS)
_SNAPSHOT = re.compile(r"(?P<output>.+?)/+snapshots/(?P<number>\d{8,})\.json")


@dataclass(frozen=True, slots=True)
class GoldCounts:
    """The source of gold labels, and counts of their rows.

    Several rows of one document, as of several people, are merged. The label that most of them give
    is kept; after a tie the document has no label for this task. Scores are averaged.
    """

    source: str
    joined_by: By  # the column of the corpus that names a document
    documents: int
    repeated: int = 0  # rows of a document with a row before
    contradictory: int = 0  # rows of `ties`
    outvoted: int = 0  # documents with several labels, of which one was given most often
    ties: tuple[str, ...] = ()  # documents that are left out of a task, or of an audit
    unused: tuple[str, ...] = ()  # columns of the file that name no document and no task

    @property
    def merged(self) -> list[tuple[str, str]]:
        """What became of documents with several rows, and maybe several labels: names, values."""
        facts = []
        if self.repeated:
            rows = f"{self.repeated:,} gold rows repeat another; each document counts once"
            facts.append(("repeated", rows))
        if self.outvoted:
            kept = f"{self.outvoted:,} documents have several labels; the one that most people gave"
            facts.append(("disagreements", f"{kept} counts"))
        if self.ties:
            shown = ", ".join(self.ties[:SHOWN_TIES]) + ", ..." * (len(self.ties) > SHOWN_TIES)
            of_rows = f"{len(self.ties):,} documents ({self.contradictory:,} gold rows)"
            facts.append(("left out", f"{of_rows}, of the tasks whose labels are a tie: {shown}"))
        return facts


@dataclass(frozen=True, slots=True)
class Gold:
    """Gold labels, one row for each document, identified by `keys`."""

    counts: GoldCounts
    keys: tuple[str, ...]  # [rows]: distinct doc_id, or content_hash as `documents` makes it
    tasks: Mapping[str, GoldTask]
    texts: tuple[str | None, ...] | None  # [rows]; None: the gold has no texts
    # By task of the spec, why documents are no random sample, with their number.
    chosen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return self.counts.source

    @property
    def rows(self) -> int:
        return len(self.keys)

    def kind(self, task: str) -> Kind:
        """Who gave the labels of a task, and to which documents.

        People, to a random sample or, `chosen`, to documents that a review chose as informative; or
        a program.
        """
        if self.tasks[task].scored is not None:
            return "scores"
        if self.tasks[task].soft is not None:
            return "teacher"
        if task_of(task) in self.chosen:
            return "chosen"
        return "people"

    def chosen_words(self, task: str) -> str:
        """The reasons for which a review showed the documents of a task; "" if it chose none."""
        reasons = self.chosen.get(task_of(task), {}).items()
        shown = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
        return f"a review chose the documents of {self.source} not at random ({shown})" * bool(
            shown
        )


def warn_of_chosen(gold: Gold) -> None:
    """Logs a line for each task whose documents a review chose."""
    effect = "the figures are those of harder documents than the corpus has"
    for task in dict.fromkeys(map(task_of, gold.tasks)):
        if words := gold.chosen_words(task):
            logger.warning(
                "warning: %s: %s, so %s. For figures of the corpus: %s", task, words, effect, RANDOM
            )


def read_gold(path: str | None, spec: JobSpec, tasks: Sequence[str] = ()) -> Gold:
    """The gold labels for the spec's tasks; SpecError names what does not fit.

    They are at `path`, or else at the spec's `gold.path`, and are read as `gold` says. A file is
    opened with the storage options of the input. Another run's output (a folder, a URL, or its
    `snapshots/<number>.json`) is opened with those of the output. A score is a soft target; the
    label is the more probable one, at .5 the first, as in an answer. `tasks` may be labels of the
    kind `multi`, as `TASK.LABEL`; () for all that have gold.
    """
    source = path or spec.gold.path
    if source is None:
        raise SpecError([Problem("gold.path", "missing; write --gold FILE, or add it")])
    chosen = _chosen(spec, tasks)
    format = gold_format(source)
    if format is None:
        return _read_teacher(source, spec, chosen, tasks)
    in_file = read_gold_rows(source, format, spec.input.storage_options)
    if is_audit(in_file):
        fix = "is an audit, whose labels are drop and keep; `assay eval` and `assay "
        raise gold_error(source, f"{fix}report` read it")
    rows = label_columns(in_file, chosen)
    # — a review writes tasks and labels as the spec has them, and each document's hash
    of_review = rows is not in_file
    if of_review and not rows.rows:
        fix = f"people gave no labels for {', '.join(task.name for task in chosen)} in this file"
        raise gold_error(source, f"{fix}; label some (assay review), or name other tasks: --task")
    if not rows.rows:
        fix = f"has no rows; gold labels are a file ({_FORMATS}) or another run's output"
        raise gold_error(source, fix)
    gold_spec = GoldSpec() if of_review else spec.gold
    by, keys, texts = _documents(rows, spec, gold_spec, by_hash=of_review)
    scores = gold_spec.score_columns(spec.tasks)
    labels: dict[str, GoldTask] = {}
    columns = _task_columns(spec, gold_spec, chosen, tasks, tuple(rows.columns), source)
    for task, column in columns:
        score = scores.get(task.name)
        labels |= column_tasks(rows, task, column, gold_spec.values, score=score, keys=keys)
    # — a review has the columns of its documents beside those of tasks
    used = {gold_spec.id, gold_spec.text, spec.input.id, spec.input.text, "id", "doc_id", HASH}
    used |= {column for _, column in columns}
    unused = tuple(name for name in rows.columns if name not in used)
    counts = GoldCounts(source, by, len(keys), unused=unused)
    gold = Gold(counts, keys, _asked(labels, tasks, source), texts, rows.chosen)
    return _without_repeats(gold)


def _chosen(spec: JobSpec, names: Sequence[str]) -> list[TaskSpec]:
    """The tasks that these names are of; by default all. SpecError for an unknown name."""
    parts = {part.name for task in spec.tasks for part in (task, *task.parts)}
    fix = f"the spec has no such task; it has {', '.join(task.name for task in spec.tasks)}"
    if problems := [Problem(Option("tasks"), fix, name) for name in names if name not in parts]:
        raise SpecError(problems)
    asked = set(map(task_of, names))
    return [task for task in spec.tasks if not asked or task.name in asked]


def _task_columns(
    spec: JobSpec,
    gold_spec: GoldSpec,
    chosen: Sequence[TaskSpec],
    asked: Sequence[str],
    names: Sequence[str],
    source: str,
) -> list[tuple[TaskSpec, str]]:
    """The tasks that have gold labels, with the column of each; SpecError if there are none."""
    scores = {name: score.column for name, score in gold_spec.score_columns(spec.tasks).items()}
    named = {**gold_spec.columns, **scores}
    columns = [
        (each, named.get(each.name, each.name))
        for task in chosen
        for each in _read_as(task, named, names)
    ]
    shown = ", ".join(names)
    fix = f"{source} has no such column; it has {shown}"
    problems = [
        Problem("gold.scores" if task.name in scores else f"gold.columns.{task.name}", fix, column)
        for task, column in columns
        if column not in names and task.name in {*named, *asked}
    ]
    present = [(task, column) for task, column in columns if column in names]
    if not present and not problems:
        fix = f"has no column with the name of a task ({', '.join(task.name for task in chosen)}); "
        fix += f"it has {shown}; write TASK: COLUMN below gold.columns"
        raise gold_error(source, fix)
    if problems:
        raise SpecError(problems)
    return present


def _read_as(task: TaskSpec, named: Collection[str], names: Collection[str]) -> Sequence[TaskSpec]:
    """The task, or those of its parts that have a column of their own."""
    if task.name in named or task.kind != "multi":
        return (task,)
    own = [part for part in task.parts if part.name in named or part.name in names]
    has_own = task.name not in names or any(part.name in named for part in own)
    return own if own and has_own else (task,)


def is_asked(name: str, asked: Collection[str]) -> bool:
    """Whether a task, or a part of one, is among these tasks and parts; () is all."""
    return not asked or name in asked or task_of(name) in asked


def _asked(tasks: Mapping[str, GoldTask], asked: Sequence[str], source: str) -> dict[str, GoldTask]:
    """The gold of the tasks and parts with these names; SpecError for a name without gold."""
    if absent := [name for name in asked if not any(is_asked(n, [name]) for n in tasks)]:
        raise gold_error(source, f"has no labels for {', '.join(absent)}; name other tasks: --task")
    return {name: gold for name, gold in tasks.items() if is_asked(name, asked)}


def _without_repeats(gold: Gold) -> Gold:
    """One row for each document, with the label that most of its rows give; none after a tie."""
    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(gold.keys):
        rows_of.setdefault(key, []).append(row)
    chosen = {name: {key: rows[0] for key, rows in rows_of.items()} for name in gold.tasks}
    outvoted, ties = set[str](), set[str]()
    for key, rows in rows_of.items():
        for name, task in gold.tasks.items() if len(rows) > 1 else ():
            labelled = [row for row in rows if task.truth[row] != UNLABELLED]
            labels = task.truth[labelled].tolist()
            if labels and (most := majority(labels)) is None:
                ties.add(key)
                chosen[name][key] = _NO_ROW
            elif labels:
                chosen[name][key] = labelled[labels.index(most)]
                if len(set(labels)) > 1:
                    outvoted.add(key)
    tasks = {
        name: _of_rows(task, np.array([*chosen[name].values()], np.int64))
        for name, task in gold.tasks.items()
    }
    first = (rows[0] for rows in rows_of.values())
    return replace(
        gold,
        keys=tuple(rows_of),
        tasks=tasks,
        texts=None if gold.texts is None else tuple(gold.texts[row] for row in first),
        counts=replace(
            gold.counts,
            documents=len(rows_of),
            repeated=len(gold.keys) - len(rows_of),
            contradictory=sum(len(rows_of[key]) for key in ties),
            outvoted=len(outvoted),
            ties=tuple(key for key in rows_of if key in ties),
        ),
    )


def _of_rows(task: GoldTask, rows: NDArray[np.int64]) -> GoldTask:
    """The gold of these rows; none for `_NO_ROW`."""
    none = rows == _NO_ROW
    soft = None if task.soft is None else np.where(none[:, None], np.nan, task.soft[rows])
    return replace(task, truth=np.where(none, UNLABELLED, task.truth[rows]), soft=soft)


def _documents(
    rows: GoldRows, spec: JobSpec, gold_spec: GoldSpec, *, by_hash: bool
) -> tuple[By, tuple[str, ...], tuple[str | None, ...] | None]:
    """By which column rows are matched with documents, the keys, and the texts if there are any.

    The rows of a review have content hashes.
    """
    if by_hash:
        return "content_hash", tuple(map(str, rows.columns[HASH])), None
    by, column = _key_column(rows, spec, gold_spec)
    text_column = gold_spec.text or spec.input.text
    texts = None
    if text_column in rows.columns and text_column is not None and spec.input.image is None:
        texts = tuple(text if isinstance(text, str) else None for text in rows.columns[text_column])
    values = rows.columns[column]
    missing = [row for row, value in enumerate(values) if value in (None, "") or value != value]
    if missing:
        fix = f"has no {column}, so it matches no document ({len(missing)} such rows); remove it"
        raise SpecError([Problem(rows.place(missing[0]), fix)])
    if by == "doc_id":
        documents = documents_from(RawRow("", value) for value in values)
    else:
        documents = documents_from(map(RawRow, values))
        unreadable = [row for row, s in enumerate(documents["status"].to_pylist()) if "error" in s]
        if unreadable:
            fix = f"its {column}, by which rows are matched, is not a text; "
            fix += "name the id column: gold.id"
            raise SpecError([Problem(rows.place(unreadable[0]), fix, values[unreadable[0]])])
    return by, tuple(documents[by].to_pylist()), texts


def _key_column(rows: GoldRows, spec: JobSpec, gold_spec: GoldSpec) -> tuple[By, str]:
    choices: list[tuple[By, str | None]] = [
        ("doc_id", gold_spec.id),
        ("content_hash", gold_spec.text),
    ]
    if not (gold_spec.id or gold_spec.text):
        # — without an id column, the id of a document is the hash of its text
        own_id, own_text = spec.input.id, None if spec.input.image else spec.input.text
        choices = [("doc_id", own_id), ("content_hash", own_text), ("doc_id", "id")]
    for by, column in choices:
        if column in rows.columns and column is not None:
            return by, column
    names = " or ".join(dict.fromkeys(column for _, column in choices if column))
    columns = ", ".join(rows.columns)
    fix = f"has no column {names} to match its rows by; it has {columns}; name one: gold.id"
    raise gold_error(rows.path, fix)


def _read_teacher(
    source: str, spec: JobSpec, chosen: Sequence[TaskSpec], asked: Sequence[str]
) -> Gold:
    """The answers of the output at `source`, joined by content hash, or by id with `gold.id`.

    A label is the most probable one. Soft targets are the teacher's probabilities.
    A document without an answer to any task is left out.
    """
    gold_spec = spec.gold
    if gold_spec.scores:
        fix = f"scores are in a file ({_FORMATS}), and {source} is not one; the probabilities of "
        fix += "another run's output are read without gold.scores"
        raise SpecError([Problem("gold.scores", fix)])
    match = _SNAPSHOT.fullmatch(source)
    output, snapshot = (match["output"], int(match["number"])) if match else (source, None)
    try:
        teacher = open_labels(output, snapshot=snapshot, storage_options=spec.storage_options)
    except (SpecError, StorageError) as error:  # SpecError: it is a file, and no folder
        if isinstance(error, StorageError) and "has no snapshot yet" not in str(error):
            raise
        fix = f"is neither a file of gold labels ({_FORMATS}) nor an output of assay with a "
        fix += "snapshot"
        raise gold_error(source, fix) from error
    by: By = "doc_id" if gold_spec.id else "content_hash"
    columns = _task_columns(spec, gold_spec, chosen, asked, tuple(teacher.labels), source)
    read = [by, *dict.fromkeys(column for _, column in columns)]
    no_rows = pa.RecordBatch.from_pylist([], teacher.schema)
    keys: list[str] = []
    parts: list[dict[str, GoldTask]] = []
    for batch in chain([no_rows], teacher.to_batches(columns=read)):
        tasks: dict[str, GoldTask] = {}
        for task, column in columns:
            labels = teacher.labels[column]
            tasks |= teacher_tasks(batch.column(column), labels, task, gold_spec.values, source)
        tasks = _asked(tasks, asked, source)
        answered = np.any([task.truth != UNLABELLED for task in tasks.values()], axis=0)
        kept = np.flatnonzero(answered)
        keys += batch.column(by).take(pa.array(kept)).to_pylist()
        parts.append({name: _of_rows(task, kept) for name, task in tasks.items()})
    joined = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return _without_repeats(Gold(GoldCounts(source, by, len(keys)), tuple(keys), joined, None))


def _joined(parts: Sequence[GoldTask]) -> GoldTask:
    """The rows of all parts, which have soft targets."""
    soft = [part.soft for part in parts if part.soft is not None]
    truth = np.concatenate([part.truth for part in parts])
    return replace(parts[0], truth=truth, soft=np.concatenate(soft))
