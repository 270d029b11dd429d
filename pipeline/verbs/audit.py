"""How good a filter is on its corpus, by a random sample that people label.

Entry points: `draw_sample`, which writes a file for people to fill in, and `audit`, which reads it.
The unit is a text: equal texts are drawn once, and each of their documents counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.survey import (
    Estimate,
    Labelled,
    Population,
    allocate,
    estimate,
    strata,
)
from pipeline.filters.excerpts import excerpts
from pipeline.filters.inputs import check_columns_of
from pipeline.filters.labelled import labelled_shards
from pipeline.filters.policy import AUDIT, Clause
from pipeline.filters.removal import limited_probabilities
from pipeline.filters.rule import SnapshotRule
from pipeline.filters.shard import failed_status
from pipeline.fitted.readout import parse_readout
from pipeline.gold.files import gold_format, read_gold_rows
from pipeline.gold.labels import UNLABELLED, read_gold
from pipeline.ledger.rows import TEXT_COLUMN
from pipeline.options import AuditOptions, GoldOptions
from pipeline.runtime.fitted_files import options_for, read_fitted
from pipeline.spec.schema import JobSpec
from pipeline.stores.named_files import open_target
from pipeline.verbs.export import WRITERS, format_and_kind

SAMPLE = 400  # texts
TEXT_CHARS = 20_000  # of each text in the file
# Columns of the file, beside the document's id, text and label.
HASH, STRATUM, STRATUM_TEXTS = "content_hash", "_stratum", "_stratum_texts"
_HEX = 16  # digits of a content hash that tell texts apart


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """A sample that was written for people to label."""

    path: str
    task: str  # the column to fill in
    labels: tuple[str, ...]  # what to write there
    positive: str  # the label of documents that should be dropped
    by: str | None  # the groups that were asked for
    texts: int
    drawn: int
    strata: int
    left_out: Mapping[str, int]  # texts of the corpus that cannot be drawn, by reason
    snapshot: int


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Estimates of a filter's quality on its corpus, with 95 % intervals."""

    precision: Estimate
    recall: Estimate
    prevalence: Estimate
    groups: Mapping[str, Mapping[str, Estimate]]
    labels: int  # texts with a label, by which the shares are estimated
    unlabelled: int  # rows of the file without a label
    not_in_corpus: int  # labelled texts that the snapshot does not have, or has no answer for
    texts: int  # that the sample was drawn from
    texts_now: int
    task: str
    positive: str
    snapshot: int
    left_out: Mapping[str, int]
    half_width: float  # that was wished


@dataclass(frozen=True, slots=True)
class _Documents:
    """All documents with an answer; those with equal texts can have other groups and decisions."""

    hashes: NDArray[np.uint64]  # [documents]
    groups: NDArray[np.int64]  # [documents]: the number of a group
    dropped: NDArray[np.bool_]  # [documents]

    def those_of(self, hashes: NDArray[np.uint64]) -> _Documents:
        rows = np.isin(self.hashes, hashes)
        return _Documents(self.hashes[rows], self.groups[rows], self.dropped[rows])

    def of_group(self, group: int) -> _Documents:
        rows = self.groups == group
        return _Documents(self.hashes[rows], self.groups[rows], self.dropped[rows])

    def counts(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many documents have each of these texts (rising), and how many are dropped."""
        at = np.searchsorted(hashes, self.hashes)
        size = len(hashes)
        return np.bincount(at, minlength=size), np.bincount(at[self.dropped], minlength=size)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The texts of a snapshot that can be drawn, in the order of their hashes."""

    hashes: NDArray[np.uint64]  # [texts]: rising
    rows: NDArray[np.int64]  # [texts]: the first row of the snapshot with the text
    population: Population  # by that row
    documents: _Documents
    groups: tuple[str, ...]  # names
    left_out: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Audited:
    """A filter, and the task by which it is judged."""

    rule: SnapshotRule  # its last clause has the score and the groups, and drops nothing
    task: str
    positive: str

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.rule.contents.tasks[self.task].labels)


