"""A stratified random sample of a filter's corpus for people to label. Entry point: `draw_sample`.

The unit is a text: equal texts are drawn once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError, option_error
from pipeline.evaluation.survey import Population, allocate, strata
from pipeline.filters.excerpts import excerpts
from pipeline.filters.ideal_answers import drop_probabilities
from pipeline.filters.layout import refuse_own_places
from pipeline.gold.sample_design import HASH, SAMPLE, SampleDesign, keep_design
from pipeline.ledger.columns import probabilities
from pipeline.ledger.rows import TEXT_COLUMN
from pipeline.options import AuditOptions
from pipeline.runtime.fitted_files import options_for
from pipeline.spec.schema import JobSpec
from pipeline.stores.named_files import new_file
from pipeline.verbs.audited_rule import AuditedRule, Numbers, fitted_hashes
from pipeline.verbs.export import WRITERS, format_and_kind

TEXTS = 400
TEXT_CHARS = 20_000  # of each text in the file


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """A sample that was written for people to label."""

    path: str
    tasks: Mapping[str, tuple[str, ...]]  # the columns to fill in, and what to write there
    multi: tuple[str, ...]  # those of them in which several labels may be written, or none
    reasons: tuple[str, ...]  # of the rule, to drop a document; each is estimated
    positive: str | None  # the task and label of documents that should be dropped, if it was named
    by: tuple[str, ...]  # the groups that were asked for
    texts: int
    drawn: int
    strata: int
    left_out: Mapping[str, int]  # texts of the corpus that cannot be drawn, by reason
    snapshot: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """The texts of a snapshot that can be drawn, in the order of their hashes."""

    rows: Numbers  # [texts]: the first row of the snapshot with the text
    population: Population  # by that row
    left_out: Mapping[str, int]


def draw_sample(spec: JobSpec, options: AuditOptions, *, cache_dir: Path) -> DrawnSample:
    """Writes a stratified random sample of the corpus at `options.to`, with columns for labels.

    The file shows nothing that depends on scores or decisions, so that they do not influence
    people. The output keeps the design of the sample. The same options on the same snapshot give
    the same sample.

    Raises:
        SpecError: The file exists, an option is wrong, or the sample has no room for two documents
            in each stratum.
    """
    to = options.to or ""
    format, is_folder = format_and_kind(to, None)
    if is_folder:
        raise option_error("to", "is a folder; name a file", to)
    refuse_own_places(spec, to)
    target = new_file(to, options_for(to, spec), overwrite=options.overwrite)
    drawn = _draw(spec, options, cache_dir)
    audited, sheet = drawn.audited, drawn.sheet
    with target.replaced() as path, WRITERS[format](path, sheet.schema) as write:
        write(sheet)
    return DrawnSample(
        path=target.url,
        tasks=audited.tasks,
        multi=tuple(t for t in audited.tasks if audited.spec_tasks[t].kind == "multi"),
        reasons=tuple(reason.words for reason in audited.reasons if reason.tasks),
        positive=audited.positive,
        by=options.by,
        texts=len(drawn.frame.rows),
        drawn=len(sheet),
        strata=drawn.strata,
        left_out=drawn.frame.left_out,
        snapshot=audited.rule.contents.number,
    )


def sample_sheet(spec: JobSpec, options: AuditOptions, *, cache_dir: Path) -> pa.Table:
    """The rows of the file that `draw_sample` would write, in its order.

    The output keeps the sample's design.
    """
    return _draw(spec, options, cache_dir).sheet


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A sample whose design the output has."""

    audited: AuditedRule
    frame: _Frame
    sheet: pa.Table  # a row for each text, in random order
    strata: int


def _draw(spec: JobSpec, options: AuditOptions, cache_dir: Path) -> _Drawn:
    audited = AuditedRule.of(spec, options)
    frame = _frame(audited.with_thresholds(cache_dir))
    texts = len(frame.rows)
    size = min(TEXTS if options.documents is None else options.documents, texts)
    codes = strata(frame.population, size)
    drawn = allocate(frame.population, codes, size)
    if drawn.sum() > size:
        fix = f"has no room for two documents of each of {len(drawn)} strata; "
        raise option_error("documents", fix + f"write {drawn.sum()} or more", size)
    random = np.random.default_rng(options.seed)
    chosen = np.concatenate(
        [
            random.choice(np.flatnonzero(codes == code), size, replace=False)
            for code, size in enumerate(drawn.tolist())
        ]
    )
    chosen = random.permutation(chosen)  # — neighbours in the file are of any stratum
    sheet = _sheet(audited, frame.rows[chosen])
    by_text = zip(sheet[HASH].to_pylist(), codes[chosen].tolist(), strict=True)
    sizes = dict(enumerate(np.bincount(codes).tolist()))
    number = audited.rule.contents.number
    name = keep_design(audited.rule.store, SampleDesign(number, dict(by_text), sizes))
    sheet = sheet.append_column(SAMPLE, [[name] * len(sheet)])
    return _Drawn(audited, frame, sheet, len(drawn))


def _frame(audited: AuditedRule) -> _Frame:
    """All texts with an answer that no readout was fitted to, each with score and decision.

    About 60 bytes a document are held. A text's score is the estimated probability that it should
    be dropped: that one of the tasks has a label for which the rule drops it.
    """
    tasks = [audited.spec_tasks[name] for name in audited.tasks]
    numbers: dict[str, int] = {}
    parts: list[tuple[NDArray[np.generic], ...]] = []
    for documents in audited.documents(numbers):
        kept = np.ones(len(documents.rows))
        for task in tasks:
            p = probabilities(documents.rows.column(task.name), tuple(task.labels))
            kept *= 1 - drop_probabilities(p, audited.criteria, audited.rule.schema, task)
        parts.append(
            (documents.hashes, documents.positions, 1 - kept, documents.groups, documents.dropped)
        )
    hashes, positions, scores, groups, dropped = map(np.concatenate, zip(*parts, strict=True))
    distinct, firsts = np.unique(hashes, return_index=True)
    fitted = fitted_hashes(audited)
    usable = ~np.isin(distinct, fitted)
    if not usable.any():
        fix = "no document has an answer that a readout was not fitted to; label more documents"
        raise SpecError([Problem("filter", fix)])
    firsts = firsts[usable]
    return _Frame(
        rows=positions[firsts],
        population=Population(scores[firsts], groups[firsts], dropped[firsts]),
        left_out=audited.left_out(hashes, fitted),
    )


def _sheet(audited: AuditedRule, chosen: Numbers) -> pa.Table:
    """The file's columns for these rows of the snapshot, in their order."""
    rule = audited.rule
    order = np.argsort(chosen)
    rising = chosen[order]
    batches, first = [], 0
    for batch in rule.answers():
        inside = rising[(rising >= first) & (rising < first + batch.num_rows)] - first
        batches.append(batch.select(["doc_id", "path", "row", HASH]).take(pa.array(inside)))
        first += batch.num_rows
    rows = pa.Table.from_batches(batches).combine_chunks()
    [batch] = rows.to_batches()
    options = rule.spec.input.storage_options
    shown = excerpts(rule.store, rule.contents, batch, options, chars=TEXT_CHARS)
    texts = pa.array([excerpt.text for excerpt in shown], pa.large_string())
    back = pa.array(np.argsort(order))  # from the order of the snapshot to that of `chosen`
    return pa.table(
        {
            "doc_id": rows["doc_id"].take(back),
            TEXT_COLUMN: texts.take(back),
            **{task: pa.nulls(len(chosen), pa.string()) for task in audited.tasks},
            HASH: rows[HASH].take(back),
        }
    )
