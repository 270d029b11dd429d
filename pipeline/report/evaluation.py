"""An evaluation as tables. The terminal and the page show the same `Section`s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import MULTI_HEADLINES, LabelScore
from pipeline.evaluation.ordinal import ORDINAL_HEADLINES
from pipeline.evaluation.survey import Estimate
from pipeline.gold.fitted_texts import LEAST_ROWS
from pipeline.report.console import Grid, Part, interval, number, printed, truncate, warnings
from pipeline.spec.labels import YES, task_of
from pipeline.verbs.against import Against
from pipeline.verbs.audit import HALF_WIDTH, FilterQuality
from pipeline.verbs.doubts import shared_doubts
from pipeline.verbs.evaluate import Cut, Evaluation, LabelIssue, TaskEvaluation

SHOWN_ISSUES = 10
_TEXT_CHARS = 400
WIDE_LABELS = 12  # a confusion matrix of more labels is too wide to be read
GIVERS = {
    "people": "labels that people gave",
    "chosen": "labels that people gave to documents of a review, not chosen at random",
    "scores": "scores of another classifier",
    "teacher": "answers of another model",
}
_MAIN = (*MULTI_HEADLINES, "auroc", *ORDINAL_HEADLINES, "accuracy")
_NAMES = {
    "accuracy": "accuracy",
    "f1": "macro F1",
    "auroc": "AUROC",
    "ap": "average precision",
    "brier": "Brier",
    "qwk": "quadratic weighted kappa",
    "mae": "mean absolute error of the score",
    "spearman": "Spearman's rank correlation of the score",
    "macro_f1": "macro F1",
    "macro_auroc": "macro AUROC",
}
_SHARES = {  # that an audit estimates
    "precision": "of dropped documents, the share that should be dropped",
    "recall": "of documents that should be dropped, the share that is",
    "prevalence": "the share of all documents that should be dropped",
}


@dataclass(frozen=True, slots=True)
class Section:
    """What is shown of one task. One of kind `multi` has an evaluation for each label."""

    task: str
    headline: str  # the main figures in one line, and who gave the gold labels
    figure: Figure | None  # the first of them
    counts: Sequence[str]  # how many rows were evaluated, and why the others were not
    doubts: Sequence[str]
    grids: Sequence[Grid]  # in all, by label, by threshold, the confusion matrix; () without rows
    issues: Sequence[LabelIssue]


@printed
def show_evaluation(evaluation: Evaluation) -> Iterator[Part]:
    """Where answers and gold are from, each task's tables, and the gates."""
    yield [*sources(evaluation)]
    if evaluation.filter is not None:
        yield from ("", filter_grid(evaluation.filter), [*filter_facts(evaluation.filter)])
    for section in sections(evaluation):
        yield ""
        yield from section.counts
        yield from section.grids
        yield from warnings(section.doubts)
        if section.issues:
            yield issue_grid(section.issues, SHOWN_ISSUES)
    yield from warnings(_not_in_corpus(evaluation))
    yield from (decision.words for decision in evaluation.gates)
    if evaluation.against is not None:
        yield from _against(evaluation, evaluation.against)


def _against(evaluation: Evaluation, against: Against) -> Iterator[Part]:
    """What another spec answers to the same rows, and the differences."""
    yield ""
    yield {"against": f"{against.output}, snapshot {against.snapshot:08d} of {against.spec}"}
    for task, pair in against.tasks.items():
        rows = [
            (_NAMES[metric], number(both.value), number(both.other), interval(both.difference))
            for metric, both in pair.figures.items()
        ]
        names = ("", evaluation.spec, against.spec, "difference (95 % interval)")
        yield from ("", Grid(f"{task}: both on the same {pair.rows:,} documents", names, rows))
    if absent := [task for task in evaluation.tasks if task not in against.tasks]:
        yield f"not compared: {', '.join(absent)} (no shared rows, or other labels there)"


