"""What an output holds, how good its answers are, and what its filter does.

Entry point: `corpus_report`. The labels of the last snapshot are read once, and once more for each
of gold and the comparison with the snapshot before. The counts are queries over the table of the
filter's decisions about all documents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import computed_field

from pipeline.filters.decisions import MOST_GROUPS, Decisions, Pairs, Size, decided
from pipeline.filters.excerpts import excerpts, small_png
from pipeline.filters.labelled import LabelledRows
from pipeline.filters.older_answers import older_answers, what_answered
from pipeline.filters.result import FilterResult, result_of
from pipeline.filters.rule import SnapshotRule
from pipeline.integrity.diff import Comparison, compare
from pipeline.ledger.columns import CHUNK
from pipeline.ledger.snapshots import Contents, SnapshotTask, contents, headers
from pipeline.options import EvalOptions, ReportOptions
from pipeline.sources.rule import named, quoted
from pipeline.spec.filters import FilterSpec
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import Store
from pipeline.verbs.doubts import report_doubts
from pipeline.verbs.evaluate import Evaluation, evaluate

TEXT_CHARS = 600  # of each example
BARS = 50  # of a histogram
LENGTHS = (200, 1_000, 5_000, 20_000)  # characters: the upper ends of groups of documents
SHOWN_LABELS = 12  # of a task: histograms and examples; the first in the spec's order
MOST_SCORES = 48
EXAMPLES = 3
LEAST_SURE, KEPT, DROPPED = "least sure", "kept", "dropped"
# SQL of a group of documents by their length.
_UP_TO = " ".join(f"when n_chars <= {end} then 'up to {end:,} characters'" for end in LENGTHS)
BY_LENGTH = f"case {_UP_TO} else 'above {LENGTHS[-1]:,} characters' end"

Label = tuple[str, str]  # of a task: both names


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """Documents by the probability of a label."""

    task: str
    label: str
    counts: tuple[int, ...]  # in BARS bars of equal width from 0 to 1


@dataclass(frozen=True, slots=True)
class ShownDocument:
    """One document that a report shows."""

    kind: str  # least sure: of a task; kept | dropped: by the filter
    task: str | None
    label: str | None
    doc_id: str
    path: str
    row: int
    margin: float | None  # between the two likeliest labels, or those of the answer
    reason: str  # why the filter drops it, in words; "" where it is kept
    start: int = 0  # of the chunk whose answer it is, in characters


@dataclass(frozen=True, slots=True)
class ExpectedScores:
    """The expected values of a score over the documents with an answer."""

    mean: float
    low: float  # the lowest label
    high: float  # the highest label
    counts: tuple[int, ...]  # documents, in bars of equal width from `low` to `high`


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What one task answered."""

    task: str
    question: str | None  # of the label files
    instruction: str | None  # of the label files; None if no model answered
    models: tuple[str, ...]  # that answered, by name; () of a classifier, and if not recorded
    weights: Mapping[str, str]  # SHA-256 of the files of the model or the classifier
    fingerprint: str
    labels: Mapping[str, int]  # documents, in the spec's order; of `multi` one may have several
    statuses: Mapping[str, int]  # documents
    versions: Mapping[str, str]  # packages that answered the first shard
    readout: str | None
    cascade: str | None  # what was proved of it, in a sentence
    kind: str
    answered: int  # documents
    score: ExpectedScores | None  # of kind `score`


@dataclass(frozen=True, slots=True)
class ShownExample:
    """A document, with the start of its text and its picture."""

    example: ShownDocument
    text: str | None
    picture: str | None  # a small PNG, in base64


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """All numbers of a report."""

    spec: str
    model: str  # that answered; if the label files do not name it, the spec's
    older_answers: tuple[str, ...]  # why answers are not those of the current spec
    instruction: str  # before each document
    output: str
    input: str
    snapshot: int
    labelled_at: str  # ISO 8601
    partial: bool  # the snapshot leaves out documents of the input
    whole: tuple[Size, Size]  # kept, dropped
    statuses: Mapping[str, int]
    tasks: tuple[TaskReport, ...]
    scores: tuple[ScoreCounts, ...]
    filter: FilterResult | None
    by: str | None  # what the groups are
    groups: Pairs
    files: Pairs
    lengths: Pairs
    examples: tuple[ShownExample, ...]
    quality: Evaluation | None
    drift: Comparison | None  # with the snapshot before

    @computed_field
    @property
    def warnings(self) -> tuple[str, ...]:
        """Each reason why the labels, the figures or the filter may mislead."""
        return tuple(report_doubts(self))


