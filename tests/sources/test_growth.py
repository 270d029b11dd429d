"""A rule may not make values much longer than a document; what people write passes."""

from __future__ import annotations

import json
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SpecError
from pipeline.sources import rule as rules
from pipeline.sources.growth import check_sizes
from pipeline.sources.rule import Rule

SCHEMA = pa.schema([("text", pa.string()), ("words", pa.list_(pa.string())), ("n", pa.int64())])
WORDS = ", ".join(f"'word{number}'" for number in range(60))
LONG = "x" * 150


@pytest.mark.parametrize(
    "keep, function",
    [
        ("length(replace(replace(text, 'a', text), 'a', text)) > 3", "replace"),
        (f"length(replace(text, 'a', '{LONG}')) > 3", "replace"),
        (f"length(text.replace('a', '{LONG}')) > 3", "replace"),
        ("replace(replace(replace(text, 'a', '12345'), '1', '12345'), '1', '12345') = ''", "rep"),
        (f"regexp_replace(text, '', '{LONG}', 'g') = 'x'", "regexp_replace"),
        ("regexp_replace(text, '.', text, 'g') = 'x'", "regexp_replace"),
        ("len(list_transform(string_split(text, ''), lambda w: w || text)) > 3", "||"),
        ("len([text || w for w in words]) > 3", "||"),
        ("len(list_transform([text], lambda y: replace(y, 'a', y))) > 3", "replace"),
        ("array_to_string(words, text) = ''", "array_to_string"),
        ("list_aggregate(words, 'string_agg', text) = ''", "list_aggregate"),
        ("concat_ws(text, words, 'b') = ''", "concat_ws"),
        ("length(bin(bin(bin(text)))) > 3", "bin"),
        ("length(hex(hex(hex(hex(hex(hex(hex(text)))))))) > 3", "hex"),
        ("length(to_json(to_json(to_json(text)))) > 3", "to_json"),
        ("length((((text::BIT)::VARCHAR)::BIT)::VARCHAR || text) > 3", "||"),
        ("len(json_extract(text, '$..*')) > 3", "json_extract"),
        ("len(text -> '$..*') > 3", "json_extract"),
        ("len(text ->> '$..*') > 3", "->>"),
        ("json_pretty(text) = ''", "json_pretty"),
        ("damerau_levenshtein(text, text) < 3", "damerau_levenshtein"),
        ("len(list_select([text], words::INT[])) > 3", "list_select"),
        ("n > 1 AND (n < 3 OR length(CASE WHEN n = 2 THEN repeat(text, 2) END) > 1)", "repeat"),
    ],
)
def test_what_can_make_a_long_value_is_refused_by_its_name(keep: str, function: str) -> None:
    with pytest.raises(SpecError, match=r"keep: \S* can make a value that is more than 100") as no:
        Rule(keep, SCHEMA, place="keep")
    assert no.value.problems[0].fix.startswith(function)


@pytest.mark.parametrize(
    "keep",
    [
        "replace(replace(replace(text, '&', '&amp;'), '<', '&lt;'), '>', '&gt;') <> text",
        r"length(regexp_replace(lower(trim(text)), '\s+', ' ', 'g')) > 200",
        "replace(replace(replace(lower(text), 'ä', 'ae'), 'ö', 'oe'), 'ü', 'ue') LIKE '%strasse%'",
        f"len(list_filter([{WORDS}], lambda w: contains(lower(text), w))) > 2",
        "len([w for w in string_split(text, ' ') if length(w) > 12]) / n < 0.1",
        "list_transform(string_split(text, ' '), lambda w: lower(w))[1] = 'the'",
        "array_to_string(words, ', ') LIKE '%a, b%'",
        "concat_ws(' ', text, text, text) <> ''",
        "text ILIKE '%law%' OR regexp_matches(text, '(?i)court|judge') AND n BETWEEN 1 AND 1e9",
        " AND ".join(f"text <> 'word{number}'" for number in range(300)),
        f"text IN ({', '.join(repr(f'word{number}') for number in range(2000))})",
        " + ".join(["n"] * 150) + " > 3",
        "levenshtein(left(text, 200), left(words[1], 200)) < 5",
        "jaro_winkler_similarity(text, 'lorem ipsum') > 0.9",
        "(text -> '$.a' -> '$.b' ->> '$.c') = 'x'",
        "json_extract_string(text, '$.a.b') = 'x'",
        "md5(text)[:2] < '80' AND sha256(text) <> ''",
        "strftime(make_date(n, 1, 1), '%Y-%m') > '2020'",
        "CASE WHEN n > 3 THEN upper(text) ELSE lower(text) END = coalesce(text, 'x')",
        "text::VARCHAR::VARCHAR = n::VARCHAR::VARCHAR AND n::DOUBLE::INT::BIGINT::DOUBLE::INT = 1",
    ],
)
def test_what_people_write_passes(keep: str) -> None:
    assert Rule(keep, SCHEMA, place="keep").columns, "it names a column, and is not refused"


TEXTS = st.recursive(
    st.sampled_from(["x", "'a'", "''", "'bcd'", "'aaaa'"]),
    lambda inner: st.one_of(
        st.builds("replace({}, {}, {})".format, inner, inner, inner),
        st.builds("regexp_replace({}, '.?', {}, 'g')".format, inner, inner),
        st.builds("({} || {})".format, inner, inner),
        st.builds("upper(hex({}))".format, inner),
        st.builds("concat_ws({}, string_split({}, ''), {})".format, inner, inner, inner),
        st.builds(
            "array_to_string(list_transform([{}, {}], lambda y: y || {}), 'cde')".format,
            *[inner] * 3,
        ),
        st.builds("to_json({})::VARCHAR".format, inner),
        st.builds("bin({})".format, inner),
    ),
    max_leaves=6,
)


@given(sql=TEXTS, text=st.text("ab", min_size=1, max_size=20))
def test_no_value_is_longer_than_its_size(sql: str, text: str) -> None:
    connection = duckdb.connect()
    [tree] = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {sql}"]).fetchone() or ()
    query = "SELECT length(x) FROM (SELECT {} AS x FROM (SELECT ? AS x))"
    [length] = connection.execute(query.format(sql), [text]).fetchone() or ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.sources.growth._COLUMN", float(len(text)))
        patch.setattr("pipeline.sources.growth.MOST", 1e30)
        parsed: Any = json.loads(tree)
        assert length <= check_sizes(parsed, ())


def test_a_rule_that_takes_long_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.RecordBatch.from_pydict({"text": ["ab" * 500] * 50_000})
    slow = "levenshtein(left(text, 1000), reverse(left(text, 1000))) > 3"
    rule = Rule(slow, rows.schema, place="keep")
    monkeypatch.setattr(rules, "LIMIT_S", 0.05)
    with pytest.raises(SpecError, match=r"keep: takes more than 0\.05 s for 50,000 documents"):
        rule.verdicts(rows)
