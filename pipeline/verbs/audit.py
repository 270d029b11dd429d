"""The quality of a filter on its corpus, by a random sample that people label drop or keep.

Entry points: `draw_sample` for a review, `judge_filter` for its labels. The unit is a text; each
document with the text counts. The decisions are those of the spec's filter now, so one sample
judges every rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError, option_error
from pipeline.evaluation.survey import (
    NO_ESTIMATE,
    Estimate,
    LabelledSample,
    Population,
    allocate,
    estimate,
    strata,
)
from pipeline.filters.decisions import Decisions, decided
from pipeline.filters.excerpts import excerpts
from pipeline.filters.older_answers import warn_of_older_answers
from pipeline.filters.result import kept_words
from pipeline.filters.rule import SnapshotRule
from pipeline.gold.audits import Audit
from pipeline.gold.files import gold_error
from pipeline.gold.fitted_texts import fitted_texts
from pipeline.gold.people import Drawn
from pipeline.hashes import canonical_json, sha256_hex
from pipeline.ledger.rows import INPUT
from pipeline.options import ReviewOptions
from pipeline.review.session import Document
from pipeline.sources.rule import named
from pipeline.spec.schema import JobSpec
from pipeline.verbs.review_documents import shown_text

Numbers = NDArray[np.int64]

TEXTS = 200
LABELLED = 0.9  # the least share of a sample that is evidence: what is left out may be different
HALF_WIDTH = 0.05  # of the intervals for which `more_labels` are counted
_NAME_DIGITS = 16


@dataclass(frozen=True, slots=True)
class FilterQuality:
    """Estimates of a filter's quality on its corpus, with 95 % intervals."""

    precision: Estimate  # of dropped documents, the share that should be dropped
    recall: Estimate  # of documents that should be dropped, the share that is
    prevalence: Estimate  # the share that should be dropped
    rule: str  # that is judged: what is true for the documents that it keeps
    labels: int  # texts of the sample with an answer, by which the shares are estimated
    drawn: int  # texts of the sample
    not_in_corpus: int  # texts with an answer of people that have no answer of the model now
    texts: int  # that the sample was drawn from
    sampled_rule: str
    sampled_snapshot: int

    @property
    def lacks(self) -> str | None:
        """Why there are no estimates; None if there are."""
        if self.prevalence.estimate is not None:
            return None
        if self.labels < LABELLED * self.drawn:
            return f"label the other {self.drawn - self.labels:,} documents of the sample"
        return "a part of the corpus has no label: draw a new sample"


def draw_sample(spec: JobSpec, options: ReviewOptions, *, cache_dir: Path) -> list[Document]:
    """A stratified random sample of the different texts of the last snapshot, in random order.

    A stratum is the texts with the same decision of the filter, of the same group and with answers
    of similar margin. Half of the sample is of dropped texts. Texts that answers were fitted to are
    left out. The same arguments on the same snapshot give the same sample.

    Raises:
        SpecError: There is no filter, no text to draw, or no room for two texts of each stratum.
        StorageError: The input changed since it was labelled, or there is no snapshot.
    """
    with _decided(spec, cache_dir, options.columns) as (rule, words, table):
        doc = INPUT if options.columns else "null"
        table.rows(
            f"""
            create table texts as
            select row_number() over (order by content_hash) - 1 as number, content_hash,
                bool_or(_dropped) as dropped, min(unsure) as unsure, min(_group) as grp,
                min({{'path': path, 'row': "row", 'id': doc_id, 'doc': {doc}}}) as place
            from answered where content_hash not in (from fitted) group by content_hash
            """
        )
        answered = table.table(
            "select unsure, dense_rank() over (order by grp) - 1 as part, dropped from texts "
            "order by number"
        )
        if not len(answered):
            fix = "no document has an answer that a readout was not fitted to; label more documents"
            raise SpecError([Problem("filter", fix)])
        population = Population(*(column.to_numpy() for column in answered.itercolumns()))
        codes, chosen = _chosen(
            population, min(options.documents or TEXTS, len(answered)), options.seed
        )
        numbers = chosen.tolist()
        shown = table.table(
            "select content_hash, place.path, place.row, place.id, place.doc from texts "
            "where number in (select unnest(?)) order by list_position(?, number)",
            [numbers, numbers],
        )
    hashes, *where, ids, docs = (column.to_pylist() for column in shown.itercolumns())
    read = excerpts(rule.labelled, zip(*where, repeat(0)), chars=None)
    columns = [{name: of[name] or "" for name in options.columns} for of in docs]
    drawn = _designs(hashes, codes, chosen, rule.labelled.contents.number, words)
    return [
        Document(text_hash, doc_id, shown_text(excerpt.text or ""), place, audit=design, columns=of)
        for place, (text_hash, doc_id, excerpt, design, of) in enumerate(
            zip(hashes, ids, read, drawn, columns, strict=True)
        )
    ]