def corpus_report(spec: JobSpec, options: ReportOptions, *, cache_dir: Path) -> CorpusReport:
    """The numbers of the spec's last snapshot; figures of quality if there is gold.

    Raises:
        SpecError: The spec, an option or the gold is wrong.
        StorageError: The input changed since it was labelled, or there is no snapshot.
    """
    quality = None
    if options.gold or spec.gold.path:
        quality = evaluate(spec, EvalOptions(gold=options.gold), cache_dir=cache_dir)
    return report_of(spec, quality, options, cache_dir=cache_dir)


def report_of(
    spec: JobSpec, quality: Evaluation | None, options: ReportOptions, *, cache_dir: Path
) -> CorpusReport:
    """As `corpus_report`, with an evaluation of its answers."""
    keep_all = FilterSpec(keep="true", on_error="keep")  # — of a spec without a filter
    filtering = spec.model_copy(update={"filter": spec.filter or keep_all})
    rule = SnapshotRule.of(filtering, options.by)
    labelled, on_error = rule.labelled, rule.rule.filter.on_error
    contents, store = labelled.contents, labelled.store
    shards, _ = labelled.shards(cache_dir)
    published = {task.name: contents.tasks[task.name] for task in spec.tasks}
    scored = scored_labels(published, rule.rule.probabilities)
    before = _before(store, contents)
    with decided(rule.rule, labelled.batches(shards), on_error, rule.by) as table:
        tasks = tuple(_task(task, labelled, table) for task in spec.tasks)
        return CorpusReport(
            spec=spec.name,
            model=", ".join(dict.fromkeys(m for task in tasks for m in task.models))
            or spec.model.name,
            older_answers=tuple(older_answers(labelled.spec, store, contents, cache_dir)),
            instruction=tasks[0].instruction or spec.prompt.instruction,
            output=store.url,
            input=spec.input.path,
            snapshot=contents.number,
            labelled_at=contents.created_at,
            partial=bool(contents.missing_rows or contents.missing_files),
            whole=table.whole,
            statuses=table.counts("status"),
            tasks=tasks,
            scores=tuple(
                ScoreCounts(task, label, bar_counts(table, named(task, "p", label), 0, 1))
                for task, label in scored
            ),
            filter=result_of(rule, on_error, table) if spec.filter else None,
            by=", ".join(group.text for group in rule.by) or None,
            groups=table.sizes("_group", MOST_GROUPS) if rule.by else {},
            files=table.sizes("path", MOST_GROUPS),
            lengths=table.sizes(BY_LENGTH),
            examples=_with_texts(labelled, list(examples(table, published, scored))),
            quality=quality,
            drift=None if before is None else compare(store, before, contents),
        )


def _task(task: TaskSpec, labelled: LabelledRows, table: Decisions) -> TaskReport:
    stored = what_answered(labelled.store, labelled.contents, task.name)
    written = stored.get("spec", {})
    is_multi = task.kind == "multi"
    label = named(task.name, "label")
    counts = table.counts(f"unnest({named(task.name, 'labels')})" if is_multi else label)
    [(answered,)] = table.rows(f"select count({named(task.name, 'margin')}) from documents")
    return TaskReport(
        task=task.name,
        question=written.get("task", {}).get("question", task.question),
        instruction=written.get("prompt", {}).get("instruction"),
        models=tuple(stored.get("models", {})),
        weights=stored.get("model", {}),
        fingerprint=labelled.contents.tasks[task.name].fp,
        # — a task can have thousands of labels
        labels={label: counts[label] for label in task.labels if label in counts},
        statuses=table.counts(named(task.name, "status")),
        versions=stored.get("versions", {}),
        readout=task.readout,
        cascade=proved.words if (proved := labelled.contents.certificates.get(task.name)) else None,
        kind=task.kind,
        answered=answered,
        score=_expected_scores(task, table) if task.kind == "score" else None,
    )


