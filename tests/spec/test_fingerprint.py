"""A fingerprint changes exactly when an answer could change."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pipeline.spec.fingerprint import cascade_fingerprint, fingerprints
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

SPEC: dict[str, Any] = {
    "name": "job",
    "model": {"path": "m"},
    "input": {"path": "in"},
    "output": "out",
    "prompt": {"instruction": "Read."},
    "documents": {"max_tokens": 100},
    "tasks": [
        {"name": "a", "question": "A?", "labels": {"x": ["X"], "y": ["Y"]}},
        {"name": "b", "question": "B?", "labels": ["p", "q"]},
    ],
}
EXAMPLE = {"document": "d", "question": "q", "answer": "X"}
WEIGHTS = {"model.safetensors": "1", "tokenizer.json": "2"}


def spec(**changes: Any) -> JobSpec:
    return parse_spec(yaml.safe_dump({**SPEC, **changes}, sort_keys=False))


def fp(of: JobSpec, *, weights: dict[str, str] = WEIGHTS, dtype: str = "float32") -> str:
    return fingerprints(of, weights=weights, dtype=dtype)["a"].id


def with_task(documents: Any = SPEC["documents"], **changes: Any) -> JobSpec:
    """The spec with changes of its first task."""
    return spec(documents=documents, tasks=[{**SPEC["tasks"][0], **changes}, SPEC["tasks"][1]])


@pytest.mark.parametrize(
    "changed",
    [
        with_task(question="A!"),
        with_task(labels={"x": ["X", "x"], "y": ["Y"]}),
        with_task(labels={"y": ["Y"], "x": ["X"]}),
        spec(prompt={"instruction": "Read well."}),
        spec(prompt={"instruction": "Read.", "system": "s"}),
        spec(prompt={"instruction": "Read.", "document": "{document}"}),
        spec(prompt={"instruction": "Read.", "examples": [EXAMPLE]}),
        spec(documents={"max_tokens": 101}),
        spec(documents={"max_tokens": 100, "too_long": "tail"}),
        spec(model={"path": "m", "dtype": "int8"}),
        spec(model={"path": "m", "dtype": "fp8"}),
        spec(model={"path": "m", "kv": "int8"}),
        spec(model={"path": "m", "engine": "vllm"}),
        with_task(length_penalty=0.5),
        with_task(beam=8),
        with_task(top_k=2),
        with_task(labels=["x/1", "y"], separator="/"),
    ],
)
def test_what_can_change_an_answer_changes_the_fingerprint(changed: JobSpec) -> None:
    assert fp(changed) != fp(spec())


@pytest.mark.parametrize("more", [{"beam": 8}, {"top_k": 2}])
def test_what_changes_a_task_changes_no_other(more: dict[str, Any]) -> None:
    before, after = (
        fingerprints(each, weights=WEIGHTS, dtype="float32") for each in (spec(), with_task(**more))
    )
    assert before["a"].id != after["a"].id and before["b"].id == after["b"].id


@pytest.mark.parametrize(
    "other", [{"weights": WEIGHTS | {"tokenizer.json": "3"}}, {"dtype": "bfloat16"}]
)
def test_other_weights_and_another_number_format_change_it(other: dict[str, Any]) -> None:
    assert fp(spec(), **other) != fp(spec())


@pytest.mark.parametrize(
    "changed",
    [
        spec(name="other"),
        spec(output="elsewhere"),
        spec(input={"path": "more", "text": "body"}),
        spec(model={"path": "the same, elsewhere"}),
        spec(model={"path": "m", "kv": "none"}),
        spec(model={"path": "m", "threads": 4}),
        spec(tasks=[SPEC["tasks"][0]]),
        spec(tasks=[{**SPEC["tasks"][1], "question": "C?"}, SPEC["tasks"][0]]),
        spec(documents={"max_tokens": 100, "overlap_tokens": 7}),
        spec(gold={"path": "g.csv", "values": {"1": "x"}}, publish={"gates": ["a.f1 > 0"]}),
        with_task(chunks="mean"),
        with_task(guide="Is it an X, as people say it?"),
        with_task(length_penalty=0, beam=None, top_k=None),
    ],
)
def test_what_cannot_change_an_answer_does_not(changed: JobSpec) -> None:
    assert fp(changed) == fp(spec())


def test_of_a_server_s_answers_the_fingerprint_has_its_model_alone() -> None:
    server = {"path": "m", "engine": "openai", "base_url": "http://a/v1"}
    served = spec(model=server)
    moved = {"base_url": "http://b/v1", "concurrency": 9, "price": {"input": 1, "output": 2}}
    assert fp(served) == fp(spec(model={**server, **moved})) == fp(served, dtype="bfloat16")
    assert fp(served) != fp(served, weights={"model": "m", "revision": "m-2"})


def test_a_fingerprint_changes_only_with_what_it_is_of() -> None:
    assert fp(spec()) == "6962f280367a6455"
    # — 8-bit products before their rows were evened out have another one
    assert fp(spec(model={"path": "m", "dtype": "int8"})) == "846ee71ccc3ac441"


def test_chunks_matter_where_documents_are_chunked() -> None:
    chunk = {"max_tokens": 100, "too_long": "chunk", "overlap_tokens": 5}
    base = with_task(documents=chunk)
    assert fp(base) != fp(with_task(documents={**chunk, "overlap_tokens": 6}))
    assert fp(base) != fp(with_task(documents=chunk, chunks="mean"))
    # — the default is `max` for two labels, as in all versions, and `mean` for more
    assert fp(base) == fp(with_task(documents=chunk, chunks="max"))
    three = {"documents": chunk, "labels": ["x", "y", "z"]}
    assert fp(with_task(**three)) == fp(with_task(**three, chunks="mean"))


def test_a_version_of_a_cascade_differs_from_one_without_by_the_cascade_alone() -> None:
    plain = fingerprints(spec(), weights=WEIGHTS, dtype="float32")["a"]
    versions = [
        cascade_fingerprint(spec().tasks[0], {"stages": ["1", plain.id], "at": at}) for at in (1, 2)
    ]
    assert versions[0].changes(plain) == plain.changes(versions[0]) == ("cascade",)
    assert versions[0].changes(versions[1]) == ("cascade",)
