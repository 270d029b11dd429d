"""The spec: DESIGN's example means what it says, and every mistake is one line with its fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.errors import SpecError
from pipeline.spec import schema
from pipeline.spec.parse import load_spec, parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

DESIGN_EXAMPLE = r"""
name: toxicity
model:
  path: Qwen/Qwen2.5-1.5B-Instruct   # hub id, local folder, object-store prefix, or a .gguf file
  dtype: auto                        # bfloat16 where the device computes it natively, else float32
  device: auto
input:
  path: s3://corpus/2026-11/**/*.parquet   # .parquet .jsonl .jsonl.gz .jsonl.zst .arrow; globs
  text: text                         # column
  id: id                             # optional; default: the hash of the text
output: s3://labels/corpus
prompt:
  system: null
  instruction: "Read the text, then answer the question."   # shared by all documents
  examples: []                       # few-shot, shared by all documents
  document: "Text:\n{document}"
documents:
  max_tokens: 2048
  too_long: head                     # head | tail | middle: what is kept; or chunk
  overlap_tokens: 128                # for chunk
tasks:
  - name: toxic                      # ^[a-z][a-z0-9_]{0,62}$
    question: "Does this text contain insults, threats, slurs or sexual content? Answer yes or no."
    labels: {toxic: ["Yes", "yes"], clean: ["No", "no"]}   # or a plain list
    chunks: max                      # how chunk answers combine: max of the first label, or mean
    readout: null                    # a fitted readout's path
filter:
  keep: "toxic.p.toxic < 0.5"        # SQL over the task columns, used by `assay filter`
