"""What the distribution installs, and what it declares."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

REPOSITORY = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OWN = {"pipeline", "jobs", "benchmarks"}
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def _names(requirements: list[str]) -> set[str]:
    """`ray[data]>=2.55` -> `ray`, in the spelling of the index."""
    parts = [re.split(r"[\[<>=;~! ]", requirement, maxsplit=1)[0] for requirement in requirements]
    return {part.lower().replace("_", "-") for part in parts}


def _imports(folder: str) -> set[str]:
    """The packages that the folder's modules import and that Python does not ship."""
    imported = set()
    for file in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    return imported - sys.stdlib_module_names - OWN


PACKAGES = [("pipeline", {"delta", "frames", "gcs", "iceberg", "lance", "vllm"}), ("jobs", {"dev"})]


@pytest.mark.parametrize("folder, extras", PACKAGES)
def test_every_import_is_declared(folder: str, extras: set[str]) -> None:
    declared = {*_names(PROJECT["dependencies"]), "triton"}  # which torch brings for GPUs
    declared |= {name for extra in extras for name in _names(EXTRAS[extra])}
    # — of a package that is not installed, as vLLM, the distribution has the same name
    imported = _imports(folder)
    owners = {name: [name] for name in imported} | packages_distributions()
    missing = {
        package: owners[package]
        for package in imported
        if declared.isdisjoint(name.lower().replace("_", "-") for name in owners[package])
    }
    assert imported and not missing


@pytest.mark.parametrize("extra", ["classifiers", "frames", "gcs"])
def test_an_error_names_the_extra_to_install(extra: str) -> None:
    sources = "".join(file.read_text() for file in (REPOSITORY / "pipeline").rglob("*.py"))
    assert f"pip install 'corpus-assay[{extra}]'" in sources


def test_the_wheel_installs_the_package_and_the_command_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "assay.py"):
        shutil.copy(REPOSITORY / name, source)
    for name in sorted(OWN):
        ignored = shutil.ignore_patterns("__pycache__", "parts", "source")
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    # — without a compiler, which takes half a minute for the kernels, the build goes on
    environment = {**os.environ, "CC": "false", "CXX": "false"}
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    with ZipFile(next(tmp_path.glob("corpus_assay-*.whl"))) as wheel:
        names = wheel.namelist()
        about = next(name.partition("/")[0] for name in names if name.endswith("METADATA"))
        assert {name.partition("/")[0] for name in names} == {"assay.py", "pipeline", about}
        assert {"pipeline/py.typed", "pipeline/report/page.html"} <= set(names)
        assert f"{about}/licenses/LICENSE" in names
        assert "assay = assay:main" in wheel.read(f"{about}/entry_points.txt").decode()
    modules = {str(f.relative_to(REPOSITORY)) for f in (REPOSITORY / "pipeline").rglob("*.py")}
    assert modules <= set(names)


def test_another_module_named_pipeline_is_named(tmp_path: Path) -> None:
    other = tmp_path / "pipeline.py"
    other.write_text("print('not assay')\n")
    command = [sys.executable, "-c", "from assay import main; raise SystemExit(main())", "--help"]
    for folders, code in (([tmp_path, REPOSITORY], 2), ([REPOSITORY, tmp_path], 0)):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path / "..", capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        lines = done.stderr.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["assay"] * (code == 2)
        assert str(other) in done.stderr or code == 0