def draw_sample(spec: JobSpec, options: AuditOptions, *, cache_dir: Path) -> DrawnSample:
    """Writes a stratified random sample of the corpus at `options.to`, with an empty label column.

    The file shows neither scores nor decisions, so that they do not influence people. The same
    options on the same snapshot give the same sample.

    Raises:
        SpecError: The file exists, an option is wrong, or the sample has no room for two documents
            in each stratum.
    """
    to = options.to or ""
    format, is_folder = format_and_kind(to, None)
    target = open_target(to, spec.storage_options, flag="--to")
    if is_folder or target.exists():
        fix = "is a folder" if is_folder else "exists, and may have labels"
        raise SpecError([Problem("--to", f"{fix}; name a new file", to)])
    audited = _audited(spec, options)
    frame = _frame(audited, cache_dir)
    sample = min(SAMPLE if options.sample is None else options.sample, len(frame.hashes))
    codes = strata(frame.population, sample)
    drawn = allocate(frame.population, codes, sample)
    if drawn.sum() > sample:
        fix = f"has no room for two documents of each of {len(drawn)} strata; "
        raise SpecError([Problem("--sample", fix + f"write {drawn.sum()} or more", sample)])
    random = np.random.default_rng(options.seed)
    chosen = np.concatenate(
        [
            random.choice(np.flatnonzero(codes == code), size, replace=False)
            for code, size in enumerate(drawn.tolist())
        ]
    )
    chosen = random.permutation(chosen)  # — neighbours in the file are of any stratum
    table = _file(audited, frame, chosen, codes)
    with target.replaced() as path, WRITERS[format](path, table.schema) as write:
        write(table)
    return DrawnSample(
        path=target.url,
        task=audited.task,
        labels=audited.labels,
        positive=audited.positive,
        by=options.by,
        texts=len(frame.hashes),
        drawn=len(chosen),
        strata=len(drawn),
        left_out=frame.left_out,
        snapshot=audited.rule.contents.number,
    )


def audit(spec: JobSpec, options: AuditOptions, *, cache_dir: Path) -> AuditResult:
    """Estimates precision, recall and prevalence from the labels in a file of `draw_sample`.

    The decisions are those of the spec's filter now: one sample judges several rules.

    Raises:
        SpecError: The file is no sample, a stratum has no label, or its documents were used to fit
            a readout that the filter reads.
    """
    source = options.gold or ""
    audited = _audited(spec, options)
    design = _design(source, spec)
    named = GoldOptions(id=HASH, values=options.values, tasks=(audited.task,))
    gold = read_gold(source, spec, named)
    truth = gold.tasks[audited.task].truth
    by_hash = {_number(key): label for key, label in zip(gold.keys, truth.tolist(), strict=True)}
    _refuse_fitted(audited, by_hash, source)
    frame = _frame(audited, cache_dir)
    labelled = np.array([n for n, label in by_hash.items() if label != UNLABELLED], np.uint64)
    texts = np.sort(labelled[np.isin(labelled, frame.hashes)])
    known = texts.tolist()
    codes = np.array([design[number][0] for number in known], np.int64)
    sizes = dict(design.values())
    if missing := sorted(sizes.keys() - set(codes.tolist())):
        fix = f"no row of stratum {missing[0]} ({sizes[missing[0]]:,} texts) has a label that can "
        fix += f"be used; label its rows ({STRATUM} = {missing[0]})"
        raise SpecError([Problem("--gold", fix, source)])
    positive = audited.labels.index(audited.positive)
    is_positive = np.array([by_hash[number] == positive for number in known], np.bool_)

    def estimates(documents: _Documents) -> dict[str, Estimate]:
        sample = Labelled(codes, *documents.counts(texts), is_positive, sizes)
        return estimate(sample, options.half_width)

    documents = frame.documents.those_of(texts)
    return AuditResult(
        **estimates(documents),
        groups={
            frame.groups[group]: estimates(documents.of_group(group))
            for group in np.unique(documents.groups).tolist()
            if len(frame.groups) > 1
        },
        labels=len(known),
        unlabelled=len(by_hash) - len(labelled),
        not_in_corpus=len(labelled) - len(known),
        texts=sum(sizes.values()),
        texts_now=len(frame.hashes),
        task=audited.task,
        positive=audited.positive,
        snapshot=audited.rule.contents.number,
        left_out=frame.left_out,
        half_width=options.half_width,
    )


