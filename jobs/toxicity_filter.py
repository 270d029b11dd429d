"""From a corpus to a filtered corpus: label it, then write what the spec's rule keeps.

    python -m jobs.toxicity_filter jobs/specs/toxicity_filter.yaml --to out/clean

It is `assay run`, then `assay filter`, with the options of both. With `--dry-run`, nothing is
labelled or written. After a crash, or when the corpus has grown, run it again: only what is missing
is computed.
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from functools import partial

from pipeline.cli.app import Exit, call, new_app
from pipeline.cli.outputs import filter_corpus
from pipeline.cli.parameters import AsJson, SpecFile, with_flags
from pipeline.cli.verbs import run
from pipeline.ledger.snapshots import last_snapshot
from pipeline.options import FilterOptions, RunOptions
from pipeline.spec.parse import load_spec
from pipeline.stores.store import open_store

app = new_app("jobs.toxicity_filter", "Label a corpus, then write a filtered copy of it.")


@app.default
@with_flags
def label_and_filter(
    spec_file: SpecFile,
    /,
    *,
    labelling: RunOptions = RunOptions(),
    filtering: FilterOptions = FilterOptions(),
    as_json: AsJson = False,
) -> int:
    """Label a corpus, then write a filtered copy of it.

    The first step that does not end with 0 ends the job, with its exit code. With --dry-run, print
    what would be labelled, and what the filter would drop of the last snapshot, if there is one.
    With --json, the value is {"run": ..., "filter": ...}; a step that did not happen is null.
    """
    dry_run = filtering.dry_run
    if not dry_run:
        filtering.folder()  # — an error before the corpus is labelled
    shown = io.StringIO() if as_json else sys.stdout
    with redirect_stdout(shown):
        code = run(spec_file, dry_run=dry_run, options=labelling, as_json=as_json)
        if code == Exit.COMPLETE and (not dry_run or _has_snapshot(spec_file)):
            code = filter_corpus(spec_file, options=filtering, as_json=as_json)
    if isinstance(shown, io.StringIO):
        labelled, filtered, *_ = [*shown.getvalue().splitlines(), "null"]
        print(f'{{"run": {labelled}, "filter": {filtered}}}')
    return code


def _has_snapshot(spec_file: str) -> bool:
    spec = load_spec(spec_file)
    return last_snapshot(open_store(spec.output, spec.storage_options), spec.name) is not None


main = partial(call, app)

if __name__ == "__main__":
    sys.exit(main())