def _not_in_corpus(evaluation: Evaluation) -> Iterator[str]:
    """What to do if no document of the gold is in the corpus, with ids of both."""
    if not evaluation.gold_ids:
        return
    of_corpus = ", ".join(map(repr, evaluation.corpus_ids)) or "none"
    gold = f"no id of the gold is in the corpus: it has {', '.join(map(repr, evaluation.gold_ids))}"
    if evaluation.gold.joined_by != "doc_id":
        gold = "no text of the gold is in the corpus"
    yield (
        f"{gold}, and the corpus has the ids {of_corpus}. Give gold of these documents, or name "
        "the column of their ids: gold: {id: COLUMN}"
    )


def sections(evaluation: Evaluation) -> Iterator[Section]:
    """The figures of each task with gold."""
    for name, parts in _by_task(evaluation).items():
        is_multi = name in evaluation.multi
        own = parts[0].scores.headlines if parts[0].scores else {}
        figures = evaluation.multi.get(name, own)
        yield Section(
            task=name,
            headline=_headline(figures, parts),
            figure=next(iter(_main(figures).values()), None),
            counts=list(_counts(name, parts)),
            doubts=list(shared_doubts(parts)),
            grids=list(_grids(name, figures, parts, is_multi=is_multi)) if figures else (),
            issues=_issues(parts) if is_multi else parts[0].mislabelled,
        )


def _by_task(evaluation: Evaluation) -> dict[str, list[TaskEvaluation]]:
    """The evaluation of each task, or those of its labels."""
    parts = groupby(evaluation.tasks.values(), lambda part: task_of(part.task))
    return {name: [*own] for name, own in parts}


