"""The verbs of the command `assay` that use and maintain an output, one function each."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from functools import partial

from cyclopts import Group

from pipeline.cache import cache_dir
from pipeline.cli.app import Exit, print_result, say, shown_by, spec_in
from pipeline.cli.parameters import AsJson, SpecFile, words_of
from pipeline.cli.verbs import verb
from pipeline.options import ExportOptions, FilterOptions, ReportOptions

USE = Group("Use and maintain an output", sort_key=3)


@verb(USE, 1)
def export(
    spec_file: SpecFile, /, *, options: ExportOptions = ExportOptions(), as_json: AsJson = False
) -> int:
    """Write the labels as a flat table, one row a document: Parquet, JSON lines or CSV.

    With --head N, print N example rows: id, start of the text, and the label of each task. The
    same snapshot always gives the same rows. With --why, also print what the model would say. The
    labels come from the last snapshot. For a folder, the same command again writes the missing
    files. Exit code 3 means that the snapshot leaves out documents of the input.
    """
    is_written = options.writes()  # — an error before the spec is read
    from pipeline.report.progress import phase_lines
    from pipeline.report.rows import show_examples, show_exported
    from pipeline.runtime.progress import ignore
    from pipeline.verbs.export import head
    from pipeline.verbs.hub_dataset import write_export

    with spec_in(spec_file) as spec:
        if not is_written:
            with shown_by(phase_lines) if options.why else nullcontext(ignore) as announce:
                rows = head(spec, options, cache_dir=cache_dir(), announce=announce)
            return print_result(rows, show_examples, as_json=as_json)
        command = shlex.join(["assay", "export", spec_file, *words_of(options)])
        exported = write_export(spec, options, cache_dir=cache_dir(), command=command)
    code = Exit.COMPLETE if exported.complete else Exit.INCOMPLETE
    return print_result(exported, show_exported, as_json=as_json, code=code)


@verb(USE, 2, "filter")
def filter_corpus(
    spec_file: SpecFile, /, *, options: FilterOptions = FilterOptions(), as_json: AsJson = False
) -> int:
    """Write the documents that the spec's rule keeps, and the dropped ones with the reason.

    The answers come from the last snapshot. The same command again writes nothing. Exit code 3
    means that the snapshot leaves out documents of the input.
    """
    if not options.dry_run:
        options.folder()  # — an error before the spec is read
    from pipeline.filters.run import preview
    from pipeline.report.filters import show_filter
    from pipeline.verbs.hub_dataset import write_filter

    with spec_in(spec_file) as spec:
        command = shlex.join(["assay", "filter", spec_file, *words_of(options)])
        work = preview if options.dry_run else partial(write_filter, command=command)
        result = work(spec, options, cache_dir=cache_dir())
    code = Exit.COMPLETE if result.complete else Exit.INCOMPLETE
    code = Exit.FAILED if result.stops else code
    return print_result(result, show_filter, as_json=as_json, code=code)


@verb(USE, 3)
def report(
    spec_file: SpecFile, /, *, options: ReportOptions = ReportOptions(), as_json: AsJson = False
) -> int:
    """Write one page: what was labelled, how good it is, and what the filter does.

    The page loads nothing from the network and needs no server. --json has all of its numbers.
    """
    from pipeline.report import corpus_page as pages
    from pipeline.runtime.fitted_files import options_for
    from pipeline.stores.named_files import new_file
    from pipeline.verbs.corpus_report import corpus_report

    with spec_in(spec_file) as spec:
        storage_options = options_for(options.to, spec)
        target = new_file(options.to, storage_options, overwrite=options.overwrite)
        report = corpus_report(spec, options, cache_dir=cache_dir())
        pages.write_report(report, target, spec_file=spec_file)
    say(f"assay: wrote the page {target.url}")
    return print_result(report, pages.show_corpus_report, as_json=as_json)


@verb(USE, 4)
def diff(
    spec_file: SpecFile,
    before: str | None = None,
    after: str | None = None,
    /,
    *,
    as_json: AsJson = False,
) -> int:
    """Show what changed between two snapshots: label shares, flipped answers, failures."""
    from pipeline.integrity.diff import compare, sides
    from pipeline.report.drift import show_comparison
    from pipeline.stores.store import open_store

    with spec_in(spec_file) as spec:
        store = open_store(spec.output, spec.storage_options)
        comparison = compare(store, *sides(store, spec.name, before, after))
    return print_result(comparison, show_comparison, as_json=as_json)


@verb(USE, 5)
def verify(spec_file: SpecFile, /, *, as_json: AsJson = False) -> int:
    """Read a finished output again, and prove that it is complete and undamaged."""
    from pipeline.integrity.verify import verify_output
    from pipeline.report.maintenance import show_verified

    with spec_in(spec_file) as spec:
        verified = verify_output(spec, cache_dir=cache_dir())
    code = Exit.COMPLETE if verified.intact else Exit.FAILED
    return print_result(verified, show_verified, as_json=as_json, code=code)


@verb(USE, 6)
def gc(
    spec_file: SpecFile,
    /,
    *,
    keep: int | None = None,
    older_than_days: float = 7.0,
    delete: bool = False,
    as_json: AsJson = False,
) -> int:
    """List or delete the objects of an output that no kept snapshot needs.

    Parameters
    ----------
    keep
        Number of snapshots of each spec to keep (default: all, and nothing can be deleted).
    older_than_days
        Keep everything that is younger than this number of days, such as the work of another spec
        without a snapshot.
    delete
        Delete the listed objects. This is refused while a run writes to the output.
    """
    from pipeline.integrity.gc import collect_garbage
    from pipeline.report.maintenance import show_gc

    with spec_in(spec_file) as spec:
        garbage = collect_garbage(spec, keep=keep, older_than_days=older_than_days, delete=delete)
    return print_result(garbage, show_gc, as_json=as_json)
