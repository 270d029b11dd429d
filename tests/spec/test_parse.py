"""A spec's file: what cannot be read is one line, and a mistake names its line and its task."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import Option, Problem, SpecError
from pipeline.spec.parse import load_spec, located, parse_spec
from pipeline.spec.schema import JobSpec

SMALLEST = """
name: job
model: {path: some/model}
input: {path: in}
output: out
tasks:
- {name: a, question: Why, labels: [x, y]}
"""


def lines_of(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
def test_a_file_and_its_text_give_the_same_spec(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("job.yaml"), tmp_path / "job.yaml"):
        path.write_text(mark + SMALLEST, encoding="utf-8")
        assert load_spec(path) == parse_spec(SMALLEST)


LOCATED = """
name: job
model: {path: PATH.gguf}
input: {path: "PATH/*.jsonl"}
output: PATH
tasks:
- {name: a, labels: [x, y], readout: PATH}
- {name: b, labels: [x, y], classifier: {kind: onnx, path: PATH}}
- name: c
  labels: [x, y]
  cascade:
    stages: [{classifier: {kind: onnx, path: PATH}}, {question: Why, model: {path: PATH.gguf}}]
"""


def paths_of(spec: JobSpec) -> set[str]:
    """All strings of the spec with the word `data`."""

    def strings(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for inner in value:
                yield from strings(inner)
        elif isinstance(value, str) and "data" in value:
            yield value

    return set(strings(spec.model_dump()))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("data", "shop/data"),
        ("../data", "data"),
        ("/data", "/data"),
        ("~/data", "~/data"),
        ("s3://bucket/data", "s3://bucket/data"),
    ],
)
@pytest.mark.parametrize("is_absolute", [True, False])
def test_relative_paths_are_relative_to_the_folder_of_the_spec(
    written: str, read: str, is_absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("shop/job.yaml")
    path.parent.mkdir()
    path.write_text(LOCATED.replace("PATH", written))
    spec = load_spec(path.absolute() if is_absolute else path)
    assert paths_of(spec) == {read, f"{read}.gguf", f"{read}/*.jsonl"}


def test_the_name_of_a_model_on_the_hub_is_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("shop/job.yaml")
    path.parent.mkdir()
    path.write_text(SMALLEST)
    assert load_spec(path).model.path == "some/model"
    Path("shop/some/model").mkdir(parents=True)
    assert load_spec(path).model.path == "shop/some/model"


@pytest.mark.parametrize("text", ["", "- a\n", "text", "3", "null"])
def test_a_spec_that_is_no_mapping_is_refused(text: str) -> None:
    expected = r"^job\.yaml: write a mapping of keys to values( \(got |$)"
    with pytest.raises(SpecError, match=expected):
        parse_spec(text, place="job.yaml")


@pytest.mark.parametrize(
    ("name", "content", "fix"),
    [
        ("no.yaml", None, "cannot be read: No such file or directory; write the path of the spec"),
        ("", None, "cannot be read: Is a directory; write the path of the spec"),
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
    path = tmp_path / "documents.yaml"
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
        (
            SMALLEST + "filter: !!python/object/apply:os.getcwd []\n",
            "no type 'python/object/apply:os.getcwd' in a spec, line 8",
        ),
        (SMALLEST + "filter: \x00\n", "special characters are not allowed"),
        (
            SMALLEST + "prompt:x\n",
            "no value; write `key: value`, with a space after the colon, line 8",
        ),
        (SMALLEST + "prompt:x\nfilter: {}\n", "with a space after the colon, line 8"),
        (SMALLEST + "prompt:\n\tdocument: a\n", "a tab; indent with spaces, line 9"),
        (SMALLEST + "prompt: a: b\n", "a second `: `; put a text with a colon in quotes, line 8"),
        (SMALLEST + "? [a, b]\n: c\n", "a key is one word, line 8"),
        (SMALLEST + "filter: !!binary x\n", "no type 'binary' in a spec, line 8"),
        (
            SMALLEST + 'prompt: {system: "\\ud83d"}\n',
            "half of a surrogate pair is not a character, line 8",
        ),
    ],
)
def test_yaml_that_is_not_plain_is_one_line_that_names_the_file(text: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, place="job.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("job.yaml: is not plain YAML: ")
    assert reason in line


@pytest.mark.parametrize(
    ("text", "depth"), [("a: {depth}", 3_000), ("{depth}", 100_000), ("tasks: [{depth}]", 3_000)]
)
def test_yaml_of_any_depth_is_one_line(text: str, depth: int) -> None:
    with pytest.raises(SpecError, match=r"^spec: is nested too deeply to be a spec$"):
        parse_spec(text.replace("{depth}", "[" * depth + "]" * depth))


MISSPELT = """name: job
model: {path: some/model, dtpe: auto}
input:
  path: in.jsonl
  txt: body
