"""From a corpus to a filtered corpus: label it, then write what the spec's rule keeps.

    python -m jobs.toxicity_filter jobs/specs/toxicity_filter.yaml --to out/clean

The arguments are those of `assay filter`. With `--dry-run`, nothing is labelled or written. After a
crash, or when the corpus has grown, run it again: only what is missing is computed.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Annotated

from pipeline.cli.app import EXIT_COMPLETE, VERBS, call, new_app
from pipeline.cli.verbs import FLATTEN, AsJson, SpecFile
from pipeline.ledger.snapshots import last_snapshot
from pipeline.options import FilterOptions
from pipeline.spec.parse import load_spec
from pipeline.stores.store import open_store

app = new_app("jobs.toxicity_filter", "Label a corpus, then write a filtered copy of it.")


@app.default
def label_and_filter(
    spec: SpecFile,
    /,
    *,
    options: Annotated[FilterOptions, FLATTEN] = FilterOptions(),
    as_json: AsJson = False,
) -> int:
    """Label a corpus, then write a filtered copy of it.

    The first step that does not end with 0 ends the job, with its exit code. With --dry-run, print
    what would be labelled, and what the filter would drop of the last snapshot, if there is one.
    With --json, the value is {"run": ..., "filter": ...}; a step that did not happen is null.
    """
    if not options.dry_run:
        options.folder()  # — an error before the corpus is labelled
    names = ("dry run", "filter dry run") if options.dry_run else ("run", "filter")
    labelling, filtering = (VERBS[name] for name in names)
    labelled = labelling.result(spec)
    shown = {"run": labelling.json(labelled), "filter": None}
    code = labelling.exit_code(labelled)
    if not as_json:
        labelling.print(labelled, as_json=False)
    if code == EXIT_COMPLETE and (not options.dry_run or _has_snapshot(spec)):
        filtered = filtering.result(spec, options)
        shown["filter"] = filtering.json(filtered)
        code = filtering.exit_code(filtered)
        if not as_json:
            filtering.print(filtered, as_json=False)
    if as_json:
        print(json.dumps(shown))
    return code


def _has_snapshot(spec_file: str) -> bool:
    spec = load_spec(spec_file)
    return last_snapshot(open_store(spec.output, spec.storage_options), spec.name) is not None


main = partial(call, app)

if __name__ == "__main__":
    sys.exit(main())
