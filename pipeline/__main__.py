"""`python -m pipeline`: the command `assay`, where a cluster's job has the uploaded files."""

from __future__ import annotations

import sys
from importlib.metadata import version

try:
    version("corpus-assay")
    from pipeline.cli import main
except ModuleNotFoundError as missing:  # a package, or what is recorded about this one
    sys.exit(f"assay: {missing}; install assay with its dependencies on each node, as here")

if __name__ == "__main__":
    sys.exit(main())
