"""Imports go down only: every module, as found on disk, stays behind its wall."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ["pipeline", "jobs"]

MODEL_SIDE = {"torch", "transformers"}
DATA_SIDE = {"ray", "pyarrow", "fsspec"}
NEVER: dict[str, set[str]] = {
    # These build a model in their own process, and what shows their results imports them.
    "pipeline.data.actor": set(),
    "pipeline.check": set(),
    "pipeline.exactness": set(),
    "pipeline.bench": set(),
    "pipeline.planning": set(),
    # This one puts data and figures together.
    "pipeline.evaluating": MODEL_SIDE | {"ray"},
    "pipeline.labeller": {"ray"},
    "pipeline.ray_datasets": MODEL_SIDE,
    "pipeline.samples": set(),
    "pipeline.gold_states": set(),
    "pipeline.fit": set(),
    "pipeline.report.fit_table": set(),
    "pipeline.stopwatch": set(),
    "pipeline.calibrating": MODEL_SIDE | {"ray"},
    "pipeline.report.findings": set(),
    "pipeline.report.bench_table": set(),
    "pipeline.relabelling": MODEL_SIDE,
    "pipeline.data": MODEL_SIDE,
    "pipeline.report": MODEL_SIDE,
    "pipeline.inference": DATA_SIDE,
    # scikit-learn imports pyarrow where it is installed.
    "pipeline.evaluation.calibration_fitting": MODEL_SIDE | {"ray", "fsspec"},
    "pipeline.evaluation": MODEL_SIDE | DATA_SIDE,
    "pipeline.cli": MODEL_SIDE | {"ray"},
    "pipeline": MODEL_SIDE | {"ray", "pyarrow"},  # errors, spec, prompts, and any other
    "jobs": MODEL_SIDE | {"ray"},
}

FILES = sorted(
    path for package in [*PACKAGES, "tests"] for path in (REPOSITORY / package).rglob("*.py")
)
DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc", "base", "core", "shared"}

# Imports modules one by one and says which of the walled packages each was the first to load.
PROBE = f"""
import importlib, json, sys
walled, loaded = {sorted(MODEL_SIDE | DATA_SIDE)}, {{}}
for module in sys.argv[1:]:
    before = set(sys.modules)
    importlib.import_module(module)
    loaded[module] = [name for name in walled if name in sys.modules and name not in before]
print(json.dumps(loaded))
"""


def module_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_of(path) for path in FILES if path.parts[len(REPOSITORY.parts)] in PACKAGES]


def never(module: str) -> frozenset[str]:
    """What a module may not load: the entry of its nearest package in the table."""
    names = module.split(".")
    nearest = (".".join(names[:end]) for end in range(len(names), 0, -1))
    return frozenset(next(NEVER[name] for name in nearest if name in NEVER))


WALLED = [module for module in MODULES if never(module)]


def probe(modules: Sequence[str]) -> dict[str, list[str]]:
    command = [sys.executable, "-c", PROBE, *modules]
    output = subprocess.check_output(command, text=True, cwd=REPOSITORY)
    loaded: dict[str, list[str]] = json.loads(output)
    return loaded


@cache
def loaded_behind(wall: frozenset[str]) -> dict[str, list[str]]:
    """What the modules behind one wall load, all in one process: importing torch takes seconds."""
    return probe([module for module in WALLED if never(module) == wall])


@pytest.mark.parametrize("module", WALLED)
def test_a_module_stays_behind_its_wall(module: str) -> None:
    wall = never(module)
    assert wall.isdisjoint(loaded_behind(wall)[module])


def test_the_probe_sees_what_a_module_loads() -> None:
    """Without this, a misspelt name in the table would hold any wall."""
    assert probe(["json", "fsspec", "pyarrow", "ray"]) == {
        "json": [],
        "fsspec": ["fsspec"],
        "pyarrow": ["pyarrow"],
        "ray": ["ray"],
    }
    assert all(importlib.util.find_spec(name) for name in MODEL_SIDE | DATA_SIDE)


@pytest.mark.parametrize(
    "module, wall",
    [
        ("pipeline.spec", {"torch", "transformers", "ray", "pyarrow"}),
        ("pipeline.inference.tree", {"ray", "pyarrow", "fsspec"}),
        ("pipeline.data.graph", {"torch", "transformers"}),
        ("pipeline.evaluation.metrics", {"torch", "transformers", "ray", "pyarrow", "fsspec"}),
        ("pipeline.data.anything_new", {"torch", "transformers"}),
        ("pipeline.evaluation.calibration", {"torch", "transformers", "ray", "pyarrow", "fsspec"}),
        ("pipeline.anything_new", {"torch", "transformers", "ray", "pyarrow"}),
        ("jobs.corpus.build", {"torch", "transformers", "ray"}),
    ],
)
def test_the_table_says_what_the_design_says(module: str, wall: set[str]) -> None:
    assert never(module) == wall


def test_the_files_on_disk_are_found() -> None:
    found = {"pipeline", "pipeline.spec", "pipeline.inference.tree", "pipeline.data.storage"}
    assert found <= set(WALLED)
    assert Path(__file__) in FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_file_is_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_file_is_named_for_its_concern(path: Path) -> None:
    names = path.relative_to(REPOSITORY).with_suffix("").parts
    assert DRAWERS.isdisjoint(name.removeprefix("test_").strip("_") for name in names)
