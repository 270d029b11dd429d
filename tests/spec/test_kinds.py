"""Kinds of task: what is asked for each label, numbers as labels, contradictions, fingerprints."""

from __future__ import annotations

import json
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from pipeline.spec.fingerprint import fingerprints
from pipeline.spec.labels import equal_in_sql
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

MULTI: dict[str, Any] = {
    "name": "topic",
    "kind": "multi",
    "question": "About {label}?",
    "labels": {"law": ["the law"], "a/b": ["art"]},
}
SCORE: dict[str, Any] = {"name": "quality", "kind": "score", "question": "?", "labels": [0, 1.5, 3]}
CHOICE: dict[str, Any] = {"name": "spam", "question": "?", "labels": ["x", "y"]}


def spec(*tasks: dict[str, Any], **changes: Any) -> JobSpec:
    content = {"name": "j", "model": {"path": "m"}, "input": {"path": "i"}, "output": "o"}
    return parse_spec(json.dumps({**content, "tasks": tasks, **changes}))


def test_a_task_of_several_labels_is_asked_as_one_of_yes_or_no_for_each() -> None:
    several = spec({**MULTI, "readout": "folder/"}, SCORE, CHOICE)
    law, art, quality, spam = several.parts
    assert (law.name, art.name, quality.name, spam.name) == (
        *("topic.law", "topic.a/b", "quality", "spam"),
    )
    assert (law.question, art.question) == ("About the law?", "About art?")
    assert [*law.labels] == ["yes", "no"] and law.kind == "choice" and law.chunks == "max"
    assert art.readout == "folder/a%2Fb.safetensors"
    assert several.model_parts == several.parts and quality == several.tasks[1]


@pytest.mark.parametrize(
    "question, asked",
    [
        ("About {label}?", "About the law?"),
        ("About what?", "About what? the law: yes or no"),
        ("About what?\n", "About what? the law: yes or no"),
        ("About what?{answer}It is", "About what? the law: yes or no{answer}It is"),
        ("About what?{answer}{label}:", "About what?{answer}the law:"),
        ("About {labels}?", "About {labels}? the law: yes or no"),
    ],
)
def test_a_question_of_several_labels_names_each_of_them(question: str, asked: str) -> None:
    task = spec({**MULTI, "question": question}).tasks[0]
    assert task.parts[0].question == asked and task.question == question


def test_the_labels_of_a_score_are_numbers_as_texts() -> None:
    assert [*spec(SCORE).tasks[0].labels] == ["0", "1.5", "3"]
    assert spec(SCORE).tasks[0].values == (0, 1.5, 3)
    named = spec({**SCORE, "labels": {"1": ["one"], "2": ["two"]}})
    assert named.tasks[0].values == (1, 2) and spec(CHOICE).tasks[0].values == ()


@pytest.mark.parametrize(
    "one, other",
    [
        ("Yes", "yes"), ("\u0414\u0430", "\u0434\u0430"), ("\xc9", "\xe9"), ("\xdf", "\u1e9e"),
        ("\u03a3", "\u03c2"), ("\u0131", "I"), ("\xe9", "e\u0301"), ("\u212a", "K"),
    ],
)  # fmt: skip
def test_labels_are_distinguished_as_duckdb_distinguishes_columns(one: str, other: str) -> None:
    relation = duckdb.connect().from_arrow(pa.table({one: [1], "z": [1]}))
    try:
        relation.project(f'"{other}"')
        same = True
    except duckdb.BinderException:
        same = False
    assert bool(equal_in_sql([one, "z", other])) == same


def test_labels_without_a_column_each_may_differ_only_in_case() -> None:
    assert (
        len(spec({**CHOICE, "labels": ["Java", "java", "JAVA"], "top_k": 2}).tasks[0].labels) == 3
    )


def versions(*tasks: dict[str, Any], **hashes: Any) -> dict[str, str]:
    made = fingerprints(spec(*tasks), weights={"f": "1"}, dtype="float32", **hashes)
    return {task: version.id for task, version in made.items()}


def test_a_kind_is_a_part_of_the_version_and_no_other_version_changes() -> None:
    numbers = {**SCORE, "labels": ["0", "1"]}
    assert versions(numbers) != versions({**numbers, "kind": "choice"})
    assert versions({**numbers, "kind": "choice"}) == versions(
        {key: value for key, value in numbers.items() if key != "kind"}
    )
    both = {**MULTI, "readout": "r"}
    first = versions(both, CHOICE, readouts={"topic.law": "1", "topic.a/b": "2"})
    second = versions(both, CHOICE, readouts={"topic.law": "1", "topic.a/b": "3"})
    assert first["topic"] != second["topic"] and first["spam"] == second["spam"]
