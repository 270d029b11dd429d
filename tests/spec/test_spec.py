"""The spec: what is left out has its default, and labels and stages have their meaning."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pipeline.errors import SpecError
from pipeline.runtime.job import reader_specs
from pipeline.spec.model import NO_MODEL
from pipeline.spec.parse import parse_spec, spec_of

SMALLEST = """
name: job
model: {path: some/model}
input: {path: in.jsonl}
output: out
tasks:
- {name: a, question: Why, labels: [x, y]}
"""
DEFAULTS: dict[str, Any] = {
    "model": {
        "engine": "assay",
        "tensor_parallel": 1,
        **dict.fromkeys(["base_url", "api_key_env", "api_key_file", "price", "revision"]),
        "concurrency": 4,
        "storage_options": {},
        "dtype": "auto",
        "device": "auto",
        "threads": "auto",
        "kv": "none",
    },
    "input": {
        "storage_options": {},
        "text": "text",
        "image": None,
        "id": None,
        "quoted": None,
        "shard_bytes": "auto",
    },
    "storage_options": {},
    "prompt": {
        "system": None,
        "instruction": "Read the text, then answer the question.",
        "examples": [],
        "document": "Text:\n{document}",
    },
    "documents": {"max_tokens": 2048, "too_long": "head", "overlap_tokens": 128},
    "max_error_rate": None,
    "filter": None,
    "gold": {"path": None, "id": None, "text": None, "columns": {}, "values": {}, "scores": {}},
    "publish": {
        "gates": [],
        "max_psi": None,
        "max_flip_rate": None,
        "max_failing": None,
        "keep_promises": False,
    },
}
ABSENT = ["when", "model", "documents", "readout", "beam", "top_k", "separator", "guide"]
TASK_DEFAULTS = dict.fromkeys(ABSENT) | {"chunks": "max", "length_penalty": 0}


def test_what_is_left_out_has_the_documented_default() -> None:
    read = parse_spec(SMALLEST).model_dump(mode="json")
    written = yaml.safe_load(SMALLEST)
    (task,) = read.pop("tasks")
    asked = {"name": "a", "kind": "choice", "question": "Why"}
    asked |= {"labels": {"x": ["x"], "y": ["y"]}}
    assert task == TASK_DEFAULTS | asked
    for section in ("model", "input"):
        written[section] |= DEFAULTS[section]
    del written["tasks"]
    assert read == DEFAULTS | written


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
    read = parse_spec(SMALLEST.replace("[x, y]", labels)).tasks[0].labels
    assert read == meaning
    assert list(read) == list(meaning)


def test_a_spec_whose_stages_bring_their_own_models_needs_none() -> None:
    classifier = {"classifier": {"kind": "fasttext", "path": "c"}}
    asked = {"question": "one", "model": {"path": "m"}}
    task = {"name": "a", "labels": ["yes", "no"]}
    content = {"name": "job", "input": {"path": "i"}, "output": "o"}
    cascade: dict[str, Any] = {"stages": [classifier, asked]}
    spec = spec_of({**content, "tasks": [{**task, "cascade": cascade}]})
    assert spec.model == NO_MODEL
    assert [own.model.path for own, _ in reader_specs(spec)] == ["", "m"]
    cascade |= {"stages": [classifier, {"question": "one"}]}
    with pytest.raises(SpecError, match="model: missing; add it"):
        spec_of({**content, "tasks": [{**task, "cascade": cascade}]})


def test_stages_of_one_model_are_answered_together_and_the_first_with_the_other_tasks() -> None:
    trained = {"readout": "r"}
    asked, of_own = {"question": "one"}, {"question": "two", "model": {"path": "own"}}
    classifier = {"classifier": {"kind": "onnx", "path": "c"}}
    short = {**asked, "documents": {"max_tokens": 9}}
    tasks: list[dict[str, Any]] = [{"name": "plain", "question": "three"}]
    for name, stages in {
        "a": [asked, of_own],
        "b": [trained, asked],
        "c": [classifier, trained, of_own],
        "d": [short, asked],
        "e": [short, asked],
    }.items():
        tasks.append({"name": name, "cascade": {"stages": stages}})
    labelled = [{"labels": ["yes", "no"], **task} for task in tasks]
    spec = spec_of({**yaml.safe_load(SMALLEST), "model": {"path": "m"}, "tasks": labelled})
    readers = [
        (own.model.path, own.documents.max_tokens, places) for own, places in reader_specs(spec)
    ]
    stage = "tasks.{}.cascade.stages.{}".format
    shared = {"model": "model", "documents": "documents"}
    first = {name: stage(i, 0) for i, name in enumerate("abc", 1)}
    second = {name: stage("abcde".index(name) + 1, 1) for name in "bcde"}
    of_stage = stage(4, 0) + ".documents"
    assert readers == [
        ("m", 2048, shared | {"plain": "tasks.0"} | first),
        ("m", 9, shared | {"documents": of_stage, "d": stage(4, 0), "e": stage(5, 0)}),
        ("own", 2048, shared | {"model": stage(1, 1) + ".model", "a": stage(1, 1)}),
        ("m", 2048, shared | second),
        ("own", 2048, shared | {"model": stage(3, 2) + ".model", "c": stage(3, 2)}),
    ]


JOB = {"name": "job", "model": {"path": "m"}, "input": {"path": "i"}, "output": "o"}


@pytest.mark.parametrize(
    ("cascade", "promise"),
    [
        ("auto", {"agree": 0.98}),
        ({"agree": 0.9}, {"agree": 0.9}),
        ({"label": "x", "recall": 0.9, "threshold": 0.7}, {"recall": 0.9, "label": "x"}),
    ],
)
def test_a_cascade_without_stages_has_the_question_as_its_last_one(
    cascade: Any, promise: dict[str, Any]
) -> None:
    task = {"name": "a", "labels": ["x", "y"], "question": "q", "cascade": cascade}
    spec = spec_of({**JOB, "tasks": [task]})
    [own] = spec.cascades
    assert own.cascade.is_auto and promise.items() <= own.cascade.promise.items()
    assert own.whole.question == "q" and own.whole.when is None
    assert spec_of(spec.model_dump(mode="json", exclude_defaults=True)) == spec


@pytest.mark.parametrize(
    ("keep", "cascade", "threshold"),
    [
        ("a.p.x < 0.3", {"recall": 0.9}, 0.3),
        ('doc.n > .2 and not a.p."x" >= 0.30', {"recall": 0.9}, 0.3),
        ("a.p.y > .7", {"precision": 0.9, "label": "y"}, 0.7),
        ("a.p.x < 0.3", {"recall": 0.9, "threshold": 0.5}, 0.5),
        ("a.p.x < 0.3 and a.p.x > 0.1", {"recall": 0.9}, 0.5),
        ("a.p.x < 0.3 or not a.p.x >= .30", {"recall": 0.9}, 0.3),
        ("a.p.y < 0.3 and ba.p.x < 0.2", {"recall": 0.9}, 0.5),
        ("a.p.x < 0.3", {"agree": 0.9}, 0.5),
    ],
)
def test_recall_has_the_threshold_of_the_filter(
    keep: str, cascade: dict[str, Any], threshold: float
) -> None:
    task = {"name": "a", "labels": ["x", "y"], "question": "q", "cascade": cascade}
    spec = spec_of({**JOB, "tasks": [task], "filter": {"keep": keep}})
    assert spec.cascades[0].cascade.promise["threshold"] == threshold
    assert spec_of(spec.model_dump(mode="json", exclude_defaults=True)) == spec


def test_a_teacher_answers_the_last_stage() -> None:
    teacher = {"path": "large"}
    task = {"name": "a", "labels": ["x", "y"], "question": "q", "cascade": {"teacher": teacher}}
    [own] = spec_of({**JOB, "tasks": [task]}).cascades
    assert own.whole.model == own.cascade.teacher and own.whole.model.path == "large"
