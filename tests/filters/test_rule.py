"""Scores and groups, and the parts and probabilities of a rule."""

from __future__ import annotations

import pytest

from pipeline.filters.rule import conjuncts, group_sql, probabilities_in
from pipeline.ledger.snapshots import SnapshotTask


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


@pytest.mark.parametrize("task", ["order", "check", "true", "topic"])
def test_a_task_is_a_group_also_if_its_name_is_a_word_of_sql(task: str) -> None:
    tasks = {task: SnapshotTask("", ("a", "b")), "tags": SnapshotTask("", ("c",), ("labels",))}
    sql = "topic.label" if task == "topic" else f'"{task}"."label"'
    assert (group_sql(task, tasks), group_sql("tags", tasks)) == (sql, "tags.labels")
    assert probabilities_in(group_sql(task, tasks).replace("label", "p") + ".a", place="by") == [
        (task, "a")
    ]
