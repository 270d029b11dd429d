"""The folder where downloaded and converted models and hashes of files are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where hashes and converted models are remembered: ASSAY_CACHE, or the user's cache folder."""
    fallback = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "assay"
    return Path(os.environ.get("ASSAY_CACHE", fallback)).expanduser()
