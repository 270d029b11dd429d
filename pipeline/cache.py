"""The cache folder: downloaded and converted models, and hashes of files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`ASSAY_CACHE`, or `assay` below the user's cache folder. An empty variable is not set."""
    if named := os.environ.get("ASSAY_CACHE"):
        # — absolute, because a worker of a cluster has another working folder
        return Path(os.path.abspath(os.path.expanduser(named)))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"
