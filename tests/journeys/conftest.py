"""What all journeys start from: an empty folder with a small model, and a home."""

from __future__ import annotations

from pathlib import Path

import pytest
from person import Person

MODEL = "smollm2.gguf"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all journeys: the model is converted once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def person(tmp_path: Path, home: Path, smollm2_gguf: Path) -> Person:
    """Somebody in an empty folder with `smollm2.gguf`, who has never used Ray."""
    (tmp_path / MODEL).symlink_to(smollm2_gguf)
    return Person(tmp_path, home)


@pytest.fixture(autouse=True)
def no_token_is_left(home: Path) -> object:
    """No command writes a token of Ray into the home."""
    yield
    assert not (home / ".ray").exists()
