"""`assay check` looks at the output and the input first, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


def test_check_leaves_nothing_behind(
    write_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new" / "out"
    assert main(["check", str(write_spec(output=str(new))), "--documents", "0"]) == 0
    shown = capsys.readouterr().out
    assert "conditional create works" in shown
    assert "not tested: no answers were compared" in shown
    assert not new.parent.exists()
    own = tmp_path / "own"
    own.mkdir()
    assert main(["check", str(write_spec(output=str(own))), "--documents", "0"]) == 0
    assert list(own.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"output": "spec.yaml"}, "output: is a file; name a folder, or a new one (got "),
        ({"output": "spec.yaml/below"}, "output: {folder}/spec.yaml is a file; name a folder, or "),
        ({"input": {"path": "/nowhere"}}, "input.path: names no file"),
        ({"input": {"path": "corpus.jsonl", "text": "body"}}, "input.text: "),
        (
            {"input": {"path": "empty.jsonl"}},
            "input.path: the file has no row; name a file with rows",
        ),
    ],
)
def test_check_looks_at_the_output_and_the_input_before_the_model(
    changes: dict[str, Any],
    line: str,
    write_spec: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    monkeypatch.chdir(tmp_path)
    output = str(tmp_path / changes.get("output", "out"))
    spec = write_spec(**{**changes, "output": output, "model": {"path": "/nowhere.gguf"}})
    assert main(["check", str(spec)]) in (1, 2)
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(line.replace("{folder}", str(tmp_path)))


def test_check_says_that_the_output_is_a_file_without_importing_torch(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    spec = write_spec(output=str(tmp_path / "spec.yaml"))
    code = "import sys; from pipeline.cli import main; "
    code += f"code = main(['check', {str(spec)!r}]); print(code, 'torch' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == ["2", "False"]
