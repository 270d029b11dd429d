"""Flat columns: no two names are equal, and each holds the values of its source."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ledger.columns import ANSWER_COLUMNS, answers_type
from pipeline.ledger.flat import flat_columns, flatten, json_values
from pipeline.ledger.rows import DOCUMENT_SCHEMA, INPUT, TEXT_COLUMN

TASK = answers_type(ANSWER_COLUMNS, ["toxic", "label", "a.b"])
RANKED_TASK = answers_type(("label", "top", "levels", "mass", "status"), ["a", "b"])


def names(schema: pa.Schema) -> dict[tuple[str, ...], str]:
    return {column.source: column.name for column in flat_columns(schema)}


def test_a_name_is_the_path_and_the_answer_has_the_name_of_its_task() -> None:
    schema = pa.schema([*DOCUMENT_SCHEMA, (TEXT_COLUMN, pa.large_string()), ("toxic", TASK)])
    assert [column.name for column in flat_columns(schema)] == [
        *DOCUMENT_SCHEMA.names,
        "text",
        "toxic",
        *("toxic_p_toxic", "toxic_p_label", "toxic_p_a.b"),
        *("toxic_mass", "toxic_margin", "toxic_n_tokens", "toxic_n_chunks", "toxic_status"),
    ]


def test_a_name_that_is_taken_gets_a_number() -> None:
    plain = answers_type(ANSWER_COLUMNS, ["Yes", "yes", "yes_2"])
    tasks = ((task, plain) for task in ("a", "a_status", "text"))
    schema = pa.schema([("doc_id", pa.string()), (TEXT_COLUMN, pa.large_string()), *tasks])
    flat = names(schema)
    assert flat["a_status", "label"] == "a_status" and flat["a", "status"] == "a_status_2"
    assert flat[(TEXT_COLUMN,)] == "text" and flat["text", "label"] == "text_2"
    of_labels = [flat["a", "p", label] for label in ("Yes", "yes", "yes_2")]
    assert of_labels == ["a_p_Yes", "a_p_yes_2", "a_p_yes_2_2"]


def test_a_column_of_the_input_is_no_answer_also_if_it_is_called_label() -> None:
    doc = pa.struct([(name, pa.string()) for name in ("source", "label", "labels")])
    flat = names(pa.schema([("doc_id", pa.string()), ("toxic", TASK), (INPUT, doc)]))
    assert [flat[INPUT, name] for name in ("source", "label", "labels")] == [
        *("doc_source", "doc_label", "doc_labels")
    ]


PARTS = st.text("aA_2p", min_size=1, max_size=4)


@given(
    tasks=st.dictionaries(
        st.from_regex("[ap][a_2p]{0,3}", fullmatch=True),
        st.lists(PARTS, min_size=1, max_size=4, unique=True),
        max_size=4,
    )
)
def test_no_two_names_are_equal_and_every_value_has_one(tasks: dict[str, list[str]]) -> None:
    fields = [(task, answers_type(ANSWER_COLUMNS, labels)) for task, labels in tasks.items()]
    flat_names = names(pa.schema([*DOCUMENT_SCHEMA, *fields]))
    assert len({name.casefold() for name in flat_names.values()}) == len(flat_names)
    values = sum(len(ANSWER_COLUMNS) - 1 + len(labels) for labels in tasks.values())
    assert len(flat_names) == len(DOCUMENT_SCHEMA) + values
    assert all(
        flat_names[task, "label"] == task for task in tasks if task not in DOCUMENT_SCHEMA.names
    )


ANSWER: dict[str, Any] = {
    "label": "toxic",
    "p": {"toxic": 0.1, "label": 0.2, "a.b": 0.7},
    "mass": None,
    "status": "ok",
}
NO_ANSWER = {"label": None, "p": None, "status": "empty"}


@pytest.mark.parametrize("start", [0, 1])
def test_each_value_is_that_of_its_source(start: int) -> None:
    """Also of a part of an array, and null below a struct that is null."""
    schema = pa.schema([("doc_id", pa.string()), ("toxic", TASK)])
    rows = [{"doc_id": "x", "toxic": ANSWER}, {"doc_id": "y", "toxic": NO_ANSWER}] * 2
    batch = pa.RecordBatch.from_pylist(rows, schema).slice(start, 3)
    flat = flatten(batch, flat_columns(schema))
    assert flatten(pa.Table.from_batches([batch]), flat_columns(schema)).equals(
        pa.Table.from_batches([flat])
    )
    for row, source in zip(json_values(flat).to_pylist(), rows[start:], strict=False):
        answer = source["toxic"]
        assert isinstance(answer, dict)
        p = answer["p"] or {}
        assert row["doc_id"] == source["doc_id"] and row["toxic"] == answer["label"]
        assert row["toxic_p_a.b"] == p.get("a.b") and row["toxic_p_label"] == p.get("label")
        assert row["toxic_mass"] is None and row["toxic_status"] == answer["status"]


def test_json_has_the_digits_of_a_float32_and_no_nan() -> None:
    top = [{"label": "a", "p": 0.1}, {"label": "b", "p": 3e-8}]
    schema = pa.schema([("doc_id", pa.string()), ("topic", RANKED_TASK)])
    answer = {"label": "a", "top": top, "levels": None, "mass": float("nan"), "status": "ok"}
    batch = pa.RecordBatch.from_pylist([{"doc_id": "x", "topic": answer}], schema)
    (row,) = json_values(flatten(batch, flat_columns(schema))).to_pylist()
    assert row["topic_top"] == top and row["topic_mass"] is None and row["topic_levels"] is None
    assert json.dumps(row, allow_nan=False).count("0.1}") == 1
