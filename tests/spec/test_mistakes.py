"""A mistake in a spec is one line: the place, the value that is written there, and the fix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import Problem, SpecError
from pipeline.spec.labels import MOST_COLUMNS
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import DOCUMENT_COLUMNS

JOB = {"name": "job", "model": {"path": "m"}, "input": {"path": "i"}, "output": "o"}
TASK = {"name": "a", "question": "Why?", "labels": ["x/1", "y"]}
TRAINED = {**TASK, "question": None, "readout": "r"}
ALONE = {"name": "a", "labels": ["x", "y"]}
ONNX = {"kind": "onnx", "path": "c"}
ASKED = {"question": "one"}
MANY = [f"label{i}" for i in range(MOST_COLUMNS + 1)]


def task(**changes: Any) -> dict[str, Any]:
    """A job of one task."""
    return {"tasks": [{**TASK, **changes}]}


def multi(**changes: Any) -> dict[str, Any]:
    """A job of one task of kind `multi`."""
    return task(**{"kind": "multi", **changes})


def stages(*stages: object, **changes: Any) -> dict[str, Any]:
    """A job of one task with a cascade."""
    cascade = {"stages": list(stages)}
    return task(**{"question": None, "cascade": cascade, **changes})


def read(changes: dict[str, Any]) -> JobSpec:
    return parse_spec(json.dumps({**JOB, **task(), **changes}))


def written_at(content: Any, place: str) -> Any:
    """The value at a place of the spec; None if there is none."""
    for key in place.split("."):
        content = content[int(key)] if isinstance(content, list) else content.get(key)
    return content


# What is written, the place of its mistake, and the words of the fix that a user needs.
KEYS = [
    ({"modle": 3}, "modle", "write model"),
    ({"documents": {"max_token": 3}}, "documents.max_token", "write max_tokens"),
    (task(label=1), "tasks.0.label", "write labels"),
    (
        {"tasks": [{"name": "a", "labels": ["x", "y"], "quesion": "?"}]},
        "tasks.0.quesion",
        "question",
    ),
    ({"documents": {"kind": "encoder"}}, "documents.kind", "kind belongs below tasks"),
    ({"documents": {"max_tokens": "9.5"}}, "documents.max_tokens", "a whole number"),
    ({"input": {"path": "i", "quoted": "so"}}, "input.quoted", "true or false"),
    ({"documents": {"max_tokens": 0}}, "documents.max_tokens", "above 0"),
    ({"documents": {"overlap_tokens": -1}}, "documents.overlap_tokens", "at least 0"),
    ({"documents": {"too_long": "cut"}}, "documents.too_long", "'head', 'tail', 'middle' or"),
    (
        {"documents": {"max_tokens": 8, "overlap_tokens": 8, "too_long": "chunk"}},
        "documents",
        "overlap_tokens must be below max_tokens",
    ),
    (
        {"prompt": {"examples": [{"document": "d", "question": "q"}]}},
        "prompt.examples.0.answer",
        "missing; add it",
    ),
    *(
        ({"prompt": {"document": template}}, "prompt.document", "{document} exactly once")
        for template in ("", "Text:", "{doc}", "{document}{document}")
    ),
    ({"filter": {"keep": ""}}, "filter.keep", "this one is empty"),
    *(
        ({"name": name}, "name", "1 to 63 letters, digits and . _ -")
        for name in ("a b", "/etc", "..", "a/b", "-x", ".hidden", "")
    ),
    ({"tasks": [3]}, "tasks.0", "write a mapping"),
    ({"tasks": [TASK, TASK]}, "tasks", "each task its own name"),
    *(
        (task(name=name), "tasks.0.name", "1 to 63 lower case letters, digits and _")
        for name in ("A", "1a", "_a", "a-b", "a b", "é", "a.b", "", "a" * 64, "a\n", "../a", "a/b")
    ),
]
LABELS = [
    (["x", "y", "x"], "", "list each label once"),
    ({"x": ["X", "S"], "y": ["S"]}, "", "write each text once"),
    ({"x": ["X", "X"], "y": ["Y"]}, "", "write each text once"),
    ({"x": [], "y": ["Y"]}, ".x", "at least 1"),
    ({"x": [""], "y": ["Y"]}, ".x.0", "this one is empty"),
    ({"x": "X", "y": ["Y"]}, ".x", "write a list"),
    (["x"], "", "at least 2"),
    (["yes", {"no": ["No"]}], "", "{name: [text]} for texts: [{'no': ['No']}]"),
    (["a", None], "", "write null in quotes"),
    ({"a": ["x", None], "b": ["y"]}, ".a.1", "write a text"),
]
SCORING = [
    (task(chunks="min"), "tasks.0.chunks", "'max' or 'mean'"),
    (task(labels=["x", "y", "z"], chunks="max"), "tasks.0.chunks", "write mean"),
    (task(length_penalty=-1), "tasks.0.length_penalty", "at least 0"),
    (task(beam=0), "tasks.0.beam", "above 0"),
    (task(top_k=0), "tasks.0.top_k", "above 0"),
    (task(separator=">"), "tasks.0.separator", "no label contains it"),
    (task(labels=MANY), "tasks.0.top_k", "top_k: 10"),
    ({"tasks": [{**TRAINED, "beam": 8}]}, "tasks.0.beam", "a readout takes no beam; remove one"),
    (
        {"tasks": [{**ALONE, "length_penalty": 1}]},
        "tasks.0.length_penalty",
        "a sequence classifier takes no length_penalty",
    ),
]
KINDS = [
    (multi(readout="r.safetensors"), "readout", "a folder"),
    (multi(top_k=1), "top_k", "not supported with kind: multi"),
    (multi(beam=2), "beam", "yes or no"),
    (multi(labels={"a": ["x", "z"], "b": ["y"]}), "labels", "one text"),
    (multi(labels=["Law", "law"]), "labels", "differ only in case"),
    (task(labels=["Yes", "no", "yes"]), "labels", "'Yes' and 'yes'"),
    (task(labels={"a": ["x"], "b": ["y"], "A": ["z"]}), "labels", "'a' and 'A'"),
    (task(labels=["C++", "c++"]), "labels", "rename one"),
    (task(labels=["ÉTÉ", "ÉtÉ"]), "labels", "'ÉTÉ' and 'ÉtÉ'"),
    *(
        (task(name=name), "name", "every document has a column")
        for name in ("doc", *DOCUMENT_COLUMNS)
    ),
    (task(kind="score", labels=["1e1", "1E1"]), "labels", "rise"),
    (task(kind="score", labels=["low", "high"]), "labels", "'low' is not a number"),
    (task(kind="score", labels=[1, 3, 2]), "labels", "rise"),
    (task(kind="score", labels=[0, 1], top_k=2), "top_k", "all its labels"),
    (task(question="?{answer}It is{answer}"), "question", "write {answer} once"),
    (task(question=" \n"), "question", "this one has only spaces"),
]
OTHERS = [
    (task(readout="r", question=None, classifier=ONNX), "tasks.0.readout", "one of the two"),
    (task(classifier=ONNX), "tasks.0.question", "a classifier takes no question"),
    (task(classifier={"kind": "onnx"}, question=None), "tasks.0.classifier", "needs a path"),
    (
        task(classifier={"kind": "language", "path": "a"}, question=None),
        "tasks.0.classifier",
        "remove path",
    ),
    ({"model": {"path": "m", "kv": "int8"}, "tasks": [ALONE]}, "model.kv", "sequence classifier"),
    (
        task(classifier=ONNX, question=None, kind="multi"),
        "tasks.0.kind",
        "takes a question, a readout or the head of an encoder",
    ),
    (
        {"tasks": [{"name": "a", "kind": "multi", "labels": {"x": ["x", "z"], "y": ["y"]}}]},
        "tasks.0.labels",
        "write one class for each label",
    ),
    (task(explain={"tokens": 4}), "tasks.0.explain", "no such key"),
]
STAGES = [
    (stages({"cascade": {}}, ASKED), "stages.0", "a stage has no cascade of its own"),
    (stages(ASKED, {}), "stages.1.question", "other tasks ask the same model"),
    (
        stages({**ASKED, "labels": ["y", "x/1"]}, ASKED),
        "",
        "stage 1 has the labels ['y', 'x/1']; write those of the task in the same order",
    ),
    (stages({"classifier": ONNX, "readout": "r"}, ASKED), "stages.0.readout", "one of the two"),
    (stages({"classifier": ONNX, "model": {"path": "m"}}, ASKED), "stages.0.model", "no model"),
    (stages({"classifier": ONNX, "documents": {}}, ASKED), "stages.0.documents", "no documents"),
    (stages({**ASKED, "top_k": 2}, ASKED), "stages.0.top_k", "is set in the task"),
    (
        stages({**ASKED, "documents": {"max_tokens": 0}}, ASKED),
        "stages.0.documents.max_tokens",
        "above 0",
    ),
    (
        stages({**ASKED, "documents": {"max_token": 9}}, ASKED),
        "stages.0.documents.max_token",
        "write max_tokens",
    ),
    (
        stages({**ASKED, "model": {"path": "m", "kind": "encoder"}}, ASKED),
        "stages.0.model.kind",
        "remove it",
    ),
    (
        stages({"model": {"path": "e", "dtype": "int8"}}, ASKED),
        "stages.0.model.dtype",
        "not supported for a sequence classifier",
    ),
    (
        stages(ASKED, {**ASKED, "labels": {"x/1": ["A"], "y": ["A"]}}),
        "stages.1.labels",
        "each text once",
    ),
]
KEPT = {"filter": {"keep": "a.p.x < 0.3"}}
VLLM = {"path": "m", "engine": "vllm"}
NO_URL = {"path": "m", "engine": "openai"}
SERVER = {**NO_URL, "base_url": "http://localhost:8000/v1"}
OF_CASCADES = [
    (stages(ASKED, ASKED, beam=8), "tasks.0.beam", "a cascade takes no beam"),
    (stages(ASKED, ASKED, question="Why?"), "tasks.0.question", "a cascade takes no question"),
    (stages(ASKED, ASKED, top_k=2), "tasks.0.top_k", "remove the task's top_k"),
    (
        task(cascade={"recall": 0.9, "label": "none"}),
        "tasks.0.cascade",
        "label 'none' is not one of",
    ),
    (task(cascade={"label": "a"}), "tasks.0.cascade.label", "is of recall and precision"),
    (task(cascade={"threshold": 0.3}), "tasks.0.cascade.threshold", "is of recall and precision"),
    (
        stages(ASKED, ASKED, cascade={"teacher": {"path": "n"}, "stages": [ASKED, ASKED]}),
        "tasks.0.cascade.teacher",
        "write it as the model of the last stage",
    ),
    (task(cascade={"teacher": VLLM}), "tasks.0.cascade.teacher", "write engine: openai"),
    (task(cascade={"teacher": NO_URL}), "tasks.0.cascade.teacher.base_url", "localhost:8000/v1"),
    (task(question="Is it?{answer}It", cascade={"teacher": SERVER}), "tasks.0.question", "begins"),
    (task(cascade="auto", length_penalty=-1), "tasks.0.length_penalty", "at least 0"),
    (
        stages(*({**ASKED, "model": {**SERVER, "path": name}} for name in "ab")),
        "tasks",
        "a run has one",
    ),
    (task(cascade={"agree": 0.9, "recall": 0.9}), "tasks.0.cascade.agree", "is of all labels"),
    (task(cascade={"agree": 1}), "tasks.0.cascade.agree", "write a number below 1"),
    (task(cascade={"file": "f"}), "tasks.0.cascade.file", "no such key"),
    (task(cascade="yes"), "tasks.0.cascade", "write a mapping"),
    (multi(cascade={"recall": 0.9}), "tasks.0.cascade", "are of one label; add label"),
    ({"model": VLLM, **task(cascade="auto")}, "tasks.0.cascade", "one of engine assay"),
    ({"model": SERVER, **task(cascade="auto")}, "tasks.0.cascade", "one of engine assay"),
    (task(question=None, cascade="auto"), "tasks.0.cascade", "to a question"),
    ({**KEPT, **task(name="a(", cascade={"recall": 0.9})}, "tasks.0.name", "lower case"),
]
ENGINES = [
    ({"model": {"path": "m", "engine": "sglang"}}, "model.engine", "'assay', 'vllm' or 'openai'"),
    (task(model={"path": "n"}), "tasks.0.model", "only a stage of a cascade"),
    (task(documents={"max_tokens": 9}), "tasks.0.documents", "only a stage of a cascade"),
    (stages(ASKED, ASKED, documents={}), "tasks.0.documents", "a cascade takes no documents"),
    ({"model": {"path": "m", "tensor_parallel": 2}}, "model.tensor_parallel", "engine: assay"),
    ({"model": {**VLLM, "tensor_parallel": 0}}, "model.tensor_parallel", "above 0"),
    ({"model": {**VLLM, "dtype": "int8"}}, "model.dtype", "with engine: vllm"),
    ({"model": {**VLLM, "dtype": "fp8"}}, "model.dtype", "with engine: vllm"),
    ({"model": {**VLLM, "kv": "int8"}}, "model.kv", "with engine: vllm"),
    ({"model": VLLM, "tasks": [TRAINED]}, "tasks.0.readout", "with engine: vllm"),
    ({"model": VLLM, **task(beam=8)}, "tasks.0.beam", "with engine: vllm"),
    (
        {"model": VLLM, **stages({"model": {"path": "n"}, **ASKED}, ASKED)},
        "tasks.0.cascade.stages.0.model",
        "with engine: vllm",
    ),
    (
        {"model": VLLM, "tasks": [ALONE]},
        "tasks.0.question",
        "with engine: vllm each task has a question",
    ),
    ({"model": NO_URL}, "model.base_url", "http://localhost:8000/v1"),
    ({"model": {**SERVER, "dtype": "int8"}}, "model.dtype", "with engine: openai"),
    ({"model": {**SERVER, "threads": 2}}, "model.threads", "with engine: openai"),
    ({"model": {**VLLM, "concurrency": 9}}, "model.concurrency", "with engine: vllm"),
    ({"model": {**SERVER, "price": {"input": 1}}}, "model.price.output", "missing"),
    ({"model": SERVER, "tasks": [TRAINED]}, "tasks.0.readout", "with engine: openai"),
    ({"model": SERVER, **task(length_penalty=1)}, "tasks.0.length_penalty", "engine: openai"),
    ({"model": SERVER, **task(question="Q{answer}A:")}, "tasks.0.question", "remove {answer}"),
    ({"model": SERVER, **task(labels=["spam", "sports"])}, "tasks.0.labels", "begin with 's'"),
    (
        {"tasks": [TASK, {**ALONE, "name": "b"}]},
        "tasks.1.question",
        "other tasks ask the same model",
    ),
]
IMAGES = [
    ({"model": {"path": "m", "dtype": "int8"}}, "model.dtype: int8"),
    ({"model": {"path": "m", "dtype": "fp8"}}, "model.dtype: fp8"),
    ({"model": VLLM}, "model.engine: vllm"),
    ({"model": SERVER}, "model.engine: openai"),
    ({"documents": {"too_long": "chunk"}}, "documents.too_long: chunk"),
    (
        {"prompt": {"examples": [{"document": "d", "question": "q", "answer": "y"}]}},
        "prompt.examples",
    ),
    (task(classifier=ONNX, question=None), "tasks.0.classifier"),
    (stages(ASKED, ASKED), "tasks.0.cascade"),
]


@pytest.mark.parametrize(
    "changes, place, fix",
    [
        *KEYS,
        *((task(labels=labels), f"tasks.0.labels{below}", fix) for labels, below, fix in LABELS),
        *SCORING,
        *((job, f"tasks.0.{key}", fix) for job, key, fix in KINDS),
        *OTHERS,
        *((job, f"tasks.0.cascade.{below}".rstrip("."), fix) for job, below, fix in STAGES),
        *OF_CASCADES,
        *ENGINES,
        *(
            ({**job, "input": {"path": "i", "image": "png"}}, "input.image", f"{key}; remove")
            for job, key in IMAGES
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_place_its_value_and_the_fix(
    changes: dict[str, Any], place: str, fix: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read(changes)
    (problem,) = caught.value.problems
    assert problem.place == place
    assert repr(problem.value) == repr(written_at({**JOB, **task(), **changes}, place))
    assert fix in problem.fix
    assert len(str(caught.value).splitlines()) == 1 and caught.value.exit_code == 2


@pytest.mark.parametrize(
    "name, key, fix",
    [
        ("api_key_env", "sk-proj-0123456789abcdef", "never the key itself"),
        ("api_key_env", "AIzaSyD0123456789abcdef", "never the key itself"),
        ("api_key_file", "sk-proj-0123456789abcdef", "looks like a key"),
        ("api_key_file", "0123456789abcdef0123456789abcdef", "looks like a key"),
        ("api_key", "sk-proj-0123456789abcdef", "write api_key_env"),
        ("base_url", "https://me:sk-proj-0123@host/v1", "holds a password"),
    ],
)
def test_a_server_s_key_in_a_spec_is_refused_and_not_repeated(
    name: str, key: str, fix: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read({"model": {**SERVER, name: key}})
    (problem,) = caught.value.problems
    assert problem.place == f"model.{name}" and fix in problem.fix
    assert "0123" not in str(caught.value)


@pytest.mark.parametrize(
    "labels, read",
    [
        ("[007, 2.10, 1_000]", ["007", "2.10", "1_000"]),
        ("[+1, -0, .50]", ["+1", "-0", ".50"]),
        ("{0x1F: [1], null: [~x]}", ["0x1F", "null"]),
    ],
)
def test_a_number_in_place_of_a_text_is_read_as_it_is_written(labels: str, read: list[str]) -> None:
    spec = parse_spec("{name: 1, model: {path: m, revision: 0012345}, input: {path: i}, output: o, "
                      f"tasks: [{{name: a, question: q, labels: {labels}}}]}}")  # fmt: skip
    assert list(spec.tasks[0].labels) == read
    assert (spec.name, spec.model.revision) == ("1", "0012345")


def test_a_number_or_a_boolean_may_be_written_in_quotes() -> None:
    spec = read({"documents": {"max_tokens": "9"}, "input": {"path": "i", "quoted": "true"}})
    assert spec.documents.max_tokens == 9 and spec.input.quoted is True


def test_every_mistake_is_reported_also_beside_a_cascade() -> None:
    wrong = stages(
        {"classifier": ONNX, **ASKED}, {"model": {"path": "e"}}, name="A", beam=0, chunks="min"
    )
    wrong |= {"name": "a b", "model": {"path": "", "dtype": "int4"}, "documents": {"kept": 1}}
    with pytest.raises(SpecError) as caught:
        read(wrong)
    problems: tuple[Problem, ...] = caught.value.problems
    assert [problem.place for problem in problems] == [
        "name",
        "model.path",
        "model.dtype",
        "documents.kept",
        "tasks.0.name",
        "tasks.0.chunks",
        "tasks.0.cascade.stages.0.question",
        "tasks.0.beam",
    ]


@pytest.mark.parametrize(
    "job",
    [
        task(name="a1_b"),
        task(name="a" * 63),
        task(name="rows"),
        task(labels=MANY[:-1]),
        task(labels=MANY, top_k=3),
        task(readout="r", top_k=2, separator="/"),
        task(beam=8),
        {"tasks": [TRAINED]},
        {"model": {**VLLM, "tensor_parallel": 8}},
        {"documents": {"max_tokens": 8, "overlap_tokens": 9, "too_long": "tail"}},
    ],
)
def test_what_is_next_to_a_mistake_is_read(job: dict[str, Any]) -> None:
    assert read(job).tasks
