"""A rule is one condition over one document's columns; whatever else it holds is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pipeline.errors import SpecError
from pipeline.filters.rule import Rule

P = pa.struct([("toxic", pa.float32()), ("clean", pa.float32())])
TASK = pa.struct([("label", pa.string()), ("p", P), ("mass", pa.float32())])
SCHEMA = pa.schema([("doc_id", pa.string()), ("n_chars", pa.int64()), ("toxic", TASK)])
ROWS = pa.RecordBatch.from_pylist(
    [
        {"doc_id": "a", "n_chars": 5, "toxic": {"label": "toxic", "p": {"toxic": 0.75}}},
        {"doc_id": "b", "n_chars": 9, "toxic": {"label": "clean", "p": {"toxic": 0.25}}},
        {"doc_id": "c", "n_chars": 0, "toxic": {}},
    ],
    SCHEMA,
)


@pytest.mark.parametrize(
    "keep, verdicts",
    [
        ("toxic.p.toxic < 0.5", [False, True, None]),
        ("TOXIC.label = 'clean' OR n_chars = 0 -- why not", [False, True, True]),
        ("toxic['label'] LIKE 't%' AND NOT doc_id IN ('b', 'c')", [True, False, False]),
        ("coalesce(toxic.p.toxic, 1) BETWEEN 0 AND 0.5", [False, True, False]),
        ("CASE WHEN n_chars > 5 THEN true ELSE regexp_matches(doc_id, '^a') END", [True, True, 0]),
        ("if(n_chars::DOUBLE / 2 > 3, true, false)", [False, True, False]),
        ("true", [True, True, True]),
    ],
)
def test_a_rule_says_of_each_row_whether_it_is_kept(keep: str, verdicts: list[bool | None]) -> None:
    assert Rule(keep, SCHEMA).verdicts(ROWS).to_pylist() == verdicts


def test_a_rule_names_the_columns_that_it_reads() -> None:
    assert Rule("Toxic.p.toxic < .5 AND N_CHARS > 1", SCHEMA).columns == ("n_chars", "toxic")


@pytest.mark.parametrize(
    "keep, reason",
    [
        ("toxic.p.toxic", "is float and not true or false"),
        ("toxic.p.rude < 1", 'Could not find key "rude"'),
        ("toxicity.label = 'x'", "no column 'toxicity'; there are doc_id, n_chars, toxic"),
        ("_documents.doc_id = 'x'", "no column '_documents'"),
        ("toxic.label > 3", "annot compare"),
        ("null", "is null and not true or false"),
        ("", "not true or false"),
        ("true, false", "not true or false"),
        ("toxic.p.toxic <", "is not one SQL expression"),
        # more than one expression, and other statements
        ("1) FROM read_csv('/etc/passwd'", "more than one SQL expression"),
        ("true) FROM (SELECT 1", "more than one SQL expression"),
        ("true) AS x, (true", "more than one SQL expression"),
        ("true) FROM _documents WHERE (true", "more than one SQL expression"),
        ("true); COPY _documents TO '/tmp/x'; SELECT (true", "is not one SQL expression"),
        ("true; INSTALL httpfs", "is not one SQL expression"),
        ("n_chars > 1 ORDER BY 1", "is not one SQL expression"),
        ("install httpfs", "is not one SQL expression"),
        # what does not follow from one document's columns
        ("(SELECT count(*) FROM read_csv('/etc/passwd')) > 0", "has a subquery"),
        ("EXISTS (FROM read_text('/etc/passwd'))", "has a subquery"),
        ("doc_id IN (FROM read_text('/etc/passwd'))", "has a subquery"),
        ("read_csv('/etc/passwd')", "read_csv() is no function"),
        ("read_text('/etc/passwd') = 'x'", "read_text() is no function"),
        ("getenv('HOME') = 'x'", "getenv() is no function"),
        ("count(*) > 0", "count_star() is no function"),
        ("max(n_chars) > 0", "max() is no function"),
        ("row_number() OVER () > 1", "has a window"),
        ("unnest([true])", "unnest() is no function"),
        ("COLUMNS(*)", "has a star"),
        # what is another the next time
        ("random() > 0.5", "random() is no function"),
        ("now() > '2026-01-01'", "now() is no function"),
        ("age(TIMESTAMP '2026-01-01') < INTERVAL 1 DAY", "age() is no function"),
        ("main.AGE(TIMESTAMP '2026-01-01') < INTERVAL 1 DAY", "age() is no function"),
        ("current_localtime() > TIME '10:00'", "current_localtime() is no function"),
        ("current_localtimestamp() IS NULL", "current_localtimestamp() is no function"),
        ("current_date > '2026-01-01'", "no column 'current_date'"),
        ("current_setting('threads') = 1", "current_setting() is no function"),
        ("nextval('s') > 1", "nextval() is no function"),
        ("$1", "SQL expression"),
    ],
)
def test_anything_else_is_refused_by_name(keep: str, reason: str) -> None:
    with pytest.raises(SpecError) as refused:
        Rule(keep, SCHEMA)
    (problem,) = refused.value.problems
    assert problem.place == "filter.keep"
    assert reason in problem.fix
    assert problem.value == keep


@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_a_rule_of_any_depth_is_refused_and_ends_nothing(depth: int) -> None:
    with pytest.raises(SpecError, match=r"filter\.keep: "):
        Rule("abs(" * depth + "n_chars" + ")" * depth + " > 0", SCHEMA)


def test_a_value_that_cannot_be_computed_is_said_of_the_rule() -> None:
    rule = Rule("doc_id::INTEGER > 0", SCHEMA)
    with pytest.raises(SpecError, match=r"filter\.keep: .*Could not convert string 'a'"):
        rule.verdicts(ROWS)