def _expected_scores(task: TaskSpec, table: Decisions) -> ExpectedScores | None:
    """None if no document has an answer."""
    low, high = task.values[0], task.values[-1]
    score = named(task.name, "score")
    [(mean,)] = table.rows(f"select avg({score}::DOUBLE) from documents where isfinite({score})")
    if mean is None:
        return None
    return ExpectedScores(mean, low, high, bar_counts(table, score, low, high))


def _with_texts(
    labelled: LabelledRows, examples: Sequence[ShownDocument]
) -> tuple[ShownExample, ...]:
    places = [(example.path, example.row, example.start) for example in examples]
    shown = excerpts(labelled, places, chars=TEXT_CHARS)
    return tuple(
        ShownExample(
            example,
            f"… {excerpt.text}" if example.start else excerpt.text,
            small_png(excerpt.image),
        )
        for example, excerpt in zip(examples, shown, strict=True)
    )


def _before(store: Store, snapshot: Contents) -> Contents | None:
    """The spec's snapshot before, with one of its tasks; None if there is none."""
    for header in headers(store, snapshot.spec):
        if header["number"] < snapshot.number:
            before = contents(store, header["number"])
            if before.tasks.keys() & snapshot.tasks:
                return before
    return None


def scored_labels(tasks: Mapping[str, SnapshotTask], first: Collection[Label]) -> list[Label]:
    """The labels whose probabilities are counted: of each task, those that the rule reads first."""
    scored = []
    for task, published in tasks.items():
        if "p" in published.columns:
            labels = sorted(published.labels, key=lambda label: (task, label) not in first)
            scored += [(task, label) for label in labels[:SHOWN_LABELS]]
    return scored[:MOST_SCORES]


def bar_counts(table: Decisions, column: str, low: float, high: float) -> tuple[int, ...]:
    """The documents with a number in the column, in BARS bars of equal width."""
    bar = f"least(floor(({column}::DOUBLE - ?) / ? * {BARS}), {BARS - 1})::INTEGER"
    query = f"select {bar} as bar, count(*) from documents where isfinite({column}) group by bar"
    counts: dict[int, int] = dict(table.rows(query, [low, high - low]))
    return tuple(counts.get(number, 0) for number in range(BARS))


def examples(
    table: Decisions, tasks: Mapping[str, SnapshotTask], scored: Sequence[Label] = ()
) -> Iterator[ShownDocument]:
    """The documents to show: by the filter's decision, then of each task. Equal texts are one.

    Of kind `multi`, the label is that with the smallest margin of those that are `scored`.
    """
    for kind, condition in ((KEPT, "not _dropped"), (DROPPED, "_dropped")):
        by_hash = _first(table, f"status = 'ok' and {condition}", "0")
        for doc_id, path, row, _, reason, _, _ in by_hash:
            yield ShownDocument(kind, None, None, doc_id, path, row, None, reason)
    for task, published in tasks.items():
        label, margin = named(task, "label"), named(task, "margin")
        if "labels" in published.columns:
            of_task = [name for of, name in scored if of == task]
            if not of_task:
                continue
            names = ", ".join(map(quoted, of_task))
            own = ", ".join(f"abs(2 * {named(task, 'p', name)} - 1)" for name in of_task)
            margin = f"list_min([{own}])"
            label = f"[{names}][list_position([{own}], {margin})]"
        start = named(task, CHUNK, "start") if CHUNK in published.columns else "0"
        for shown in _first(table, f"isfinite({margin})", margin, label, f"coalesce({start}, 0)"):
            doc_id, path, row, least, reason, name, begins = shown
            yield ShownDocument(LEAST_SURE, task, name, doc_id, path, row, least, reason, begins)


def _first(
    table: Decisions, where: str, order: str, label: str = "''", start: str = "0"
) -> list[tuple[Any, ...]]:
    """The first documents in an order, of different texts: id, path, row, place, reason, label,
    and where the text begins that is shown.
    """
    columns = f"*, {order} as _place, {label} as _named, {start} as _start"
    chosen = f"select {columns} from documents where {where}"
    return table.rows(
        f"""
        with texts as (
            select content_hash, min(_place) as _place from ({chosen}) group by content_hash
            order by _place, content_hash limit {EXAMPLES}
        )
        select doc_id, path, row, _place, _why, _named, _start
        from ({chosen}) join texts using (content_hash, _place)
        qualify row_number() over (partition by content_hash order by path, row) = 1
        order by _place, content_hash
        """
    )
