"""Benchmarks collect garbage before each measurement: here, only that of the test itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def only_new_objects_are_collected() -> Iterator[None]:
    """What was imported before the test takes most of a second in each collection."""
    gc.freeze()
    yield
    gc.unfreeze()
