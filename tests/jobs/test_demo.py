"""The demo from a checkout, with real weights: what it claims, and that it labels once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ("-m", "jobs.demo")
EVAL = ("-m", "pipeline", "eval", "jobs/specs/demo.yaml", "--gold", "jobs/corpus/gold.jsonl")


@pytest.mark.slow
def test_the_demo_keeps_its_promises(smollm2_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m-instruct.gguf").symlink_to(smollm2_gguf)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ASSAY_CACHE": str(tmp_path / "cache")}

    def python(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    first, second = python(*DEMO), python(*DEMO)
    assert re.search(r"labelled now +444;", first) and "warning: spam_asked" in first
    assert "of 444 documents have the label" not in first  # one label for all
    assert re.search(r"labelled now +0;", second)
    tail = first.index("The answers against gold")
    assert first[tail:] == second[second.index("The answers against gold") :]
    assert (tmp_path / "out" / "demo.html").stat().st_size > 100_000

    tasks = json.loads(python(*EVAL, "--json"))["tasks"]
    figures = {name: task["versions"]["raw"]["headlines"] for name, task in tasks.items()}
    assert figures["toxic"]["auroc"]["value"] >= 0.95
    assert figures["spam"]["auroc"]["value"] >= 0.97
    assert figures["language"]["accuracy"]["value"] >= 0.98
