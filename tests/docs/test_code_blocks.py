"""Every code block of the README, the manual and public docstrings is run, or says why it is not.

A comment before a block marks it: `<!-- test: slow -->` for a block that takes long, and
`<!-- no-run: REASON -->` for one that needs what a test does not have, or that another test runs.
YAML blocks are specs or parts of one. Python and shell blocks run in a folder with a small output
that is finished: the command runs in this process and without Ray, and a random model answers. The
examples of public docstrings are doctests: `...` matches any text.
"""

from __future__ import annotations

import builtins
import csv
import doctest
import inspect
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from command import SLOW_ON_RAY
from json_outputs import generate
from stages import run_without_ray

import pipeline
from pipeline import errors
from pipeline.cli import app, main
from pipeline.ledger.dataset import LabelDataset
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "jobs/README.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
REASONS = {
    "another-test",
    "installs",
    "journey",
    "long",
    "needs-cloud",
    "needs-gpu",
    "needs-people",
}
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

PUBLIC = [getattr(pipeline, name) for name in pipeline.__all__]
METHODS = [
    method
    for name, method in inspect.getmembers(pipeline.Labeller, inspect.isfunction)
    if not name.startswith("_")
]
# What is called, in other words: an error is only caught, and a spec is parsed.
CALLED = [each for each in PUBLIC if each is pipeline.Labeller or inspect.isfunction(each)]
SECTION = re.compile(r"^(\w+):\n((?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): \S", re.MULTILINE)

MANUAL = (pytest.mark.xdist_group("manual"),)  # these share one folder, which takes seconds


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
        pytest.param(block, id=block.place, marks=SLOW_ON_RAY if block.reason else MANUAL)
        for block in blocks()
        if block.language == language and block.mark != "no-run"
    ]


