"""What a process loads, and what a file may be. `lint-imports` holds the order of the packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FILES = [
    path
    for folder in ("pipeline", "jobs", "benchmarks", "tests")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
MAX_LINES = 400
NO_CONCERN = {"utils", "util", "common", "helpers", "helper", "misc", "base", "core", "shared"}

PROBE = "import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"


@pytest.mark.parametrize(
    "module, never",
    [
        ("pipeline.cli", {"torch", "transformers", "ray", "pyarrow", "duckdb"}),
        ("pipeline.spec.parse", {"torch", "transformers", "ray", "pyarrow"}),
        ("pipeline.report.init", {"torch", "transformers", "ray"}),
        ("pipeline.runtime.run", {"torch", "transformers", "ray.data", "pandas"}),
        ("pipeline.inference.engine", {"ray", "pyarrow", "fsspec"}),
        ("pipeline.labeller", {"ray"}),
        ("pipeline.ledger.dataset", {"ray", "torch"}),
    ],
)
def test_a_process_loads_only_what_its_side_needs(module: str, never: set[str]) -> None:
    command = [sys.executable, "-c", PROBE.format(module=module)]
    loaded = set(json.loads(subprocess.check_output(command, text=True, cwd=REPOSITORY)))
    assert module in loaded
    assert never.isdisjoint(loaded)


def test_one_module_uses_rays_private_names() -> None:
    private = re.compile(r"\bray\._\w|\bfrom ray(\.\w+)*\._|_raylet")
    users = [path for path in FILES if private.search(path.read_text(encoding="utf-8"))]
    library = REPOSITORY / "pipeline"
    assert [path for path in users if library in path.parents] == [
        library / "runtime" / "connection.py"
    ]


def test_a_file_is_small() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert Path(__file__) in lines
    assert [path for path, count in lines.items() if count > MAX_LINES] == []


def test_a_file_is_named_for_its_concern() -> None:
    names = {path: path.relative_to(REPOSITORY).with_suffix("").parts for path in FILES}
    unnamed = [
        path
        for path, parts in names.items()
        if NO_CONCERN & {part.removeprefix("test_").strip("_") for part in parts}
    ]
    assert unnamed == []
