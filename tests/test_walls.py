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

# Of one process: modules, or public names, in the order of their import, with what is never loaded
# by then. `lint-imports` holds the same of `pipeline.inference`.
PROCESSES = [
    [
        ("pipeline.cli", {"torch", "transformers", "ray", "pyarrow", "duckdb"}),
        ("pipeline.spec.parse", {"torch", "transformers", "ray", "pyarrow"}),
        ("pipeline:load_spec", {"torch", "transformers", "ray", "pyarrow"}),
        ("pipeline.report.review", {"torch", "transformers", "ray", "sklearn"}),
        ("pipeline.verbs.review", {"torch", "transformers", "ray", "sklearn"}),
        ("pipeline.verbs.status", {"torch", "transformers", "ray"}),
        ("pipeline.report.init", {"torch", "transformers", "ray"}),
        ("pipeline:open_labels", {"torch", "ray"}),
        ("pipeline:Labeller", {"torch", "ray"}),
        ("pipeline.runtime.readers", {"ray"}),
    ],
    [("pipeline.runtime.run", {"torch", "transformers", "ray.data", "pandas"})],
]
PROBE = """
import importlib, json, sys
for word in sys.argv[1:]:
    module, _, name = word.partition(":")
    getattr(importlib.import_module(module), name or "__name__")
    print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("modules", PROCESSES, ids=lambda modules: modules[-1][0])
def test_a_process_loads_only_what_its_side_needs(modules: list[tuple[str, set[str]]]) -> None:
    command = [sys.executable, "-c", PROBE, *(module for module, _ in modules)]
    lines = subprocess.check_output(command, text=True, cwd=REPOSITORY).splitlines()
    for (module, never), line in zip(modules, lines, strict=True):
        loaded = set(json.loads(line))
        assert module.partition(":")[0] in loaded
        assert never & loaded == set(), module


def test_two_modules_use_rays_private_names() -> None:
    private = re.compile(r"\bray\._\w|\bfrom ray(\.\w+)*\._|_raylet")
    users = [path for path in FILES if private.search(path.read_text(encoding="utf-8"))]
    library = REPOSITORY / "pipeline"
    assert {path for path in users if library in path.parents} == {
        library / "runtime" / "session.py",
        library / "runtime" / "ray_token.py",
    }


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
