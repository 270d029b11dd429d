"""The verbs of the command `assay` that use and maintain an output, one function each.

Entry point: `app`, with the verbs of `verbs`, too.
"""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Group, Parameter

from pipeline.cli.app import VERBS
from pipeline.cli.verbs import FLATTEN, AsJson, SpecFile, app
from pipeline.options import (
    WHOLE,
    AuditOptions,
    ExportOptions,
    FilterOptions,
    GoldColumns,
    GoldOptions,
    ReportOptions,
    ShowOptions,
)

__all__ = ["app"]

USE = Group("Use and maintain an output", sort_key=3)


@app.command(group=USE, sort_key=1)
def show(
    spec: SpecFile,
    /,
    *,
    options: Annotated[ShowOptions, FLATTEN] = ShowOptions(),
    as_json: AsJson = False,
) -> int:
    """Show example rows: the id, the start of the text, and each task's label.

    The rows come from the last snapshot. The same snapshot always gives the same rows.
    """
    return VERBS["show"].carry_out(spec, options, as_json=as_json)


@app.command(group=USE, sort_key=2)
def export(
    spec: SpecFile, /, *, options: Annotated[ExportOptions, FLATTEN], as_json: AsJson = False
) -> int:
    """Write the labels as a flat table, one row a document: Parquet, JSON lines or CSV.

    The labels come from the last snapshot. For a folder, the same command again writes the missing
    files. Exit code 3 means that the snapshot leaves out documents of the input.
    """
    return VERBS["export"].carry_out(spec, options, as_json=as_json)


@app.command(name="filter", group=USE, sort_key=3)
def filter_corpus(
    spec: SpecFile,
    /,
    *,
    options: Annotated[FilterOptions, FLATTEN] = FilterOptions(),
    as_json: AsJson = False,
) -> int:
    """Write the documents that the spec's rule keeps, and the dropped ones with the reason.

    The answers come from the last snapshot. The same command again writes nothing. Exit code 3
    means that the snapshot leaves out documents of the input.
    """
    if not options.dry_run:
        options.folder()  # — an error before the spec is read
    verb = "filter dry run" if options.dry_run else "filter"
    return VERBS[verb].carry_out(spec, options, as_json=as_json)


@app.command(group=USE, sort_key=4)
def audit(
    spec: SpecFile,
    /,
    *,
    options: Annotated[AuditOptions, FLATTEN] = AuditOptions(),
    gold_options: Annotated[GoldColumns, FLATTEN] = GoldColumns(),
    as_json: AsJson = False,
) -> int:
    """Estimate how good a filter is on its corpus, from a random sample that people label.

    With --to, write the sample. With --gold, read it, and estimate precision, recall and
    prevalence with 95 % intervals, also for each reason of the rule and by group.
    """
    if options.draws():
        return VERBS["audit sample"].carry_out(spec, options, as_json=as_json)
    return VERBS["audit"].carry_out(spec, options, gold_options, as_json=as_json)


@app.command(group=USE, sort_key=5)
def report(
    spec: SpecFile,
    /,
    *,
    gold: Annotated[str | None, Parameter(metavar="PATH")] = None,
    gold_options: Annotated[GoldOptions, FLATTEN] = GoldOptions(),
    options: Annotated[ReportOptions, FLATTEN] = ReportOptions(),
    as_json: AsJson = False,
) -> int:
    """Write one page: what was labelled, how good it is, and what the filter does.

    The page fetches nothing and needs no server. --json has every number of it.

    Parameters
    ----------
    gold
        Gold labels: a file, or another run's output. Without them, the page has no figures of
        quality.
    """
    from pipeline.report.corpus_page import page_target, write_report
    from pipeline.spec.parse import load_spec

    # — an error before the work
    target = page_target(options.to, load_spec(spec).storage_options, flag="--to")
    result = VERBS["report"].result(spec, gold, gold_options, options)
    write_report(result, target, spec_file=spec)
    print(f"assay: wrote the page {target.url}", file=sys.stderr)
    return VERBS["report"].print(result, as_json=as_json)


@app.command(group=USE, sort_key=6)
def diff(
    spec: SpecFile,
    before: Annotated[str, Parameter("A", help="Number of the earlier snapshot.")],
    after: Annotated[str, Parameter("B", help="Number of the later snapshot.")],
    /,
    *,
    as_json: AsJson = False,
) -> int:
    """Show what changed between two snapshots: label shares, flipped answers, failures."""
    from pipeline.integrity.diff import compare, sides
    from pipeline.spec.parse import load_spec
    from pipeline.stores.store import open_store

    job = load_spec(spec)
    store = open_store(job.output, job.storage_options)
    comparison = compare(store, *sides(store, before, after))
    return VERBS["diff"].print(comparison, as_json=as_json)


@app.command(group=USE, sort_key=7)
def verify(spec: SpecFile, /, *, as_json: AsJson = False) -> int:
    """Read a finished output again, and prove that it is complete and undamaged."""
    return VERBS["verify"].carry_out(spec, as_json=as_json)


@app.command(group=USE, sort_key=8)
def gc(
    spec: SpecFile,
    /,
    *,
    keep: Annotated[int, WHOLE],
    older_than: Annotated[float, Parameter(metavar="DAYS")] = 7.0,
    delete: bool = False,
    as_json: AsJson = False,
) -> int:
    """List or delete the objects of an output that no kept snapshot needs.

    Parameters
    ----------
    keep
        Number of snapshots of each spec to keep.
    older_than
        Keep everything that is younger, such as the work of another spec without a snapshot.
    delete
        Delete the listed objects. This is refused while a run writes to the output.
    """
    days = {"older_than_days": older_than}
    return VERBS["gc"].carry_out(spec, as_json=as_json, keep=keep, delete=delete, **days)
