"""Every code block of the README and the manual is run, or says why it is not.

A comment before a block marks it: `<!-- test: slow -->` for a block that takes long, and
`<!-- no-run: REASON -->` for one that needs what a test does not have. YAML blocks are specs or
parts of one. Python and shell blocks run in a folder with a small output that is finished; there,
`assay` is the command without Ray, and a random model answers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from command import TOY_ASSAY

import pipeline
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "jobs/README.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
REASONS = {"installs", "long", "needs-cloud", "needs-gpu"}
NOT_CODE = {"text", "mermaid"}
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>no-run|test): (?P<reason>[\w-]+) -->\n)?"
    r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
REPOSITORY_PATH = re.compile(r"`((?:pipeline|tests|jobs|benchmarks)/[a-z0-9_./-]+\.[a-z]+)`")
BASE = {
    "name": "manual",
    "model": {"path": "model"},
    "input": {"path": "data"},
    "output": "out",
    "tasks": [{"name": "toxic", "question": "Is this rude?", "labels": ["toxic", "clean"]}],
}
TOPIC = {"name": "topic", "question": "What is this about?", "labels": ["art", "law"]}

pytestmark = pytest.mark.xdist_group("manual")


@dataclass(frozen=True)
class Block:
    place: str
    language: str
    code: str
    mark: str | None
    reason: str | None


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            place = f"{page.relative_to(REPOSITORY)}:{line}"
            yield Block(place, *match.group("language", "code", "mark", "reason"))


def params(language: str) -> list[Any]:
    """The blocks of one language that are run."""
    return [
        pytest.param(block, id=block.place, marks=[pytest.mark.slow] if block.reason else [])
        for block in blocks()
        if block.language == language and block.mark != "no-run"
    ]


@pytest.fixture(scope="module")
def run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a command in the folder that the manual speaks of: `my.yaml` with two snapshots."""
    folder = tmp_path_factory.mktemp("manual")
    (folder / "bin").mkdir()
    words = " ".join(f"'{word}'" for word in TOY_ASSAY)
    (folder / "bin" / "assay").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (folder / "bin" / "assay").chmod(0o755)
    for name in ("jobs", "models"):
        (folder / name).symlink_to(REPOSITORY / name)

    def run_here(*command: str, real: bool = False) -> str:
        interpreter = str(Path(sys.executable).parent)
        path = [interpreter] if real else [str(folder / "bin"), interpreter]
        environment = {
            **os.environ,
            "ASSAY_CACHE": str(folder / "cache"),
            "PATH": os.pathsep.join([*path, os.environ["PATH"]]),
            "PYTHONPATH": str(REPOSITORY),
        }
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    readme = next(block for block in blocks() if block.language == "yaml")
    spec = yaml.safe_load(readme.code)
    spec["model"] = {"path": str(model_folder), "dtype": "float32"}
    spec["tasks"].append(TOPIC)
    spec["filter"] = {"keep": "toxic.p.toxic < 0.5", "on_error": "drop"}
    (folder / "my.yaml").write_text(yaml.safe_dump(spec))
    rows = [{"doc": f"d{n}", "text": f"This is text {n}. " * (1 + n % 3)} for n in range(8)]
    gold = [f'{{"doc": "d{n}", "toxic": "{("clean", "toxic")[n % 2]}"}}\n' for n in range(8)]
    (folder / "gold.jsonl").write_text("".join(gold))
    (folder / "data" / "de").mkdir(parents=True)
    for name, part in (("a", rows[:5]), ("de/b", rows[5:])):
        pq.write_table(pa.Table.from_pylist(part), folder / "data" / f"{name}.parquet")
        run_here("assay", "run", "my.yaml")
    return run_here


def test_every_block_is_run_or_says_why_not() -> None:
    all_blocks = list(blocks())
    fences = sum(page.read_text().count("\n```") for page in PAGES)
    assert len(all_blocks) * 2 == fences
    wrong = [
        block.place
        for block in all_blocks
        if block.language not in {"bash", "python", "yaml", *NOT_CODE}
        or (block.mark == "test" and block.reason != "slow")
        or (block.mark == "no-run" and block.reason not in REASONS)
    ]
    assert not wrong


@pytest.mark.parametrize("block", params("yaml"))
def test_a_yaml_block_is_a_spec_or_part_of_one(block: Block) -> None:
    written = yaml.safe_load(block.code)
    spec = parse_spec({**BASE, **written})
    assert set(written) <= set(type(spec).model_fields)


@pytest.mark.parametrize("block", params("python"))
def test_a_python_block_runs(block: Block, run: Callable[..., str]) -> None:
    assert run(sys.executable, "-c", block.code).strip()


@pytest.mark.parametrize("block", params("bash"))
def test_a_shell_block_runs(block: Block, run: Callable[..., str]) -> None:
    assert run("bash", "-euc", block.code, real=block.reason == "slow").strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_exist(page: Path) -> None:
    missing = [
        path
        for path in REPOSITORY_PATH.findall(page.read_text())
        if not (REPOSITORY / path).exists()
    ]
    assert not missing


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_are_complete(generate: ModuleType) -> None:
    keys = generate.spec_page()
    assert all(f"| `{key}` |" in keys for key in JobSpec.model_fields)
    command = generate.command_page()
    assert all(f"## assay {verb}\n" in command for verb in ("run", "check", "eval", "fit", "gc"))
    names = generate.api_page()
    assert all(f".{name}\n" in names for name in pipeline.__all__)