def _audited(spec: JobSpec, options: AuditOptions) -> _Audited:
    """The filter with a clause for the score and the groups; SpecError if it is not clear which."""
    rule = SnapshotRule.of(spec)
    policy = rule.policy
    task, positive = _positive(rule, options.positive)
    by = options.by or next((clause.by for clause in policy.clauses if clause.by), None)
    by = f"{by}.label" if by in rule.contents.tasks else by
    quoted = positive.replace('"', '""')
    score = f'"{task}".p."{quoted}"'
    whole = replace(policy, clauses=(*policy.clauses, Clause(AUDIT, score, by, math.inf)))
    rule = replace(rule, policy=whole)
    rule.judge(whole)
    return _Audited(rule, task, positive)


def _positive(rule: SnapshotRule, written: str | None) -> tuple[str, str]:
    """The task and the label of documents that should be dropped."""
    # — with top_k, a label has no column of its probability
    tasks = {task.name: task.labels for task in rule.spec.tasks if task.top_k is None}
    pairs = {f"{task}.{label}": (task, label) for task in tasks for label in tasks[task]}
    if written is not None:
        if written not in pairs:
            fix = f"there is no column of its probability; write one of {', '.join(pairs)}"
            raise SpecError([Problem("--positive", fix, written)])
        return pairs[written]
    named = {f"{task}.{label}" for task, label in limited_probabilities(rule.policy)}
    if len(named & pairs.keys()) != 1:
        fix = "the rule does not say which label is to be dropped; write --positive TASK.LABEL: "
        raise SpecError([Problem("--positive", f"missing; {fix}{', '.join(pairs)}")])
    return pairs[(named & pairs.keys()).pop()]


def _frame(audited: _Audited, cache_dir: Path) -> _Frame:
    """All texts with an answer that no readout was fitted to, each with score and decision.

    About 60 bytes a document are held.
    """
    rule = audited.rule
    shards, _ = labelled_shards(rule.spec, rule.store, rule.contents, cache_dir)
    read = [shards[named.sid] for named in rule.contents.shards]
    check_columns_of(read, rule.spec.input.storage_options, rule.policy.inputs, place="filter")
    *clauses, own = rule.policy.clauses
    plain = replace(rule, policy=replace(rule.policy, clauses=tuple(clauses)))
    policy = plain.with_thresholds(shards)
    judge = rule.judge(replace(policy, clauses=(*policy.clauses, own)))
    # — a document without a group has an answer all the same
    asked = {audited.task, *plain.judge(plain.policy).columns} & rule.contents.tasks.keys()
    scored, numbers, first = judge.clauses[-1], dict[str, int](), 0
    parts: list[tuple[NDArray[np.generic], ...]] = []
    for batch, _ in rule.rows(shards):
        failed = failed_status(batch, sorted(asked))
        reasons = judge.reasons(batch, failed, "drop")
        hashes = batch.column(HASH).to_pylist()
        answered = np.array([not status for status in failed], np.bool_)
        columns = (
            np.array([_number(each) for each in hashes], np.uint64),
            np.arange(first, first + len(hashes)),
            scored.scores(batch),
            scored.codes(batch, numbers),
            np.array([bool(reason) for reason in reasons], np.bool_),
        )
        parts.append(tuple(column[answered] for column in columns))
        first += len(hashes)
    hashes, rows, scores, groups, dropped = map(np.concatenate, zip(*parts, strict=True))
    distinct, firsts = np.unique(hashes, return_index=True)
    usable = ~np.isin(distinct, np.array(sorted(_fitted(audited)), np.uint64))
    if not usable.any():
        fix = "no document has an answer that a readout was not fitted to; label more documents"
        raise SpecError([Problem("filter", fix)])
    firsts = firsts[usable]
    left_out = {"without an answer": first - len(rows), "a readout was fitted to": (~usable).sum()}
    return _Frame(
        hashes=distinct[usable],
        rows=rows[firsts],
        population=Population(scores[firsts], groups[firsts].astype(np.int64), dropped[firsts]),
        documents=_Documents(hashes, groups.astype(np.int64), dropped),
        groups=tuple(numbers),
        left_out={reason: int(count) for reason, count in left_out.items() if count},
    )