def commands(code: str) -> list[list[str]]:
    """The words of each line of a shell block, without comments."""
    lines = code.replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(words: list[str]) -> None:
    """One command, in this process where it is `assay` or a line of Python."""
    match words:
        case ["assay", *arguments]:
            assert main(arguments) == 0, words
        case ["python", "-c", code]:
            exec(code, {})
        case _:
            print(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the manual speaks of: `my.yaml`, its input, and gold labels."""
    made = tmp_path_factory.mktemp("manual")
    for name in ("jobs", "models"):
        (made / name).symlink_to(REPOSITORY / name)
    readme = next(block for block in blocks() if block.language == "yaml")
    spec = yaml.safe_load(readme.code)
    spec["model"] = {"path": str(model_folder), "dtype": "float32"}
    spec["tasks"].append(TOPIC)
    spec["filter"] = {"keep": "toxic.p.toxic < 0.5", "on_error": "drop"}
    (made / "my.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    rows = [{"doc": f"d{n}", "text": f"This is text {n}. " * (1 + n % 3)} for n in range(8)]
    gold = [f'{{"doc": "d{n}", "toxic": "{("clean", "toxic")[n % 2]}"}}\n' for n in range(8)]
    (made / "gold.jsonl").write_text("".join(gold))
    (made / "data" / "de").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows[:5]), made / "data" / "a.parquet")
    # — the quick start's documents, and a folder in place of its model of the Hub
    lines = [f'c{n},"Comment {n},\nin two lines.",{("clean", "toxic")[n % 2]}\n' for n in range(40)]
    (made / "comments.csv").write_text("id,text,toxic\n" + "".join(lines))
    (made / "gold.csv").write_text("id,toxic\nc0,clean\nc1,toxic\nc2,clean\nc3,toxic\n")
    # — scores as those of another service
    for name, gold, key in [("scores", "train", "text"), ("compare", "gold", "id")]:
        write_scores(made / f"{name}.csv", REPOSITORY / f"jobs/corpus/{gold}.jsonl", key)
    (made / "HuggingFaceTB").mkdir()
    (made / "HuggingFaceTB" / "SmolLM2-135M-Instruct").symlink_to(model_folder)
    with pytest.MonkeyPatch.context() as patch:
        enter(made, patch)
        run_without_ray(patch)
        run(["assay", "run", "my.yaml"])
        pq.write_table(pa.Table.from_pylist(rows[5:]), made / "data" / "de" / "b.parquet")
        run(["assay", "run", "my.yaml"])
    return made


def write_scores(file: Path, gold: Path, key: str) -> None:
    """Scores of the Perspective API's attributes, made from labels of people with noise."""
    names = ["TOXICITY", "SEVERE_TOXICITY", "IDENTITY_ATTACK", "INSULT", "PROFANITY", "THREAT"]
    noise = random.Random(0)
    with gold.open(encoding="utf-8") as lines:
        judged = [row for row in map(json.loads, lines) if "toxic" in row]
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow([key, *names])
        for row in judged:
            middle = 1.5 if row["toxic"] == "toxic" else -1.5
            scores = [1 / (1 + math.exp(-noise.gauss(middle, 1.5))) for _ in names]
            writer.writerow([row[key], *scores])


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The folder is the current one, and `assay` and `python` are those of this environment."""
    patch.chdir(folder)
    patch.setenv("ASSAY_CACHE", str(folder / "cache"))
    patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    patch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(folder, monkeypatch)


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
    rest = {key: value for key, value in BASE.items() if key not in written}
    assert parse_spec((yaml.safe_dump(rest) if rest else "") + block.code).tasks


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("block", params("python"))
def test_a_python_block_runs(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    if block.reason == "slow":  # with Ray, which wants a process of its own
        run([sys.executable, "-c", block.code])
    else:
        exec(block.code, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.xdist_group("manual")
@pytest.mark.usefixtures("here")
def test_the_page_on_the_format_reads_the_current_labels_without_assay() -> None:
    page = (REPOSITORY / "docs" / "format.md").read_text().partition("## Without assay\n")[2]
    block = BLOCK.search(page)
    assert block is not None and "pipeline" not in block["code"]
    read: dict[str, Any] = {}
    exec(block["code"], read)
    rows, labels = read["labels"].to_pylist(), pipeline.open_labels("out/my_corpus")
    assert len(rows) == 8 and read["snapshot"]["number"] == labels.snapshot == 2
    for row, wanted in zip(rows, labels.to_table().to_pylist(), strict=True):
        tasks = {task: {"doc_id": row["doc_id"], **wanted[task]} for task in ("toxic", "topic")}
        assert row == {name: value for name, value in {**wanted, **tasks}.items() if name in row}
        assert row.keys() == {*wanted} - {"path", "row"}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("block", params("bash"))
def test_a_shell_block_runs(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if block.reason == "slow":
        run(["bash", "-euc", block.code])
    else:
        run_without_ray(monkeypatch)
        for words in commands(block.code):
            run(words)
    assert capsys.readouterr().out.strip()


def examples() -> Iterator[Any]:
    """A doctest for each public docstring with an example."""
    names = {name: getattr(pipeline, name) for name in pipeline.__all__}
    names |= {"Path": Path, "duckdb": duckdb}
    for each in [pipeline, *PUBLIC, *METHODS, LabelDataset.to_pandas, LabelDataset.to_polars]:
        name = getattr(each, "__qualname__", each.__name__)
        test = doctest.DocTestParser().get_doctest(each.__doc__ or "", dict(names), name, None, 0)
        if test.examples:
            yield pytest.param(test, id=name, marks=MANUAL)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("example", [*examples()])
def test_an_example_of_a_docstring_runs(
    example: doctest.DocTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    assert any(each.want for each in example.examples)  # an example shows a result
    runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example) == (0, len(example.examples))  # failed, attempted


@pytest.mark.parametrize("each", [*CALLED, *METHODS], ids=lambda each: each.__qualname__)
def test_a_public_docstring_has_every_argument_the_result_and_the_errors(
    each: Callable[..., Any],
) -> None:
    sections = dict(SECTION.findall(f"{inspect.getdoc(each)}\n"))
    signature = inspect.signature(each)
    arguments = [name for name in signature.parameters if name != "self"]
    assert ENTRY.findall(sections.get("Args", "")) == arguments
    returns = not inspect.isclass(each) and signature.return_annotation != "None"
    assert bool(sections.get("Returns", "").strip()) == returns
    raised = ENTRY.findall(sections["Raises"])
    known = [getattr(errors, name, None) or getattr(builtins, name) for name in raised]
    assert known and all(issubclass(error, Exception) for error in known)
    assert "Examples" in sections or inspect.isclass(each)


@pytest.mark.parametrize("each", [*CALLED, *METHODS], ids=lambda each: each.__qualname__)
def test_what_a_public_signature_names_is_public(each: Any) -> None:
    """Also the errors that the docstring says are raised."""
    types = {"Any", "Callable", "Iterable", "Mapping", "Path", "Sequence", "Table"}
    named = {*re.findall(r"\b[A-Z]\w+", str(inspect.signature(each)))} - types
    named |= {*re.findall(r"\b[A-Z]\w+Error\b", inspect.getdoc(each) or "")}
    assert named - {*dir(builtins)} <= {*pipeline.__all__}


def test_every_public_name_and_every_key_of_a_spec_has_a_docstring() -> None:
    assert all(vars(each).get("__doc__") for each in PUBLIC if inspect.isclass(each))
    assert all(field.description for field in JobSpec.model_fields.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_exist(page: Path) -> None:
    missing = [
        path
        for path in REPOSITORY_PATH.findall(page.read_text())
        if not (REPOSITORY / path).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_opens_in_a_checkout(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    places = [link for link in links if "://" not in link]
    assert [place for place in places if not (page.parent / place).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150


def test_the_generated_pages_are_complete() -> None:
    keys = generate.spec_page()
    assert all(f"| `{key}` |" in keys for key in JobSpec.model_fields)
    assert not [line for line in keys.splitlines() if line.endswith("|  |")]  # has a purpose
    command = generate.command_page()
    assert all(f"## assay {verb}\n" in command for verb in ("run", "check", "eval", "fit", "gc"))
    names = generate.api_page()
    assert all(f".{name}\n" in names for name in pipeline.__all__)
    schemas = generate.json_page()
    assert all(f"## assay {verb}\n" in schemas for verb in app if not verb.startswith("-"))