def _main(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    main = {name: figures[name] for name in _MAIN if name in figures}
    return {name: figure for name, figure in main.items() if figure.value is not None}


def _headline(figures: Mapping[str, Figure], parts: Sequence[TaskEvaluation]) -> str:
    shown = [f"{_NAMES[name]} {interval(figure)}" for name, figure in _main(figures).items()]
    if not shown:
        return "nothing is judged"
    rows = max(part.rows.evaluated for part in parts)
    shown.append(f"on {rows:,} documents, by {GIVERS[parts[0].gold]}")
    return ", ".join(shown)


def _counts(name: str, parts: Sequence[TaskEvaluation]) -> Iterator[str]:
    """The counts of all labels in one line if they are equal."""
    counts = {part.task: _row_counts(part) for part in parts}
    if len(set(counts.values())) == 1:
        counts = {name: counts[parts[0].task]}
    yield from (f"{task}: {count}" for task, count in counts.items())
    for part in parts:
        if figures := _main(part.cross_validated):
            shown = ", ".join(f"{_NAMES[name]} {interval(of)}" for name, of in figures.items())
            yield f"{part.task}: by cross-validation of the fit itself: {shown}"


def sources(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    """Where the answers and the gold are from: names and values."""
    gold = evaluation.gold
    yield "output", f"{evaluation.output}, snapshot {evaluation.snapshot:08d} of {evaluation.spec}"
    if evaluation.limit is not None:
        yield "limit", f"the snapshot has answers about these documents alone: {evaluation.limit}"
    if evaluation.newest_snapshot != evaluation.snapshot:
        newest = f"snapshot {evaluation.newest_snapshot:08d}"
        yield "not the newest", f"{newest} has other questions or another model than this spec"
    joined = "id" if gold.joined_by == "doc_id" else "the text's hash"
    yield "gold", f"{gold.source}, {gold.documents:,} documents, joined by {joined}"
    for name, parts in _by_task(evaluation).items():
        givers = {part.task: GIVERS[part.gold] for part in parts}
        shared = len(set(givers.values())) == 1
        for part, giver in [(name, givers[parts[0].task])] if shared else givers.items():
            yield f"gold of {part}", giver
    corpus = f"the corpus has {evaluation.corpus_rows:,} rows"
    yield "in the corpus", f"{evaluation.in_corpus:,} of them; {corpus}"
    yield from gold.merged
    if evaluation.repeated_in_corpus:
        rows = f"{evaluation.repeated_in_corpus:,} corpus rows have the key of another row"
        yield "ambiguous", f"{rows}; the first one is evaluated"
    if evaluation.without_gold:
        absent = ", ".join(evaluation.without_gold)
        if gold.unused:
            fix = f"write gold: {{columns: {{{evaluation.without_gold[0]}: COLUMN}}}}"
            absent += f"; no task reads the columns {', '.join(gold.unused)} ({fix})"
        yield "without gold", absent


def _row_counts(task: TaskEvaluation) -> str:
    """How many rows were evaluated, and why the others were not."""
    rows = task.rows
    judged = rows.evaluated if task.scores else 0
    parts = [f"{judged:,} of {rows.gold:,} gold documents evaluated"]
    if rows.unlabelled:
        parts.append(f"{rows.unlabelled:,} without a gold label")
    if rows.not_in_corpus:
        parts.append(f"{rows.not_in_corpus:,} not in the corpus")
    parts += [f"{n:,} without an answer ({status})" for status, n in rows.unanswered.items()]
    if rows.fitted:
        parts.append(f"{rows.fitted:,} left out, because the readout was fitted to them")
    if rows.evaluated and task.scores is None:
        parts.append(f"{rows.evaluated:,} are too few to judge (of {LEAST_ROWS})")
    return ", ".join(parts)


def _grids(
    name: str, figures: Mapping[str, Figure], parts: Sequence[TaskEvaluation], *, is_multi: bool
) -> Iterator[Grid]:
    """The scores in all, by label, by threshold, and the confusion matrix."""
    rows = [(_NAMES[metric], interval(figure)) for metric, figure in figures.items()]
    yield Grid(f"{name}, with 95 % intervals", ("", "figure"), rows)
    labels: list[tuple[str, LabelScore]] = []
    cuts: list[tuple[str, Cut]] = []
    for part in parts:
        if part.scores is None:
            continue
        label = part.task.partition(".")[2]
        shown = [each for each in part.scores.labels if not is_multi or each.label == YES]
        labels += [(label or each.label, each) for each in shown]
        own_cuts = [cut for cut in part.thresholds if not is_multi or cut.label == YES]
        cuts += [(label or cut.label, cut) for cut in own_cuts]
    yield _labels(labels)
    if cuts:
        yield _cuts(cuts)
    if not is_multi and parts[0].scores:
        yield _confusion(parts[0], parts[0].scores.confusion)


def _issues(parts: Sequence[TaskEvaluation]) -> list[LabelIssue]:
    """The issues of all labels of a task of kind `multi`, the most probable first."""
    issues = [
        replace(issue, gold=f"{part.task.partition('.')[2]}: {issue.gold}")
        for part in parts
        for issue in part.mislabelled
    ]
    return sorted(issues, key=lambda issue: issue.p_gold)


def _labels(labels: Sequence[tuple[str, LabelScore]]) -> Grid:
    """The scores of each label."""
    return Grid(
        "by label",
        ("label", "precision", "recall", "F1", "AUROC", "AP", "gold", "predicted"),
        [
            (
                name,
                *(
                    interval(Figure(value, *label.intervals.get(metric, (None, None))))
                    for metric, value in (("precision", label.precision), ("recall", label.recall))
                ),
                *map(number, (label.f1, label.auroc, label.ap)),
                f"{label.support:,}",
                f"{label.predicted:,}",
            )
            for name, label in labels
        ],
    )


def _cuts(cuts: Sequence[tuple[str, Cut]]) -> Grid:
    rows = []
    for label, cut in cuts:
        figures = ["no threshold reaches this", "", "", ""]
        if at := cut.threshold:
            rounded = f"{at.threshold:.6g}"  # never up, because it may be copied into a rule
            least = rounded if float(rounded) <= at.threshold else repr(at.threshold)
            figures = [least, interval(at.precision), interval(at.recall), f"{at.flagged:,}"]
        rows.append((f"{cut.metric} {cut.least:g}", label, *figures))
    return Grid(
        "thresholds: a document has the label if its p is at least the threshold; "
        "precision and recall of other documents, by cross-validation",
        ("minimum", "label", "threshold", "precision", "recall", "documents"),
        rows,
        texts=2,
    )


def _confusion(task: TaskEvaluation, counts: Sequence[Sequence[int]]) -> Grid:
    """The confusion matrix, or the most frequent confusions if it is too wide to be read."""
    labels = task.labels
    if len(labels) <= WIDE_LABELS:
        return Grid(
            "confusion: gold label by row, answer by column",
            ("gold", *labels),
            [(label, *map("{:,}".format, row)) for label, row in zip(labels, counts, strict=True)],
            wrap=True,
        )
    pairs = [
        (count, gold, answer)
        for gold, row in zip(labels, counts, strict=True)
        for answer, count in zip(labels, row, strict=True)
        if count and gold != answer
    ]
    most = sorted(pairs, key=lambda pair: -pair[0])[:WIDE_LABELS]
    return Grid(
        "the most frequent confusions; --json has all",
        ("gold", "answer", "documents"),
        [(gold, answer, f"{count:,}") for count, gold, answer in most],
        texts=2,
    )


def issue_grid(issues: Sequence[LabelIssue], most: int, *, texts: bool = False) -> Grid:
    """The first `most` label issues, with the documents' texts if asked for and known."""
    shown = issues[:most]
    with_texts = texts and any(issue.text is not None for issue in shown)
    left_out = len(issues) - len(shown)
    omitted = f"; {left_out:,} more in --json" if left_out else ""
    return Grid(
        f"gold labels that are probably wrong, the most probable first{omitted}",
        ("document", "gold", "answer", *["text"] * with_texts, "p of gold", "p of answer"),
        [
            (
                issue.doc_id,
                issue.gold,
                issue.likely,
                *[truncate(issue.text or "", _TEXT_CHARS)] * with_texts,
                number(issue.p_gold),
                number(issue.p_likely),
            )
            for issue in shown
        ],
        texts=3 + with_texts,
    )


def filter_grid(quality: FilterQuality) -> Grid:
    """The estimates with their intervals, and how many labels more each needs."""
    rows = []
    for name, meaning in _SHARES.items():
        of: Estimate = getattr(quality, name)
        more = "-" if of.more_labels is None else f"{of.more_labels:,}"
        rows.append((name, meaning, _share(of), f"{of.labels:,}", more))
    goal = f"labels for +-{100 * HALF_WIDTH:g} points"
    return Grid("the filter", ("", "", "95 % interval", "labels", f"more {goal}"), rows, texts=3)


def filter_facts(quality: FilterQuality) -> Iterator[tuple[str, str]]:
    """What is judged, by which labels: names and values."""
    yield "rule", quality.rule
    yield "labels", f"{quality.labels:,} of {quality.drawn:,} texts drawn from {quality.texts:,}"
    yield "drawn from", f"snapshot {quality.sampled_snapshot:08d}, with the earlier rule"
    if quality.sampled_rule != quality.rule:
        yield "the earlier rule", quality.sampled_rule
    if quality.not_in_corpus:
        yield "not used", f"{quality.not_in_corpus:,} texts that have no answer now"
    if lacks := quality.lacks:
        yield "no estimates", lacks


def filter_words(quality: FilterQuality) -> str:
    """Precision and recall in one line."""
    if lacks := quality.lacks:
        return f"not judged: {lacks}"
    shown = (f"{name} {_share(getattr(quality, name))}" for name in ("precision", "recall"))
    return f"{', '.join(shown)}, by {quality.labels:,} labels of people"


def _share(of: Estimate) -> str:
    if of.estimate is None:
        return "no estimate"
    return interval(Figure(of.estimate, of.low, of.high))
