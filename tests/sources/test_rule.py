"""A rule is one condition on the columns of one document; anything else is refused."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from pipeline.errors import SpecError
from pipeline.sources.rule import Rule, one_line

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


def make_rule(keep: str) -> Rule:
    return Rule(keep, SCHEMA, place="filter.keep")


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
def test_a_rule_decides_for_each_row_whether_it_is_kept(
    keep: str, verdicts: list[bool | None]
) -> None:
    assert make_rule(keep).verdicts(ROWS).to_pylist() == verdicts


def test_a_rule_names_the_columns_that_it_reads() -> None:
    assert make_rule("Toxic.p.toxic < .5 AND N_CHARS > 1").columns == ("n_chars", "toxic")


@pytest.mark.parametrize(
    "keep, reason",
    [
        ("toxic.p.toxic", "is float, not a boolean"),
        ("toxic.p.rude < 1", 'Could not find key "rude"'),
        ("toxicity.label = 'x'", "; the columns are doc_id, n_chars, toxic"),
        ("toxic = 'toxic'", "toxic has several values; write toxic.label for the answer; the"),
        ("source <> 'mail'", "; write doc.source for a column of the input; the columns are"),
        ("n_char > 1", 'Candidate bindings: "n_chars"'),
        ("toxic.label > 3", "annot compare"),
        ("null", "is null, not a boolean"),
        ("", "is not one SQL expression"),
        ("true, false", "is not one SQL expression"),
        ("toxic.p.toxic <", "is not one SQL expression"),
        # more than one expression, and other statements
        ("1) FROM read_csv('/etc/passwd'", "is not one SQL expression"),
        ("true FROM read_csv('/etc/passwd')", "is not one SQL expression"),
        ("true) FROM _documents WHERE (true", "is not one SQL expression"),
        ("true); COPY _documents TO '/tmp/x'; SELECT (true", "is not one SQL expression"),
        ("true; INSTALL httpfs", "is not one SQL expression"),
        ("n_chars > 1 ORDER BY 1", "is not one SQL expression"),
        ("install httpfs", 'column "install" not found'),
        # what depends on other documents, on files or on settings
        ("(SELECT count(*) FROM read_csv('/etc/passwd')) > 0", "has a subquery"),
        ("doc_id IN (FROM read_text('/etc/passwd'))", "has a subquery"),
        ("read_text('/etc/passwd') = 'x'", "read_text is not a function"),
        ("getenv('HOME') = 'x'", "getenv is not a function"),
        ("count(*) > 0", "count_star is not a function"),
        ("max(n_chars) > 0", "max is not a function"),
        ("row_number() OVER () > 1", "has a window"),
        ("unnest([true, false])", "unnest is not a function"),
        ("COLUMNS(*)", "has a star"),
        ("nextval('s') > 1", "nextval is not a function"),
        ("$1", "has a parameter"),
        # what gives another value the next time
        ("random() > 0.5", "random is not a function"),
        ("n_chars > 1 AND NOT (now() < '2026-01-01')", "now is not a function"),
        ("current_date > '2026-01-01'", "current_date is not a column; write a constant"),
        ("LocalTimestamp > '2026-01-01'", "LocalTimestamp is not a column"),
        ("age(TIMESTAMP '2020-01-01') > INTERVAL 1 YEAR", "age of one time reads the clock"),
        ("current_setting('threads') > '1'", "current_setting is not a function"),
        ("sleep_ms(1000000) > 1", "sleep_ms is not a function"),
    ],
)
def test_anything_else_is_refused_with_the_reason(keep: str, reason: str) -> None:
    with pytest.raises(SpecError) as refused:
        make_rule(keep)
    (problem,) = refused.value.problems
    assert problem.place == "filter.keep"
    assert reason in problem.fix
    assert problem.value == keep


def nested(depth: int) -> str:
    return "abs(" * depth + "n_chars" + ")" * depth + " > 0"


@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_a_rule_of_any_depth_is_refused_and_ends_nothing(depth: int) -> None:
    with pytest.raises(SpecError, match=r"filter\.keep: "):
        make_rule(nested(depth))


def test_a_rule_that_this_python_can_read_is_computed() -> None:
    with suppress(SpecError):  # — of 900 levels with Python 3.11
        assert make_rule(nested(900)).columns == ("n_chars",)


def test_a_column_may_have_the_name_of_what_reads_the_clock() -> None:
    rows = pa.RecordBatch.from_pylist([{"user": "a", "now": 1}, {"user": "b", "now": 2}])
    rule = Rule("user = 'a' AND now < 2", rows.schema, place="filter.keep")
    assert rule.verdicts(rows).to_pylist() == [True, False]
    assert rule.columns == ("user", "now")


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_times_are_of_utc_on_every_machine(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    stamps = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (0, 2, 23)]
    rows = pa.RecordBatch.from_pydict({"stamp": pa.array(stamps, pa.timestamp("us", tz="UTC"))})
    try:
        rule = Rule(
            "stamp::DATE = '2026-01-01' AND hour(stamp) > 1", rows.schema, place="filter.keep"
        )
        assert rule.verdicts(rows).to_pylist() == [False, True, True]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_names_that_differ_in_case_beyond_ascii_are_two_columns() -> None:
    rows = pa.RecordBatch.from_pylist([{"doc": {"É": "1", "é": "2"}}])
    rule = Rule("doc.É = '1' and doc.é = '2'", rows.schema, place="filter.keep")
    assert rule.verdicts(rows).to_pylist() == [True]


def test_no_rows_have_no_verdicts() -> None:
    assert make_rule("n_chars > 1").verdicts(ROWS.slice(0, 0)).to_pylist() == []


def test_a_string_that_looks_like_a_parse_tree_is_a_string() -> None:
    rule = make_rule("""doc_id = '"class":"SUBQUERY"'""")
    assert rule.verdicts(ROWS).to_pylist() == [False] * 3


LATE = pa.RecordBatch.from_pydict({"year": ["2021", "n/a", None, "1999", ""], "n": [2, 1, 0, 3, 4]})


@pytest.mark.parametrize(
    "condition, verdicts, failures",
    [
        ("cast(year as int) >= 2020", [True, None, None, False, None], 2),
        ("year::DATE > '2020-01-01' -- a comment", [None] * 5, 4),
        ("NOT year::INTEGER = 1999 AND n < 3", [True, None, None, False, None], 2),
        ("coalesce(year::INT, 0) < 2000", [False, None, True, True, None], 2),
        ("strptime(year, '%Y') < now_col", [False, None, None, True, None], 2),
        ("try_cast(year as int) >= 2020", [True, None, None, False, None], 0),
    ],
)
def test_a_row_on_which_a_condition_fails_is_not_accepted_and_is_counted(
    condition: str, verdicts: list[bool | None], failures: int
) -> None:
    rows = LATE.append_column("now_col", pa.array([datetime(2020, 1, 1)] * 5))
    rule = Rule(condition, rows.schema, place="where")
    assert rule.verdicts(rows).to_pylist() == verdicts
    assert rule.failures(rows) == failures


def test_a_constant_that_cannot_be_computed_is_an_error_of_the_rule() -> None:
    with pytest.raises(SpecError, match=r"filter\.keep: .*Could not convert string 'abc'"):
        make_rule("n_chars > 'abc'::INTEGER")


@pytest.mark.parametrize(
    "text, line",
    [
        ("a < 1", "a < 1"),
        ("a < 1 -- why not", "a < 1"),
        ("a\n  and b /* or c */\n", "(a AND b)"),
        ("a = '--'", "(a = '--')"),
    ],
)
def test_an_expression_on_one_line_has_no_comment(text: str, line: str) -> None:
    assert one_line(text, place="keep") == line
