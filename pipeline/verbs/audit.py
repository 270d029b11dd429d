"""How good a filter is on its corpus, by a random sample that people labelled.

Entry point: `audit`, which reads a file of `audit_sample.draw_sample`. What should be dropped is
what the rule drops when its answers are the labels of people. The unit is a text; each document
with the text counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.evaluation.survey import NO_ESTIMATE, Estimate, LabelledSample, estimate
from pipeline.gold.files import GoldRows, gold_error, gold_format, read_gold_rows
from pipeline.gold.labels import read_gold
from pipeline.gold.people import label_columns
from pipeline.gold.sample_design import HASH, SAMPLE, SampleDesign, find_design
from pipeline.gold.values import UNLABELLED
from pipeline.options import AuditOptions
from pipeline.spec.labels import task_of
from pipeline.spec.schema import JobSpec
from pipeline.verbs.audited_rule import (
    AuditedRule,
    Bools,
    Hashes,
    Numbers,
    fitted_hashes,
    text_number,
)

MEASURES = ("precision", "recall", "prevalence")
_SHOWN_ROWS = 5


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Estimates of a filter's quality on its corpus, with 95 % intervals."""

    precision: Estimate
    recall: Estimate
    prevalence: Estimate
    reasons: Mapping[str, Mapping[str, Estimate]]  # each reason of the rule by itself
    groups: Mapping[str, Mapping[str, Estimate]]
    labels: int  # texts with labels, by which the shares are estimated
    unlabelled: int  # rows of the file whose labels do not say whether they should be dropped
    unfinished: int  # those of them that have a label
    not_in_corpus: int  # labelled texts that the snapshot does not have, or has no answer for
    texts: int  # that the sample was drawn from
    texts_now: int
    tasks: tuple[str, ...]  # whose labels say which documents should be dropped
    positive: str | None  # the task and label of documents that should be dropped, if it is named
    snapshot: int
    left_out: Mapping[str, int]
    half_width: float  # target of the intervals


@dataclass(frozen=True, slots=True)
class _Sheet:
    """The file that people labelled."""

    rows: GoldRows
    design: SampleDesign
    texts: Hashes  # [texts]: of its rows, rising
    labels: Mapping[str, Numbers]  # [texts] by part of a task: the label's number, or UNLABELLED

    @property
    def has_label(self) -> Bools:  # [texts]
        """Whether a text has a label of any task."""
        some = np.any([codes != UNLABELLED for codes in self.labels.values()], axis=0)
        return np.asarray(some, np.bool_)

    @property
    def lacks_a_task(self) -> bool:
        """Whether some tasks have labels, and another one has none at all."""
        empty = [bool((codes == UNLABELLED).all()) for codes in self.labels.values()]
        return any(empty) and not all(empty)


@dataclass(frozen=True, slots=True)
class _Documents:
    """The answered documents with a text of the sheet, and what is known of each."""

    answered: Hashes  # the texts of all answered documents of the corpus
    names: tuple[str, ...]  # of groups
    hashes: Hashes  # [documents]
    groups: Numbers  # [documents]: the number of a group
    dropped: Bools  # [documents]: by the whole rule
    by_reason: Bools  # [documents, reasons]: dropped for it
    known: Bools  # [documents, criteria]: whether the tasks that it reads have labels
    should: Bools  # [documents, criteria]: whether it drops the document by the labels

    def whole(self, lacks_a_task: bool) -> _Judged:
        """The decisions of the whole rule: one labelled criterion is enough to drop a document.

        Where a task has no labels at all, only documents that should be dropped could be known. So
        then none of them is.
        """
        should = np.asarray((self.known & self.should).any(axis=1), np.bool_)
        known = np.asarray(self.known.all(axis=1), np.bool_)
        return _Judged(self.hashes, self.dropped, should, known | (should & (not lacks_a_task)))

    def of_reason(self, number: int) -> _Judged:
        """The decisions of one reason."""
        own = (column.take(number, axis=1) for column in (self.by_reason, self.should, self.known))
        return _Judged(self.hashes, *(np.asarray(column, np.bool_) for column in own))


