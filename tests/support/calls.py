"""A call of `assay` in this process, and what it prints: the fixture `assay`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main

WriteSpec = Callable[..., Path]


@dataclass(frozen=True)
class Printed:
    """What a command printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        """The value that `--json` printed, which has neither NaN nor infinity."""
        return json.loads(self.out, parse_constant=pytest.fail)

    @property
    def words(self) -> str:
        """Standard output with one space between words."""
        return " ".join(self.out.split())

    @property
    def error(self) -> str:
        """The only line on standard error, without anything on standard output."""
        (line,) = self.err.splitlines()
        assert not self.out, self.out
        return line


Assay = Callable[..., Printed]


@pytest.fixture
def assay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Assay:
    """Runs the command with these words and a cache of its own; its exit code is `code`."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))

    def call(*words: object, code: int = 0) -> Printed:
        capsys.readouterr()
        returned = main([str(word) for word in words])
        printed = Printed(*capsys.readouterr())
        assert returned == code, printed
        return printed

    return call