def _number(content_hash: str) -> int:
    return int(content_hash[:_HEX], 16)


def _fitted(audited: _Audited) -> set[int]:
    """The texts that the readouts of the filter's tasks were fitted to."""
    spec, columns = audited.rule.spec, audited.rule.judge(audited.rule.policy).columns
    fitted: set[int] = set()
    for task in spec.tasks:
        if task.name in columns and task.readout is not None:
            place = f"tasks.{task.name}.readout"
            options = options_for(task.readout, spec)
            data = read_fitted(task.readout, options, place=place, made_by="assay fit")
            fitted.update(_number(each) for each in parse_readout(data).card.texts)
    return fitted


def _refuse_fitted(audited: _Audited, gold: Mapping[int, int], source: str) -> None:
    if both := _fitted(audited) & gold.keys():
        fix = f"a readout of the filter was fitted to {len(both):,} of its {len(gold):,} texts, so "
        fix += "they are no evidence; draw other documents: --sample"
        raise SpecError([Problem("--gold", fix, source)])


def _file(
    audited: _Audited, frame: _Frame, chosen: NDArray[np.int64], codes: NDArray[np.int64]
) -> pa.Table:
    """The rows of the file, in the order of `chosen`."""
    rule = audited.rule
    order = np.argsort(frame.rows[chosen])
    rising = frame.rows[chosen][order]
    batches, first = [], 0
    for batch in rule.answers():
        inside = rising[(rising >= first) & (rising < first + batch.num_rows)] - first
        batches.append(batch.select(["doc_id", "path", "row", HASH]).take(pa.array(inside)))
        first += batch.num_rows
    rows = pa.Table.from_batches(batches).combine_chunks()
    [batch] = rows.to_batches()
    options = rule.spec.input.storage_options
    shown = excerpts(rule.store, rule.contents, batch, options, chars=TEXT_CHARS)
    texts = pa.array([each.text for each in shown], pa.large_string())
    back = pa.array(np.argsort(order))  # from the order of the snapshot to that of `chosen`
    sizes = np.bincount(codes)
    return pa.table(
        {
            "doc_id": rows["doc_id"].take(back),
            TEXT_COLUMN: texts.take(back),
            audited.task: pa.nulls(len(chosen), pa.string()),
            HASH: rows[HASH].take(back),
            STRATUM: codes[chosen],
            STRATUM_TEXTS: sizes[codes[chosen]],
        }
    )


def _design(source: str, spec: JobSpec) -> dict[int, tuple[int, int]]:
    """The stratum of each text of a sample, and the texts of the stratum."""
    format = gold_format(source)
    fix = "is no sample of `assay audit --sample`: it has no column {}; draw one and label it"
    if format is None:
        raise SpecError([Problem("--gold", fix.format(STRATUM), source)])
    rows = read_gold_rows(source, format, spec.input.storage_options)
    for name in (HASH, STRATUM, STRATUM_TEXTS):
        if name not in rows.columns:
            raise SpecError([Problem("--gold", fix.format(name), source)])
    design: dict[int, tuple[int, int]] = {}
    columns = (rows.columns[name] for name in (HASH, STRATUM, STRATUM_TEXTS))
    for number, values in enumerate(zip(*columns, strict=True)):
        try:
            content_hash, stratum, texts = values
            design[_number(str(content_hash))] = int(str(stratum)), int(str(texts))
        except ValueError as error:
            what = f"a value of {HASH}, {STRATUM} or {STRATUM_TEXTS} was changed; restore it"
            raise SpecError([Problem(rows.place(number), what, list(values))]) from error
    if len(set(design.values())) > len(dict(design.values())):
        what = f"a stratum has two values of {STRATUM_TEXTS}; restore them"
        raise SpecError([Problem("--gold", what, source)])
    return design
