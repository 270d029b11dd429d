"""A condition calls only functions that are safe on any text; what people write passes."""

from __future__ import annotations

import re

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SpecError
from pipeline.sources.functions import ALLOWED, MOST_DOUBLINGS
from pipeline.sources.rule import Rule

SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "words": pa.list_(pa.string()),
        "n": pa.int64(),
        "day": pa.timestamp("us"),
    }
)


@pytest.mark.parametrize(
    "keep, reason",
    [
        ("length(repeat(text, n * 1000000000)) > 3", "repeat is not a function"),
        ("list_contains(range(10000000000), n)", "range is not a function"),
        ("rpad(text, 2000000000, 'x') = 'a'", "rpad is not a function"),
        ("printf('%2000000000d', n) = '1'", "printf is not a function"),
        ("length(hex(hex(text))) > 3", "hex is not a function"),
        ("levenshtein(text, text) < 3", "levenshtein is not a function"),
        ("array_to_string(words, text) = ''", "array_to_string is not a function"),
        ("lowr(text) = 'a'", "similar ones are lower"),
        ("len([text || w for w in words]) > 3", "list_apply is not a function"),
        ("list_sort(words, lambda w: w) = words", "has a lambda"),
        ("n > 1 AND (n < 3 OR CASE WHEN n = 2 THEN repeat(text, 2) = '' END)", "repeat"),
        ("replace(text, 'a', text) = ''", "replace needs constants after its first argument"),
        ("replace(text, 'a', 'bb') = ''", "replace may make a text longer"),
        ("length(text.replace('a', 'bb')) > 3", "calls text.replace; write replace(...)"),
        ("regexp_replace(text, '', 'xx', 'g') = 'x'", "regexp_replace may make a text longer"),
        (" AND ".join(["regexp_replace(text, ' +', ' ') = ''"] * 6), "regexp_replace 6 times"),
        ("string_split(text, '')::VARCHAR = ''", "makes a text of what string_split gives"),
        ("('a' || [text]::VARCHAR) = ''", "makes a text of what list_value gives"),
        ("json_extract([text], '$') = ''", "makes a text of what list_value gives"),
        ("len(json_extract(text, '$..*')) > 3", "json_extract needs a path to one value"),
        ("len(text -> ['$.a', '$.b']) > 3", "-> needs constants after its first argument"),
        ("text::BIT = '1'", "casts to bit; cast to a number"),
    ],
)
def test_what_may_take_long_or_make_a_long_value_is_refused(keep: str, reason: str) -> None:
    with pytest.raises(SpecError, match=r"^keep: ") as no:
        Rule(keep, SCHEMA, place="keep")
    assert reason in no.value.problems[0].fix


@pytest.mark.parametrize(
    "keep",
    [
        r"length(regexp_replace(lower(trim(text)), '\s+', ' ', 'g')) > 200",
        "replace(replace(replace(lower(text), 'ä', 'ae'), 'ö', 'oe'), 'ü', 'ue') LIKE '%strasse%'",
        "len(string_split(text, ' ')) BETWEEN 50 AND 1e5 AND length(text) / n < 0.1",
        "string_split(text, ' ')[1] = 'the' OR split_part(text, ' ', 1) = 'the'",
        "list_contains(words, 'law') AND len(words) > 2 AND words[1] = 'a' AND 'b' IN words",
        "list_has_any(words, ['law', 'tax']) OR words::VARCHAR LIKE '%a, b%'",
        "text ILIKE '%law%' OR regexp_matches(text, '(?i)court|judge') AND n BETWEEN 1 AND 1e9",
        " AND ".join(f"text <> 'word{number}'" for number in range(300)),
        f"text IN ({', '.join(repr(f'word{number}') for number in range(2000))})",
        " + ".join(["n"] * 150) + " > 3",
        "(text -> '$.a' -> '$.b' ->> '$.c') = 'x' OR json_extract_string(text, '$.a.b') = 'x'",
        "md5(text)[:2] < '80' AND sha256(text) <> '' AND starts_with(upper(text), 'A')",
        "strftime(make_date(n, 1, 1), '%Y-%m') > '2020' AND year(day) >= 2020",
        "day > DATE '2020-01-01' - INTERVAL 3 DAY AND extract(dow FROM day) IN (0, 6)",
        "date_trunc('month', day) = '2020-01-01' AND age(day, '2020-01-01') > INTERVAL 1 YEAR",
        "CASE WHEN n > 3 THEN upper(text) ELSE lower(text) END = coalesce(text, 'x')",
        "n::DOUBLE::INT::DECIMAL(10, 2) = 1 AND try_cast(text AS bigint) IS NOT NULL",
        "round(abs(n) / 3, 2) > greatest(n % 2, 1) AND if(n > 2, true, false)",
    ],
)
def test_what_people_write_passes(keep: str) -> None:
    assert Rule(keep, SCHEMA, place="keep").columns, "it names a column, and is not refused"


def test_each_function_depends_on_its_arguments_alone() -> None:
    stable = """SELECT function_name FROM duckdb_functions() GROUP BY 1
        HAVING bool_and(function_type IN ('scalar', 'macro'))
        AND NOT bool_or(coalesce(stability, '') = 'VOLATILE')
        AND NOT bool_or(coalesce(macro_definition, '') ILIKE '%current_%')"""
    known = {str(name) for (name,) in duckdb.connect().execute(stable).fetchall()}
    assert ALLOWED - known == {"->", "ifnull"}, "SQL's own, which the catalog does not have"


TEXTS = st.recursive(
    st.sampled_from(["x", "'a'", "''", "'bcd'"]),
    lambda inner: st.one_of(
        st.builds("replace({}, 'ab', 'ba')".format, inner),
        st.builds("regexp_replace({}, '.?', 'c', 'g')".format, inner),
        st.builds("({} || {})".format, inner, inner),
        st.builds("concat({}, {}[2:])".format, inner, inner),
        st.builds("upper({})".format, inner),
        st.builds("regexp_extract({}, 'a.*')".format, inner),
        st.builds("split_part({}, 'a', 1)".format, inner),
    ),
    max_leaves=5,
)


@given(sql=TEXTS, text=st.text("ab", min_size=1, max_size=20))
def test_no_value_is_longer_than_what_it_names(sql: str, text: str) -> None:
    rows = pa.RecordBatch.from_pydict({"x": [text]})
    names = len(re.findall(r"\bx\b", sql)) * len(text) + len(sql)
    try:
        rule = Rule(f"length({sql}) <= {names * 2**MOST_DOUBLINGS}", rows.schema, place="keep")
    except SpecError as refused:
        assert "regexp_replace" in str(refused)
    else:
        assert rule.verdicts(rows).to_pylist() == [True]
