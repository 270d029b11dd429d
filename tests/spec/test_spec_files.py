"""A spec's file and its YAML: what cannot be read is one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import SpecError
from pipeline.spec.parse import load_spec, parse_spec

SMALLEST = """
name: job
model: {path: some/model}
input: {path: in}
output: out
tasks:
- {name: a, question: Why, labels: [x, y]}
"""


@pytest.mark.parametrize(
    ("name", "content", "fix"),
    [
        ("no.yaml", None, "there is no such file; write the path of the spec"),
        ("", None, "is a folder; write the path of the spec"),
        ("latin.yaml", "name: é\n".encode("latin-1"), "is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_that_names_it(
    name: str, content: bytes | None, fix: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    (problem,) = caught.value.problems
    assert problem.place == str(path) and problem.fix.startswith(fix)


def test_of_another_file_only_the_start_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "documents.csv"
    path.write_text("id,text\n" + "1,Some text\n" * 1_000)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: write a mapping of keys to values (got 'id,text 1,Some text ")
    assert line.endswith("…)") and len(line) < 300 + len(str(path))


@pytest.mark.parametrize(
    "text, reason",
    [
        (SMALLEST + "name: again\n", "'name' occurs twice, line 8; keep one"),
        (
            SMALLEST.replace("[x, y]", "{x: [X], x: [Z], y: [Y]}"),
            "'x' occurs twice, line 7; keep one",
        ),
        (SMALLEST.replace("path: some/model", "path: &m some/model"), "anchors are not read"),
        (SMALLEST + "filter: *f\n", "anchors are not read"),
        (SMALLEST + "filter: &f {keep: a}\n", "anchors are not read"),
        (SMALLEST + "prompt: {examples: &e []}\n", "anchors are not read"),
        (SMALLEST + "filter: [\n", "expected the node content"),
        (SMALLEST + "---\nname: second\n", "expected a single document"),
        (SMALLEST + "filter: !!python/object/apply:os.getcwd []\n", "could not determine"),
        (SMALLEST + "filter: \x00\n", "special characters are not allowed"),
        (
            SMALLEST + "prompt:x\n",
            "no value; write `key: value`, with a space after the colon, line 8",
        ),
        (SMALLEST + "prompt:x\nfilter: {}\n", "with a space after the colon, line 8"),
        (SMALLEST + "prompt:\n\tdocument: a\n", "a tab; indent with spaces, line 9"),
        (SMALLEST + "prompt: a: b\n", "a second `: `; put a text with a colon in quotes, line 8"),
    ],
)
def test_yaml_that_is_not_plain_is_one_line_that_names_the_file(text: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, place="job.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("job.yaml: is not plain YAML: ")
    assert reason in line


@pytest.mark.parametrize("depth", [3_000, 100_000])
@pytest.mark.parametrize("text", ["a: {depth}", "{depth}", "tasks: [{depth}]"])
def test_yaml_of_any_depth_is_one_line(text: str, depth: int) -> None:
    with pytest.raises(SpecError, match=r"^spec: is nested too deeply to be a spec$"):
        parse_spec(text.replace("{depth}", "[" * depth + "]" * depth))


@pytest.mark.parametrize(
    "more", ["? [a, b]\n: c\n", "filter: 0x_\n", "filter: !!int x\n"], ids=["key", "hex", "tag"]
)
def test_yaml_that_python_cannot_build_is_a_problem_of_the_spec(more: str) -> None:
    with pytest.raises(SpecError, match=r"^spec: is not plain YAML[^\n]*$"):
        parse_spec(SMALLEST + more)
