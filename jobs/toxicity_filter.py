"""From a corpus to a filtered corpus: label it, then write what the spec's rule keeps.

    python -m jobs.toxicity_filter jobs/specs/toxicity_filter.yaml --to out/clean

The arguments are those of `assay filter`. After a crash, or when the corpus has grown, run it
again: only what is missing is computed.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

from pipeline.cli.app import call, new_app
from pipeline.cli.outputs import filter_corpus
from pipeline.cli.verbs import FLATTEN, AsJson, SpecFile, run
from pipeline.options import FilterOptions

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

    The first step that does not end with 0 ends the job, with its exit code.
    """
    if not options.dry_run:
        options.folder()  # — an error before the corpus is labelled
    return run(spec) or filter_corpus(spec, options=options, as_json=as_json)


main = partial(call, app)

if __name__ == "__main__":
    sys.exit(main())