"""

QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
AUTO, SHARDS = {"dtype": "auto", "device": "auto"}, {"image": None, "shard_bytes": "auto"}
PARQUET = "s3://corpus/2026-11/**/*.parquet"
NONE = dict.fromkeys(
    ("classifier", "readout", "beam", "top_k", "separator", "calibration", "cascade", "explain")
)
INSULTS = "Does this text contain insults, threats, slurs or sexual content? Answer yes or no."

HEAD = """
name: job
model: {path: some/model}
input: {path: in.jsonl}
output: out
"""
SMALLEST = HEAD + "tasks:\n- {name: a, question: Why, labels: [x, y]}\n"


def with_task(fields: str) -> str:
    """The smallest job with one task of the given YAML fields."""
    return f"{HEAD}tasks:\n- {{{fields}}}\n"


def with_labels(labels: str) -> str:
    return with_task(f"name: a, question: Why, labels: {labels}")


def labels_of(text: str) -> dict[str, tuple[str, ...]]:
    return parse_spec(text).tasks[0].labels


def lines_of(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_the_example_of_the_design_parses_with_its_values() -> None:
    assert parse_spec(DESIGN_EXAMPLE).model_dump() == {
        "name": "toxicity",
        "model": {
            "path": QWEN,
            "kind": "decoder",
            "storage_options": {},
            "revision": None,
            "gpus": 1,
            "quantize": "none",
            "kv": "none",
            "threads": "auto",
        }
        | AUTO,
        "input": {"path": PARQUET, "storage_options": {}, "text": "text", "id": "id"} | SHARDS,
        "output": "s3://labels/corpus",
        "storage_options": {},
        "prompt": {
            "system": None,
            "instruction": "Read the text, then answer the question.",
            "examples": (),
            "document": "Text:\n{document}",
        },
        "documents": {"max_tokens": 2048, "too_long": "head", "overlap_tokens": 128},
        "tasks": (
            {
                "name": "toxic",
                "question": INSULTS,
                "labels": {"toxic": ("Yes", "yes"), "clean": ("No", "no")},
                "chunks": "max",
                **NONE | {"scoring": "auto", "length_penalty": 0},
            },
        ),
        "exit": None,
        "filter": {
            "keep": "toxic.p.toxic < 0.5",
            "drop_top": None,
            "thresholds": None,
            "policy": None,
            "on_error": "fail",
            "storage_options": None,
        },
        "max_error_rate": None,
    }


def test_what_is_left_out_has_the_defaults_of_the_design() -> None:
    spec, example = parse_spec(SMALLEST), parse_spec(DESIGN_EXAMPLE)
    assert spec.prompt == example.prompt
    assert spec.documents == example.documents
    assert (spec.model.dtype, spec.model.device, spec.model.revision) == ("auto", "auto", None)
    assert (spec.input.text, spec.input.id, spec.input.shard_bytes) == ("text", None, "auto")
    assert (spec.tasks[0].chunks, spec.tasks[0].readout, spec.filter) == ("max", None, None)


@pytest.mark.parametrize(
    "labels, meaning",
    [
        ("[x, y]", {"x": ("x",), "y": ("y",)}),
        ("{x: [X, x], y: [Y]}", {"x": ("X", "x"), "y": ("Y",)}),
        ("[yes, no]", {"yes": ("yes",), "no": ("no",)}),
        ("[on, off]", {"on": ("on",), "off": ("off",)}),
        ("[Y, n]", {"Y": ("Y",), "n": ("n",)}),
        ("[true, False]", {"true": ("true",), "False": ("False",)}),
        ("{yes: [YES], no: [NO]}", {"yes": ("YES",), "no": ("NO",)}),
        (
            "[2026-11-01, 2026-11-02 10:00:00]",
            {"2026-11-01": ("2026-11-01",), "2026-11-02 10:00:00": ("2026-11-02 10:00:00",)},
        ),
        ("['1', \"2\"]", {"1": ("1",), "2": ("2",)}),
        ("[=, <<]", {"=": ("=",), "<<": ("<<",)}),
    ],
)
def test_labels_are_read_as_they_are_written(
    labels: str, meaning: dict[str, tuple[str, ...]]
) -> None:
    read = labels_of(with_labels(labels))
    assert read == meaning
    assert list(read) == list(meaning)


@pytest.mark.parametrize(
    "text, line",
    [
        (SMALLEST + "modle: 3\n", "modle: no such key; write model (got 3)"),
        (
            SMALLEST + "documents: {max_token: 3}\n",
            "documents.max_token: no such key; write max_tokens (got 3)",
        ),
        (
            with_task("name: a, question: q, labels: [x, y], label: 1"),
            "tasks.0.label: no such key; write labels (got 1)",
        ),
        (
            with_task("name: a, labels: [x, y]"),
            "tasks.0.question: a task needs a question, a readout or a classifier; write one",
        ),
        (
            SMALLEST + "documents: {max_tokens: '9'}\n",
            "documents.max_tokens: write a whole number (got '9')",
        ),
        (
            SMALLEST + "documents: {max_tokens: 0}\n",
            "documents.max_tokens: write a number above 0 (got 0)",
        ),
        (
            SMALLEST + "documents: {overlap_tokens: -1}\n",
            "documents.overlap_tokens: write a number of at least 0 (got -1)",
        ),
        (
            SMALLEST + "documents: {too_long: cut}\n",
            "documents.too_long: write 'head', 'tail', 'middle' or 'chunk' (got 'cut')",
        ),
        (
            SMALLEST + "prompt: {examples: [{document: d, question: q}]}\n",
            "prompt.examples.0.answer: missing; add it",
        ),
        (
            SMALLEST + "filter: {keep: ''}\n",
            "filter.keep: write a text; this one is empty (got '')",
        ),
        (
            with_labels("[x, y, x]"),
            "tasks.0.labels: ['x'] listed more than once; list each label once "
            "(got ['x', 'y', 'x'])",
        ),
        (
            with_labels("{x: [X, S], y: [S]}"),
            "tasks.0.labels: 'S' occurs twice; write each text once "
            "(got {'x': ['X', 'S'], 'y': ['S']})",
        ),
        (
            with_labels("{x: [X, X], y: [Y]}"),
            "tasks.0.labels: 'X' occurs twice; write each text once "
            "(got {'x': ['X', 'X'], 'y': ['Y']})",
        ),
        (
            with_labels("{x: [], y: [Y]}"),
            "tasks.0.labels: label 'x' needs at least one text (got {'x': [], 'y': ['Y']})",
        ),
        (
            with_labels("{'': [X], y: [Y]}"),
            "tasks.0.labels: a label needs a name (got {'': ['X'], 'y': ['Y']})",
        ),
        (
            with_labels("{x: [''], y: [Y]}"),
            "tasks.0.labels.x.0: write a text; this one is empty (got '')",
        ),
        (
            with_labels("{x: X, y: [Y]}"),
            "tasks.0.labels.x: write a list, as in [a, b] (got 'X')",
        ),
        (
            with_labels("[x]"),
            "tasks.0.labels: write at least 2 (got ['x'])",
        ),
        (
            with_task("name: a, question: q, labels: [x, y], chunks: min"),
            "tasks.0.chunks: write 'max' or 'mean' (got 'min')",
        ),
        (
            SMALLEST.replace("name: job", "name: a b"),
            "name: write 1 to 63 letters, digits and . _ - without spaces, and begin with a letter "
            "or a digit (got 'a b')",
        ),
    ],
)
def test_one_mistake_is_one_line_with_place_fix_and_value(text: str, line: str) -> None:
    (shown,) = lines_of(text)
    assert shown.rpartition(" in spec")[0] == line


def test_two_tasks_of_one_name_are_refused_by_that_name() -> None:
    (line,) = lines_of(SMALLEST + "- {name: a, question: Who, labels: [x, y]}\n")
    assert line.startswith("tasks: ['a'] named more than once; give each task its own name (got ")


@pytest.mark.parametrize(
    "name", ["A", "1a", "_a", "a-b", "a b", "é", "a.b", "", "a" * 64, '"a\\n"', "../a", "a/b"]
)
def test_a_task_name_that_is_no_column_name_is_refused(name: str) -> None:
    quoted = name if name.startswith('"') else f"'{name}'"
    (line,) = lines_of(with_task(f"name: {quoted}, question: q, labels: [x, y]"))
    assert line.startswith("tasks.0.name: write 1 to 63 lower case letters, digits and _, ")


@pytest.mark.parametrize("name", ["a", "a1_b", "a" * 63])
def test_a_task_name_that_is_a_column_name_is_accepted(name: str) -> None:
    assert parse_spec(with_task(f"name: {name}, question: q, labels: [x, y]")).tasks[0].name == name


@pytest.mark.parametrize("name", ["/etc", "..", "a/b", "-x", ".hidden", ""])
def test_a_job_name_that_could_be_a_path_is_refused(name: str) -> None:
    (line,) = lines_of(SMALLEST.replace("name: job", f"name: '{name}'"))
    assert line.startswith("name: write 1 to 63 letters, digits and . _ - without spaces")


@pytest.mark.parametrize("template", ["", "Text:", "{doc}", "{document}{document}"])
def test_a_document_template_needs_its_slot_once(template: str) -> None:
    (line,) = lines_of(SMALLEST + f"prompt: {{document: '{template}'}}\n")
    reason = "write {document} exactly once: the text is inserted there"
    assert line == f"prompt.document: {reason} (got {template!r}) in spec, line 8"


@pytest.mark.parametrize("overlap", [8, 9])
def test_chunks_that_would_stand_still_are_refused(overlap: int) -> None:
    documents = f"documents: {{max_tokens: 8, overlap_tokens: {overlap}, too_long: chunk}}\n"
    (line,) = lines_of(SMALLEST + documents)
    assert line.startswith("documents: overlap_tokens must be below max_tokens")
    assert parse_spec(SMALLEST + documents.replace("chunk", "tail")).documents.max_tokens == 8


def test_every_mistake_has_its_own_line() -> None:
    lines = lines_of(
        """