@dataclass(frozen=True, slots=True)
class _Judged:
    """What the rule, or one reason of it, does with documents, and what it should do."""

    hashes: Hashes  # [documents]
    dropped: Bools  # [documents]
    should: Bools  # [documents]: be dropped
    known: Bools  # [documents]: whether the labels say what it should do

    @property
    def texts(self) -> Hashes:
        """The texts all of whose documents are known, rising."""
        return np.setdiff1d(self.hashes, self.hashes[~self.known])

    def labelled(self, design: SampleDesign, inside: Bools) -> LabelledSample:
        """These texts, with the counts of their documents that are `inside`."""
        texts = self.texts
        own = np.isin(self.hashes, texts)
        at = np.searchsorted(texts, self.hashes[own])

        def count(chosen: Bools) -> Numbers:
            return np.bincount(at[chosen[own]], minlength=len(texts))

        strata = {text_number(key): stratum for key, stratum in design.strata.items()}
        return LabelledSample(
            codes=np.array([strata[text] for text in texts.tolist()], np.int64),
            documents=count(inside),
            dropped=count(inside & self.dropped),
            positive=count(self.should) > 0,
            sizes=design.sizes,
            positives=(count(inside & self.should), count(inside & self.should & self.dropped)),
        )


def audit(spec: JobSpec, options: AuditOptions, *, cache_dir: Path) -> AuditResult:
    """Estimates precision, recall and prevalence from the labels in a file of `draw_sample`.

    The decisions are those of the spec's filter now: one sample judges several rules.

    Raises:
        SpecError: The file is not a sample, a stratum has no label, or a readout that the filter
            reads was fitted to its documents.
    """
    audited = AuditedRule.of(spec, options)
    sheet = _read_sheet(audited, options.gold or "")
    fitted = fitted_hashes(audited)
    _refuse_fitted(sheet, fitted)
    documents = _documents(audited.with_thresholds(cache_dir), sheet)
    whole = documents.whole(sheet.lacks_a_task)
    if not sheet.lacks_a_task:
        _refuse_stratum_without_label(sheet, whole)
    everywhere = np.ones(len(documents.hashes), np.bool_)
    groups = {name: documents.groups == number for number, name in enumerate(documents.names)}
    in_corpus, counted = (np.isin(sheet.texts, texts) for texts in (documents.hashes, whole.texts))
    gone = int((sheet.has_label & ~in_corpus).sum())
    return AuditResult(
        **_estimates(sheet, whole, everywhere, options),
        reasons={
            reason.words: _estimates(sheet, documents.of_reason(number), everywhere, options)
            for number, reason in enumerate(audited.reasons)
            if reason.tasks
        },
        groups={
            name: _estimates(sheet, whole, inside, options)
            for name, inside in groups.items()
            if len(groups) > 1 and inside.any()
        },
        labels=len(whole.texts),
        unlabelled=len(sheet.texts) - gone - len(whole.texts),
        unfinished=int((sheet.has_label & in_corpus & ~counted).sum()),
        not_in_corpus=gone,
        texts=sheet.design.texts,
        texts_now=len(np.setdiff1d(documents.answered, fitted)),
        tasks=tuple(audited.tasks),
        positive=audited.positive,
        snapshot=audited.rule.contents.number,
        left_out=audited.left_out(documents.answered, fitted),
        half_width=options.half_width,
    )


