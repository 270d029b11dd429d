"""A labelled corpus for the tests of filters, with the `LANGUAGES` of the test's module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from filtered import labelled


@pytest.fixture(scope="module")
def labelled_corpus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    languages = getattr(request.module, "LANGUAGES", ("en", "en", "de", None))
    return labelled(tmp_path_factory.mktemp("corpus"), languages)


@pytest.fixture
def folder(labelled_corpus: Path) -> Iterator[Path]:
    """The module's corpus, which a test only reads. Other files beside it are removed."""
    before = set(labelled_corpus.iterdir())
    yield labelled_corpus
    for path in set(labelled_corpus.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A corpus that a test may change."""
    return labelled(tmp_path, ("en", "de"))