name: job
model: {path: '', dtype: int8}
input: {path: in.jsonl, column: body}
tasks:
- {name: A, question: q, labels: [x, x]}
"""
    )
    assert [line.split(": ")[0] for line in lines] == [
        "model.path",
        "model.dtype",
        "input.column",
        "output",
        "tasks.0.name",
        "tasks.0.labels",
    ]


def test_a_wrong_task_is_not_also_reported_as_a_missing_one() -> None:
    (line,) = lines_of(f"{HEAD}tasks: [3]\n")
    assert line.startswith("tasks.0: ")
    assert line.endswith("(got 3) in spec, line 6")


@pytest.mark.parametrize("text", ["", "- a\n", "text", "3", "null"])
def test_a_spec_that_is_no_mapping_is_refused(text: str) -> None:
    expected = r"^job\.yaml: write a mapping of keys to values( \(got |$)"
    with pytest.raises(SpecError, match=expected):
        parse_spec(text, place="job.yaml")


def test_a_missing_key_is_named_where_it_belongs() -> None:
    (line,) = lines_of(HEAD)
    assert line.startswith("tasks: missing; add it in ")


@pytest.mark.parametrize("labels", ["[yes, {no: [No]}]", "[[Yes], [No]]"])
def test_a_label_that_is_no_string_is_a_problem_of_its_list(labels: str) -> None:
    lines = lines_of(with_labels(labels))
    assert all(line.startswith("tasks.0.labels") for line in lines)


@pytest.mark.parametrize(
    "labels, fix",
    [
        ("[1, 2]", "tasks.0.labels: write each label as a text: ['1', '2'] (got [1, 2])"),
        ("{1: [x], 2: [y]}", "tasks.0.labels.1: write a text: '1' (got 1)"),
        ("[1.5, a]", "tasks.0.labels: write each label as a text: ['1.5', 'a'] (got [1.5, 'a'])"),
    ],
)
def test_a_label_that_is_a_number_is_refused_with_the_text_to_write(labels: str, fix: str) -> None:
    first, *_ = lines_of(with_labels(labels))
    assert first.startswith(fix)


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
def test_a_file_means_what_its_text_means(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(mark + DESIGN_EXAMPLE, encoding="utf-8")
    assert load_spec(path) == parse_spec(DESIGN_EXAMPLE)


def test_a_spec_is_frozen() -> None:
    spec = parse_spec(SMALLEST)
    with pytest.raises(ValidationError, match="frozen"):
        spec.output = "elsewhere"  # type: ignore[misc]


def test_a_spec_survives_its_own_json() -> None:
    spec = parse_spec(DESIGN_EXAMPLE)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_task_made_in_python_takes_a_plain_list_too() -> None:
    task = TaskSpec.model_validate({"name": "a", "question": "q", "labels": ["x", "y"]})
    assert task.labels == {"x": ("x",), "y": ("y",)}


def test_every_key_has_a_description_for_the_manual() -> None:
    models = [
        model
        for model in vars(schema).values()
        if isinstance(model, type) and issubclass(model, schema.Frozen)
    ]
    assert schema.JobSpec in models
    fields = [field for model in models for field in model.model_fields.items()]
    assert [name for name, field in fields if not field.description] == []
