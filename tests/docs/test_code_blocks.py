"""Every code block of the README, the manual and public docstrings is run, or has a reason.

A comment before a block marks it: `<!-- test: slow -->` for a block that takes long, and
`<!-- no-run: REASON -->` for one that needs what a test does not have, or that another test runs.
YAML blocks are specs or parts of one. Python and shell blocks run in a folder with a small output
that is finished: the command runs in this process and without Ray, a random model answers, and
somebody labels on the page of a review. The examples of public docstrings are doctests: `...`
matches any text.
"""

from __future__ import annotations

import builtins
import doctest
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pytest
import yaml
from command import SLOW_ON_RAY
from json_outputs import generate
from manual import BLOCK, PAGES, REPOSITORY, Block, blocks, commands, run_line
from stages import run_without_ray

import pipeline
from pipeline import errors
from pipeline.cli import app
from pipeline.ledger.dataset import LabelDataset
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

REFERENCE = sorted((REPOSITORY / "docs" / "reference").glob("*.md"))
REASONS = {"another-test", "installs", "long", "needs-cloud", "needs-gpu"}
NOT_CODE = {"text"}
REPOSITORY_PATH = re.compile(r"`((?:pipeline|tests|jobs|benchmarks)/[a-z0-9_./-]+\.[a-z]+)`")
BASE = {
    "name": "manual",
    "model": {"path": "model"},
    "input": {"path": "data"},
    "output": "out",
    "tasks": [{"name": "toxic", "question": "Is this rude?", "labels": ["toxic", "clean"]}],
}

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


def params(language: str) -> list[Any]:
    """The blocks of one language that are run."""
    return [
        pytest.param(block, id=block.place, marks=SLOW_ON_RAY if block.reason else MANUAL)
        for block in blocks()
        if block.language == language and block.mark != "no-run"
    ]


def test_every_block_is_run_or_has_the_reason_why_not() -> None:
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
    missing = {key: value for key, value in BASE.items() if key not in written}
    text = (yaml.safe_dump(missing) if missing else "") + block.code
    assert parse_spec(text).tasks
    jsonschema.validate(yaml.safe_load(text), generate.spec_schema())


@pytest.mark.usefixtures("in_manual")
@pytest.mark.parametrize("block", params("python"))
def test_a_python_block_runs(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    if block.reason == "slow":  # with Ray, which needs a process of its own
        run_line([sys.executable, "-c", block.code])
    else:
        exec(block.code, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.xdist_group("manual")
@pytest.mark.usefixtures("in_manual")
def test_the_page_on_the_format_reads_the_current_labels_without_assay() -> None:
    page = (REPOSITORY / "docs" / "format.md").read_text().partition("without assay:\n")[2]
    block = BLOCK.search(page)
    assert block is not None and "pipeline" not in block["code"]
    read: dict[str, Any] = {}
    exec(block["code"], read)
    rows, labels = read["labels"].to_pylist(), pipeline.open_labels("out/my_corpus")
    assert len(rows) == 10 and read["snapshot"]["number"] == labels.snapshot == 2
    for row, expected in zip(rows, labels.to_table().to_pylist(), strict=True):
        tasks = {task: {"doc_id": row["doc_id"], **expected[task]} for task in ("toxic", "topic")}
        assert row == {name: value for name, value in {**expected, **tasks}.items() if name in row}
        assert row.keys() == {*expected} - {"path", "row"}


@pytest.mark.usefixtures("in_manual")
@pytest.mark.parametrize("block", params("bash"))
def test_a_shell_block_runs(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if block.reason == "slow":
        run_line(["bash", "-euc", block.code])
    else:
        run_without_ray(monkeypatch)
        if block.place.startswith("README.md"):
            monkeypatch.chdir("README.md")
        for words in commands(block.code):
            run_line(words)
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


@pytest.mark.usefixtures("in_manual")
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
    """Also the errors that the docstring says are raised; the JSON page has results of verbs."""
    types = {"Any", "Callable", "Iterable", "Mapping", "Path", "Sequence", "Table"}
    types |= {path.rpartition(".")[2] for paths in generate.OUTPUTS.values() for path in paths}
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


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE], ids=lambda page: page.name)
def test_every_link_opens_in_a_checkout(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    places = [link for link in links if "://" not in link]
    assert [place for place in places if not (page.parent / place).exists()] == []


def test_the_readme_and_the_manual_are_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 100
    manual = sorted((REPOSITORY / "docs").glob("*.md"))
    assert len(manual) <= 14
    assert sum(len(page.read_text().split()) for page in manual) <= 9_000


@pytest.mark.parametrize("file", generate.REFERENCE)
def test_a_page_of_the_reference_is_that_of_the_code(file: str) -> None:
    committed = (REPOSITORY / "docs" / "reference" / file).read_text()
    assert generate.REFERENCE[file]() == committed, "write it again: python docs/generate.py"


def test_the_reference_is_complete() -> None:
    keys = generate.keys_page()
    assert all(f"| `{key}` |" in keys for key in JobSpec.model_fields)
    assert not [line for line in keys.splitlines() if line.endswith("|  |")]  # has a purpose
    command, schemas = generate.command_page(), generate.json_page()
    verbs = [verb for verb in app if not verb.startswith("-")]
    assert all(f"## assay {verb}\n" in command for verb in verbs)
    assert all(f"## assay {verb}\n" in schemas for verb in verbs)
    names = generate.api_page()
    assert all(f"## {name}\n" in names for name in pipeline.__all__)


@pytest.mark.parametrize(
    "spec", sorted((REPOSITORY / "jobs/specs").glob("*.yaml")), ids=lambda spec: spec.name
)
def test_the_schema_for_editors_accepts_a_spec(spec: Path) -> None:
    validator = jsonschema.Draft202012Validator(generate.spec_schema())
    assert [*validator.iter_errors(yaml.safe_load(spec.read_text()))] == []


@pytest.mark.parametrize("mistake", [{"naem": "a"}, {"tasks": []}, {"documents": {"max": 1}}])
def test_the_schema_for_editors_finds_a_mistake(mistake: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**BASE, **mistake}, generate.spec_schema())