def _read_sheet(audited: AuditedRule, source: str) -> _Sheet:
    """The labels of the file, by text; SpecError if it is not a sample of the spec's output."""
    spec, format = audited.rule.spec, gold_format(source)
    rows = read_gold_rows(source, format, spec.input.storage_options) if format else None
    own_tasks = [task for task in spec.tasks if task.name in audited.tasks]
    rows = label_columns(rows, own_tasks) if rows else None
    design = find_design(rows, spec) if rows else None
    if rows is None or design is None:
        fix = f"was not drawn by `assay audit --to`: it has no column {SAMPLE}; draw a sample, and "
        fix += "label it"
        if rows is not None and rows.chosen:
            fix = "is no evidence about a filter: its labels are of documents that were not drawn "
            fix += "for one audit, or were given with the model's answer in view; label a new file "
            fix += "(assay review --by audit)"
        raise gold_error(source, fix)
    named = set(map(task_of, (*spec.gold.columns, *spec.gold.scores)))
    tasks = [task for task in audited.tasks if task in rows.columns or task in named]
    gold = read_gold(source, spec, tasks or tuple(audited.tasks))
    keys = np.array([text_number(key) for key in gold.keys], np.uint64)
    order = np.argsort(keys)
    unlabelled = np.full(len(keys), UNLABELLED)
    labels = {
        part.name: gold.tasks[part.name].truth[order] if part.name in gold.tasks else unlabelled
        for task in audited.tasks
        for part in audited.spec_tasks[task].parts
    }
    return _Sheet(rows, design, keys[order], labels)


def _refuse_fitted(sheet: _Sheet, fitted: Hashes) -> None:
    if both := int(np.isin(sheet.texts, fitted).sum()):
        fix = f"a readout of the filter was fitted to {both:,} of its {len(sheet.texts):,} texts, "
        fix += "so they do not show its quality; draw other documents: assay audit --to"
        raise gold_error(sheet.rows.path, fix)


def _refuse_stratum_without_label(sheet: _Sheet, whole: _Judged) -> None:
    strata = sheet.design.strata
    labelled = set(whole.texts.tolist())
    used = {stratum for key, stratum in strata.items() if text_number(key) in labelled}
    if missing := sorted(sheet.design.sizes.keys() - used):
        keys = enumerate(sheet.rows.columns[HASH], start=1)
        rows = [str(row) for row, key in keys if strata[str(key)] == missing[0]]
        shown = ", ".join(rows[:_SHOWN_ROWS]) + ", ..." * (len(rows) > _SHOWN_ROWS)
        fix = "a part of the sample has no row with the labels that the rule needs; label one or "
        fix += f"more of its rows: {shown}"
        raise gold_error(sheet.rows.path, fix)


def _documents(audited: AuditedRule, sheet: _Sheet) -> _Documents:
    """What the rule does, and should do, with the documents that have a text of the sheet."""
    groups: dict[str, int] = {}
    answered: list[Hashes] = []
    parts: list[tuple[NDArray[np.generic], ...]] = []
    for documents in audited.documents(groups):
        answered.append(documents.hashes)
        inside = np.isin(documents.hashes, sheet.texts)
        rows = documents.rows.filter(pa.array(inside))
        at = np.searchsorted(sheet.texts, documents.hashes[inside])
        known, should = audited.by_labels(rows, {t: own[at] for t, own in sheet.labels.items()})
        columns = documents.hashes, documents.groups, documents.dropped
        parts.append(
            (*(column[inside] for column in columns), audited.by_reason(rows), known, should)
        )
    columns_of_all = map(np.concatenate, zip(*parts, strict=True))
    return _Documents(np.concatenate(answered), tuple(groups), *columns_of_all)


def _estimates(
    sheet: _Sheet, judged: _Judged, inside: Bools, options: AuditOptions
) -> dict[str, Estimate]:
    """The estimates of the documents that are `inside`; none if a stratum has no label."""
    labelled = judged.labelled(sheet.design, inside)
    if sheet.design.sizes.keys() != set(labelled.codes.tolist()):
        return dict.fromkeys(MEASURES, NO_ESTIMATE)
    return estimate(labelled, options.half_width)
