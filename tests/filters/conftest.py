"""A labelled corpus for the tests of filters."""

from __future__ import annotations

from pathlib import Path

import pytest
from filtered import labelled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return labelled(tmp_path)