def judge_filter(spec: JobSpec, audit: Audit, source: str, *, cache_dir: Path) -> FilterQuality:
    """Estimates precision, recall and prevalence of the spec's filter from the labels of an audit.

    There are no estimates if much of the sample or a whole stratum has no label.

    Raises:
        SpecError: There is no filter, or a readout that it reads was fitted to texts of the sample.
        StorageError: The input changed since it was labelled, or there is no snapshot.
    """
    with _decided(spec, cache_dir) as (_, words, table):
        table.add("audited", _hashes(audit.drops))
        [(fitted,)] = table.rows("select count(*) from audited where content_hash in (from fitted)")
        if fitted:
            fix = f"answers of the filter were fitted to {fitted:,} of its {len(audit.drops):,} "
            fix += "texts, so they do not show its quality; draw other documents: assay review "
            raise gold_error(source, f"{fix}--by audit")
        of_texts = table.rows(
            "select content_hash, count(*), count(*) filter (_dropped) from answered "
            "where content_hash in (from audited) group by content_hash order by content_hash"
        )
    drawn = [audit.drawn[text_hash] for text_hash, *_ in of_texts]
    sizes = {each.stratum: each.size for each in drawn}
    design = next(iter(audit.drawn.values()))
    estimates = dict.fromkeys(("precision", "recall", "prevalence"), NO_ESTIMATE)
    if len(of_texts) >= LABELLED * design.drawn and sum(sizes.values()) == design.texts:
        sample = LabelledSample(
            codes=np.array([each.stratum for each in drawn], np.int64),
            documents=np.array([documents for _, documents, _ in of_texts], np.int64),
            dropped=np.array([dropped for *_, dropped in of_texts], np.int64),
            positive=np.array([audit.drops[text_hash] for text_hash, *_ in of_texts], np.bool_),
            sizes=sizes,
        )
        estimates = estimate(sample, HALF_WIDTH)
    return FilterQuality(
        **estimates,
        rule=words,
        labels=len(of_texts),
        drawn=design.drawn,
        not_in_corpus=len(audit.drops) - len(of_texts),
        texts=design.texts,
        sampled_rule=design.rule,
        sampled_snapshot=design.snapshot,
    )


@contextmanager
def _decided(
    spec: JobSpec, cache_dir: Path, columns: Sequence[str] = ()
) -> Iterator[tuple[SnapshotRule, str, Decisions]]:
    """The filter's rule, also in words, and a view `answered` of its decisions.

    The view has the documents that have an answer to each task of the rule. `unsure` is half of 1
    minus the smallest margin of these answers. The table `fitted` has the texts that the answers
    were fitted to.
    """
    rule = SnapshotRule.of(spec, columns=columns)
    labelled, tasks = rule.labelled, rule.rule.tasks
    warn_of_older_answers(spec, labelled.store, labelled.contents, cache_dir)
    shards, _ = labelled.shards(cache_dir)
    margins = ", ".join(["null", *(named(task, "margin") for task in tasks)])
    with decided(rule.rule, labelled.batches(shards), "keep", rule.by) as table:
        table.rows(
            "create view answered as select *, "
            f"coalesce((1 - least({margins})) / 2, 'nan')::DOUBLE as unsure "
            "from documents where _failed is null"
        )
        parts = (part for task in spec.tasks if task.name in tasks for part in task.parts)
        table.add("fitted", _hashes({text for part in parts for text in fitted_texts(spec, part)}))
        yield rule, kept_words(rule.rule), table


def _hashes(texts: Iterable[str]) -> pa.Table:
    return pa.table({"content_hash": pa.array(texts, pa.string())})


def _chosen(population: Population, size: int, seed: int) -> tuple[Numbers, Numbers]:
    """The stratum of each text, and the numbers of the drawn texts in random order."""
    codes = strata(population, size)
    drawn = allocate(population, codes, size)
    if drawn.sum() > size:
        fix = f"has no room for two documents of each of {len(drawn)} strata; "
        raise option_error("documents", f"{fix}write {drawn.sum()} or more", size)
    random = np.random.default_rng(seed)
    chosen = [
        random.choice(np.flatnonzero(codes == code), of_stratum, replace=False)
        for code, of_stratum in enumerate(drawn.tolist())
    ]
    return codes, random.permutation(np.concatenate(chosen))


def _designs(
    hashes: Sequence[str], codes: Numbers, chosen: Numbers, snapshot: int, rule: str
) -> Iterator[Drawn]:
    """How each of the chosen texts was drawn, by the strata of all texts."""
    sizes, own = np.bincount(codes).tolist(), codes[chosen].tolist()
    counts = np.bincount(own, minlength=len(sizes)).tolist()
    content = [snapshot, rule, sizes, sorted(zip(hashes, own, strict=True))]
    sample = sha256_hex(canonical_json(content), _NAME_DIGITS)
    for code in own:
        yield Drawn(
            sample=sample,
            snapshot=snapshot,
            rule=rule,
            texts=len(codes),
            drawn=len(own),
            stratum=code,
            size=sizes[code],
            inclusion=counts[code] / sizes[code],
        )
