"""Names of files and columns may be hostile: none of them controls a terminal."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import TOY_ASSAY, start

from pipeline.cli import main
from pipeline.cli.app import _LogFormatter

SIGN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\u202e]")
RED, TITLE = "\x1b[31m\u202e", "\x1b]0;owned\x07"


def test_errors_show_the_controls_of_names_one_problem_a_line(
    write_spec: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / f"{RED}in"
    folder.mkdir()
    (folder / f"{TITLE}\nassay: forged.jsonl").write_text(json.dumps({f"a{RED}b\n{TITLE}": "x"}))
    spec = write_spec(input={"path": str(folder), "text": "text"})
    assert main(["run", str(spec)]) == 2
    shown = capsys.readouterr().err
    (line,) = shown.splitlines()
    assert line.startswith("input.text: ") and r"\x1b[31m\u202eb" in line
    assert r"\x1b]0;owned\x07 assay: forged.jsonl" in line
    assert SIGN.search(shown) is None
    spec = write_spec(**{f"{RED}x": 1, f"{TITLE}y": 2})
    assert main(["run", str(spec)]) == 2
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 2 and SIGN.search(shown) is None
    broken = [folder / f"{TITLE}{number}\nforged.parquet" for number in range(2)]
    for file in broken:
        file.write_bytes(b"PAR1")
    (folder / f"{TITLE}\nassay: forged.jsonl").unlink()
    assert main(["run", str(write_spec(input={"path": str(folder)}))]) == 1
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 2 and SIGN.search(shown) is None


def test_the_log_of_the_command_shows_the_controls_of_names(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / f"{RED}good.jsonl").write_text('{"id": "a", "text": "Hello."}\n')
    (folder / f"{TITLE}broken.parquet").write_bytes(b"PAR1")
    spec = write_spec(input={"path": str(folder), "id": "id"})
    environment = {**os.environ, "ASSAY_CACHE": str(tmp_path / "cache")}
    process = start(TOY_ASSAY, "run", str(spec), environment=environment)
    out, log = process.communicate(timeout=120)
    assert process.returncode == 3, log
    assert re.search(r"\d left out: .*/in/\\x1b\]0;owned\\x07broken\.parquet", log)
    assert SIGN.search(log + out) is None


def test_a_log_line_of_an_exception_keeps_its_lines() -> None:
    try:
        raise ValueError(f"{RED}two\nlines{TITLE}")
    except ValueError:
        record = logging.LogRecord("x", 20, "f", 1, "%s", (f"{RED}\nname",), sys.exc_info())
    shown = _LogFormatter("%(message)s").format(record)
    assert shown.startswith("\\x1b[31m\\u202e name\nTraceback")
    assert shown.endswith("lines\\x1b]0;owned\\x07") and SIGN.search(shown) is None
