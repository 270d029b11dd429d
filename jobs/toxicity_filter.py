"""From a corpus to a filtered corpus: label it, then write what the spec's rule keeps.

    python -m jobs.toxicity_filter jobs/specs/toxicity_filter.yaml --to out/clean

Its words are those of `assay filter`. Run it again after a crash, or when the corpus has grown:
only what is missing is done.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipeline.arguments import Verb, parser
from pipeline.cli import main as assay

_UNCALLED: Mapping[str, Verb] = defaultdict(lambda: lambda _options: 0)  # words are only read here


def main(arguments: Sequence[str] | None = None) -> int:
    """The steps in their order; the first that does not end well ends the job, with its code."""
    filtering = ["filter", *(sys.argv[1:] if arguments is None else arguments)]
    # — before hours of labelling: a wrong word ends the job here, and the spec is what filter says
    spec = parser(_UNCALLED).parse_args(filtering).spec
    steps = (["run", spec], filtering)
    return next(filter(None, map(assay, steps)), 0)


if __name__ == "__main__":
    sys.exit(main())
