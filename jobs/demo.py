"""The demo: label a mixed corpus, judge the answers by gold labels of people, filter the corpus.

    python -m jobs.demo

It runs the commands `assay run`, `assay eval` and `assay filter`, and prints their main results on
one screen. A second call labels nothing and prints the same results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import duckdb

from pipeline import cache
from pipeline.cli.app import call, new_app
from pipeline.cli.verbs import run
from pipeline.filters.result import FilterResult
from pipeline.filters.run import filter_corpus
from pipeline.ledger.dataset import open_labels
from pipeline.options import EvalOptions, FilterOptions, ReportOptions
from pipeline.report.console import (
    Grid,
    Part,
    console_on,
    interval,
    print_parts,
    truncate,
    warnings,
)
from pipeline.report.corpus_page import write_report
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.named_files import new_file
from pipeline.verbs.corpus_report import report_of
from pipeline.verbs.doubts import evaluation_doubts
from pipeline.verbs.evaluate import Evaluation, evaluate

SPEC = "jobs/specs/demo.yaml"
CORPUS = "jobs/corpus"
PAGE = "out/demo.html"
FILTERED = "out/demo_filtered"
# The same question twice: by a trained readout, and asked without training.
UNTRAINED, TRAINED = "spam_asked", "spam"

app = new_app("jobs.demo", "Label, judge and filter the demo corpus.")


@app.default
def demo() -> int:
    """Label, judge and filter the demo corpus."""
    if code := run(SPEC):
        return code
    spec, cache_dir = load_spec(SPEC), cache.cache_dir()
    evaluation = evaluate(spec, EvalOptions(), cache_dir=cache_dir)
    report = report_of(spec, evaluation, ReportOptions(), cache_dir=cache_dir)
    page = new_file(PAGE, {}, overwrite=True)
    write_report(report, page, spec_file=SPEC)
    filtered = filter_corpus(spec, FilterOptions(to=FILTERED), cache_dir=cache_dir)
    print_parts(show(spec, evaluation, filtered), console_on(sys.stdout))
    return 0


def show(spec: JobSpec, evaluation: Evaluation, filtered: FilterResult) -> Iterator[Part]:
    """The quality of the answers, what the filter did, examples, and where the files are."""
    title = "The answers against gold labels by people, which no readout was trained on "
    title += "(95 % intervals)"
    names = ("task", "method", "accuracy", "AUROC", "gold")
    yield from ("", Grid(title, names, list(_quality(spec, evaluation)), texts=2))
    for task in evaluation.tasks.values():
        yield from warnings(evaluation_doubts(task))
    kept = filtered.documents - filtered.dropped
    assert spec.filter is not None and filtered.written is not None
    yield from (
        "",
        f"The filter keeps {kept:,} of {filtered.documents:,} documents: {spec.filter.keep}",
    )
    right, judged, bad = _filter_quality(spec)
    yield (
        f"precision: of {judged:,} dropped documents with gold labels, {right / judged:.1%} are "
        "toxic, spam or not English"
    )
    yield (
        f"recall: of {bad:,} documents that are toxic, spam or not English, {right / bad:.1%} are "
        "dropped"
    )
    title = "Three documents: spam, not English, and one that the filter keeps"
    names = ("document", "text", "p(toxic)", "p(spam)", "language")
    yield from ("", Grid(title, names, _examples(spec), texts=2), "")
    assay = os.path.relpath(Path(sys.executable).with_name("assay"))
    yield {
        "page": PAGE,
        "labels": f"{spec.output}; more rows: {assay} export {SPEC} --head 20",
        "kept documents": filtered.written.kept.folder,
        "your documents": f"{assay} init DATA --to my.yaml, then read docs/quickstart.md",
    }


def _quality(spec: JobSpec, evaluation: Evaluation) -> Iterable[tuple[str, ...]]:
    readouts = {task.name for task in spec.tasks if task.readout}
    for task in evaluation.tasks.values():
        assert task.scores is not None, task.task
        figures = (task.scores.headlines["accuracy"], task.auroc)
        yield (
            task.task,
            "trained readout" if task.task in readouts else "asked, without training",
            *map(interval, figures),
            f"{task.scores.rows:,}",
        )


def _filter_quality(spec: JobSpec) -> tuple[int, int, int]:
    """Documents: dropped and bad by gold; dropped, with gold; bad by gold."""
    assert spec.filter is not None
    labels = open_labels(spec.output)  # noqa: F841 - DuckDB reads it by its name
    counts = duckdb.execute(
        f"""
        with answers as (select doc_id, not ({spec.filter.keep}) as dropped from labels),
        gold as (
            select id, coalesce(toxic = 'toxic', false) or coalesce(spam = 'spam', false)
                or coalesce(language != 'English', false) as bad
            from read_json('{CORPUS}/gold.jsonl')
        )
        select count(*) filter (dropped and bad), count(*) filter (dropped), count(*) filter (bad)
        from gold join answers on doc_id = id
        """
    ).fetchone()
    assert counts is not None
    right, dropped, bad = counts
    return right, dropped, bad


def _examples(spec: JobSpec) -> list[tuple[str, ...]]:
    """A mail that is spam, a text that is not English, and a document that is kept."""
    assert spec.filter is not None
    labels = open_labels(spec.output)  # noqa: F841
    choices = ("spam.p.spam > 0.9", "language.label = 'Spanish'", spec.filter.keep)
    rows: list[tuple[str, ...]] = []
    for choice in choices:
        row = duckdb.execute(
            f"""
            with texts as (
                select id, text from read_json('{CORPUS}/parts/*.jsonl.zst')
                union all select id, text from read_parquet('{CORPUS}/parts/*.parquet')
            )
            select doc_id, text, toxic.p.toxic, spam.p.spam, language.label
            from labels join texts on doc_id = id where {choice} and toxic.p.toxic < 0.1
            order by doc_id limit 1
            """
        ).fetchone()
        assert row is not None, choice
        name, text, toxic, spam, language = row
        rows.append((name, truncate(text, 60), f"{toxic:.3f}", f"{spam:.3f}", language))
    return rows


main = partial(call, app)

if __name__ == "__main__":
    sys.exit(main())
