"""What stops `make demo` is one line, before anything is made."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import check_machine


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        ("sys.version_info", (3, 10, 1), "is not supported; install Python 3.11, 3.12 or 3.13"),
        ("sys.version_info", (3, 14, 0), "is not supported; install Python 3.11, 3.12 or 3.13"),
        ("importlib.util.find_spec", lambda name: None, "no ensurepip; install it"),
        (
            "ensurepip.version",
            lambda: "9.0.1",
            "pip 9.0.1 is too old; install a Python with pip 22",
        ),
        ("shutil.disk_usage", lambda _: SimpleNamespace(free=3e8), "0.3 GB of free disk; 4 GB are"),
    ],
)
def test_one_line_says_what_is_missing(
    place: str,
    value: Any,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.version_info", (3, 11, 7))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1e12))
    assert check_machine.main() == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr(place, value)
    assert check_machine.main() == 1
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith("assay: ") and line in printed


def test_this_python_is_supported() -> None:
    first, above = check_machine.VERSIONS
    assert first <= sys.version_info[:2] < above