# no output
max_tokens: 9
tasks:
- name: toxic
  question: Why
  labels: [x, y]
- name: topic
  question: What
  lables: [x, y]
  model: {path: a, devise: b}
  chunks: [first]
"""


def test_a_misspelt_key_offers_the_nearest_and_names_the_line_and_the_task(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(MISSPELT)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value).splitlines() == [
        f"model.dtpe: no such key; write dtype (got 'auto') in {path}, line 2",
        f"input.txt: no such key; write text (got 'body') in {path}, line 5",
        f"output: missing; add it in {path}",
        f"tasks.1.chunks: write 'max' or 'mean' (got ['first']) in {path}, line 16, task 'topic'",
        "tasks.1.model.devise: no such key; write device (got 'b') "
        f"in {path}, line 15, task 'topic'",
        "tasks.1.lables: no such key; write labels (got ['x', 'y']) "
        f"in {path}, line 14, task 'topic'",
        f"max_tokens: no such key; max_tokens belongs below documents (got 9) in {path}, line 7",
    ]


def test_a_key_that_resembles_none_lists_those_that_exist() -> None:
    (line,) = lines_of(SMALLEST + "filter: {keep: a, zzz: 1}\n")
    assert line == (
        "filter.zzz: no such key; remove it or correct its spelling: the keys are keep, drop_top, "
        "join, on_error, storage_options (got 1) in spec, line 8"
    )


def test_a_value_of_two_possible_types_is_one_line_that_names_both() -> None:
    (line,) = lines_of(SMALLEST.replace("path: in", "path: in, shard_bytes: big"))
    assert line == (
        "input.shard_bytes: write 'auto' or write a whole number (got 'big') in spec, line 4"
    )


def test_a_mistake_that_is_found_later_has_its_line_too(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(SMALLEST)
    with pytest.raises(SpecError) as caught, located(path):
        raise SpecError(
            [Problem("tasks.0.labels", "begin alike", 3), Problem(Option("to"), "no", "x")]
        )
    assert str(caught.value).splitlines() == [
        f"tasks.0.labels: begin alike (got 3) in {path}, line 7, task 'a'",
        "to: no (got 'x')",
    ]


@pytest.mark.parametrize("now", ["", "{}", "tasks: []", "]"])
def test_a_file_that_changed_since_it_was_read_hides_no_mistake(now: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(now)
    with pytest.raises(SpecError) as caught, located(path):
        raise SpecError([Problem("tasks.0.labels", "begin alike", 3)])
    assert str(caught.value) == "tasks.0.labels: begin alike (got 3)"


def test_mistakes_of_a_worker_survive_what_others_add_to_the_error() -> None:
    error = SpecError([Problem("tasks.0.labels", "begin alike", 3)])
    error.args = (*error.args, "advice of Ray Data")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is SpecError and copy.problems == error.problems


@pytest.mark.parametrize("name", ["a.csv", "a.CSV.gz", "a.jsonl", "a.parquet", "a.tsv", "a.txt"])
def test_data_in_place_of_a_spec_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"id,text\n1,\xff: a: b\n")
    with pytest.raises(SpecError, match="is data, and not a spec; `assay init DATA` writes"):
        load_spec(tmp_path / name)


def test_a_spec_may_have_the_name_of_its_data_before_its_own_ending(tmp_path: Path) -> None:
    (tmp_path / "a.csv.yaml").write_text(SMALLEST)
    assert load_spec(tmp_path / "a.csv.yaml").name == parse_spec(SMALLEST).name


def test_a_character_may_be_two_escapes_as_json_writes_it() -> None:
    text = json.dumps(
        {
            "name": "a",
            "model": {"path": "m"},
            "input": {"path": "in"},
            "output": "out",
            "tasks": [{"name": "t", "question": "Is it 😀?", "labels": ["😀", "b"]}],
        }
    )
    [task] = parse_spec(text).tasks
    assert (task.question, [*task.labels]) == ("Is it 😀?", ["😀", "b"])


@pytest.mark.parametrize("key", ["tasks.0.x", "tasks.7.x", "model.path"])
@pytest.mark.parametrize("rest", ["", "tasks: {}\n", "tasks: [{name: a}]\n"])
def test_a_key_with_dots_is_one_line(key: str, rest: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(f"name: a\n{key}: 1\n{rest}")
    (problem,) = (each for each in caught.value.problems if each.place == key)
    assert problem.fix.startswith("no such key") and problem.where.startswith("spec, line 2")
