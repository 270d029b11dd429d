"""The spec: an example of every part means what it says, and what is left out has its default."""

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


def with_labels(labels: str) -> str:
    """The smallest job with these labels in YAML."""
    return f"{HEAD}tasks:\n- {{name: a, question: Why, labels: {labels}}}\n"


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


@pytest.mark.parametrize("text", ["", "- a\n", "text", "3", "null"])
def test_a_spec_that_is_no_mapping_is_refused(text: str) -> None:
    expected = r"^job\.yaml: write a mapping of keys to values( \(got |$)"
    with pytest.raises(SpecError, match=expected):
        parse_spec(text, place="job.yaml")


def test_a_missing_key_is_named_where_it_belongs() -> None:
    (line,) = lines_of(HEAD)
    assert line.startswith("tasks: missing; add it in ")


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
