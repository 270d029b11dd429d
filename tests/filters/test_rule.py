"""Scores and groups, and what a rule says of its parts and probabilities."""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pytest

from pipeline.filters.rule import Group, Score, conjuncts, probabilities_in

LATE = pa.RecordBatch.from_pydict({"year": ["2021", "n/a", None, "1999", ""]})


def test_the_values_of_a_score_and_of_a_group_that_fail_are_missing() -> None:
    score = Score("year::INT", LATE.schema, place="of").number
    group = Group("year::INT // 1000", LATE.schema, place="by").group
    with duckdb.connect() as database:
        database.register("late", LATE)
        found = database.sql(f"select {score}, {group} from late").fetchall()
    assert found == [(2021, "2"), (None, "null"), (None, "null"), (1999, "1"), (None, "null")]


@pytest.mark.parametrize(
    "text, parts",
    [
        ("a < 1 and b>2 and (c or d)", ("a < 1", "b>2", "c or d")),
        ("not (a and b)", ("not (a and b)",)),
        ("a and ((b or c) and d)", ("a", "b or c", "d")),
        ("a in (1, 2) AND b LIKE 'x%'", ("(a IN (1, 2))", "(b ~~ 'x%')")),
        (
            "doc.é = 'ü' and language.label = 'English'",
            ("doc.é = 'ü'", "language.label = 'English'"),
        ),
    ],
)
def test_the_conditions_of_a_rule_are_those_that_it_joins_with_and(
    text: str, parts: tuple[str, ...]
) -> None:
    assert conjuncts(text, place="keep") == parts


@pytest.mark.parametrize(
    "text, named",
    [
        ("toxic.p.toxic", [("toxic", "toxic")]),
        ('(toxic.p."very toxic") + 1 < 2', [("toxic", "very toxic")]),
        ("spam.p.spam < 1 AND (a or b) AND toxic.p.toxic <= 5e-1::FLOAT", ["spam", "toxic"]),
        ("n_chars < 5 and 't.p.l < 1' = doc_id and toxic.mass > .5", []),
        ("struct_extract(toxic.p, 'toxic') > .5 or doc.p = 'p'", []),
    ],
)
def test_a_probability_is_named_by_its_task_and_label(
    text: str, named: list[tuple[str, str] | str]
) -> None:
    expected = [(name, name) if isinstance(name, str) else name for name in named]
    assert probabilities_in(text, place="of") == expected
