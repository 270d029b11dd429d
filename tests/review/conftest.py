"""The pool of documents and the gold file of a review."""

from __future__ import annotations

from pathlib import Path

import pytest
from reviews import Corpus, task_of


@pytest.fixture
def corpus() -> Corpus:
    return Corpus(task_of())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gold.jsonl"
