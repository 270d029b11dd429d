"""Dry run, filter, report and DuckDB agree about one rule, and its texts select what it removes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from filtered import SCORE, dropped, filtered_with, ids, previewed, query, spec_of
from finished import ROWS
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filters.decisions import OTHERS, Size, decided
from pipeline.filters.result import Sizes, kept_words, removed_sql
from pipeline.filters.rule import FilterRule, SnapshotRule, in_sql
from pipeline.options import ReportOptions
from pipeline.spec.filters import FilterSpec
from pipeline.verbs.corpus_report import report_of

LANGUAGES = ("en", "o'hara `x`", "de", None)
# The columns of each document that decisions need.
DOCUMENTS = [
    ("doc_id", pa.string()),
    ("row", pa.int64()),
    ("n_chars", pa.int64()),
    ("status", pa.string()),
]
COLUMNS = pa.schema([(name, pa.float64()) for name in "absg"])
RULES: dict[str, dict[str, Any]] = {
    "keep of input": {"keep": "doc.lang = 'en' -- null where a row has no language"},
    "keep on lines": {"keep": f"{SCORE} < 0.6\n  and ({SCORE} > 0.1 or doc.lang <> 'de')\n"},
    "top by task": {"drop_top": {"share": 0.2, "of": SCORE, "by": "topic", "smallest": 1}},
    "top by input": {"drop_top": {"share": 0.3, "of": "1 - toxic.p.clean", "by": "doc.lang"}},
    "top by number": {
        "drop_top": {"share": 0.3, "of": SCORE, "by": "n_chars::DOUBLE / 2", "smallest": 2}
    },
    "top of decimals": {"drop_top": {"share": 0.3, "of": "(toxic.p.toxic * 7)::DECIMAL(18, 17)"}},
    "all": {
        "keep": "topic.p.law < 0.9 and topic.p.art <= 0.71",
        "drop_top": {"share": 0.1, "of": SCORE, "by": "topic", "smallest": 1},
    },
}


def sizes_by_group(folder: Path, rule: Mapping[str, Any], removes: str) -> dict[str, Sizes]:
    """By group, what DuckDB counts as kept and dropped; of a rule without, all documents."""
    by = next((clause["by"] for clause in rule.values() if "by" in clause), None)
    by = {"topic": "topic.label", None: "''"}.get(by, by)
    rows = query(
        folder,
        f"""select coalesce(({by})::varchar, 'null'), if(({removes}) is true, 'dropped', 'kept'),
            count(*), sum(n_chars)::bigint,
            sum(coalesce(greatest(toxic.n_tokens, topic.n_tokens), 0))::bigint
            from labels group by all""",
    )
    sizes: dict[str, Sizes] = {}
    for group, which, *size in rows:
        sizes[group] = replace(sizes.get(group, Sizes(Size(), Size())), **{which: Size(*size)})
    return sizes


@pytest.mark.parametrize(
    ("name", "on_error"),
    [("all", "keep"), *zip(RULES, ["keep", "drop"] * len(RULES), strict=False)],
)
def test_dry_run_filter_report_and_duckdb_agree(name: str, on_error: str, folder: Path) -> None:
    rule: dict[str, Any] = {"on_error": on_error, **RULES[name]}
    result, dry = filtered_with(folder, **rule), previewed(folder, **rule)
    options = ReportOptions(to="unused.html")
    page = report_of(spec_of(folder, **rule), None, options, cache_dir=folder / "cache")
    gone = dropped(result)
    assert 0 < len(gone) < 3 * ROWS
    # — DuckDB, with the condition of the result, selects the documents of the dropped files
    assert ids(folder, result.removes) == gone.keys()
    assert replace(result, written=None) == dry == page.filter
    # — and the sizes
    by_group = sizes_by_group(folder, RULES[name], result.removes)
    assert {", ".join(group.group.values()): group.sizes for group in result.groups} == by_group
    of_page = page.groups or {"": page.whole}
    assert {name: Sizes(*pair) for name, pair in of_page.items()} == by_group
    assert result.sizes == Sizes(*page.whole)
    assert (result.documents, result.dropped) == (3 * ROWS, len(gone))
    # — and the reasons
    assert dry.failed == {"empty": 3} and not dry.stops
    assert sum(dry.reasons.values()) >= len(gone)


def test_of_many_groups_the_largest_are_listed_and_the_others_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = {"of": "toxic.p.toxic", "share": 0.1, "by": "topic", "smallest": 1}
    whole = previewed(folder, drop_top=top)
    monkeypatch.setattr("pipeline.filters.result.MOST_GROUPS", 2)
    few = previewed(folder, drop_top=top)
    assert (few.removes, few.sizes, len(few.groups)) == (whole.removes, whole.sizes, 3)
    largest = {group.group["topic"]: group for group in few.groups}
    others = largest.pop(OTHERS)
    assert others.threshold is None
    assert [*largest.values()] == [g for g in whole.groups if g.group["topic"] in largest]
    assert sum(group.documents for group in few.groups) == few.documents


@settings(max_examples=settings().max_examples // 4)
@given(
    st.lists(
        st.sampled_from(["a", "b > 1", "b > 1 or a", "not a", "b", "null", "a and b > 0"]),
        min_size=1,
        max_size=4,
    )
)
def test_conditions_alone_decide_what_the_whole_rule_decides(parts: list[str]) -> None:
    keep = " AND ".join(f"({part})" for part in [*parts, "true"])
    rows = pa.RecordBatch.from_pylist(
        [{"status": "ok", "a": a, "b": b} for a in (True, False, None) for b in (0, 1, 2, None)],
        pa.schema([*DOCUMENTS, ("a", pa.bool_()), ("b", pa.int64())]),
    )
    rule = FilterRule.of(FilterSpec(keep=keep), {}, rows.schema)
    with decided(rule, [rows], "drop") as table:
        decisions = table.of_shard(0).to_pylist()
    with duckdb.connect() as database:
        database.register("rows", pa.Table.from_batches([rows]))
        verdicts = [v for (v,) in database.sql(f"select {keep} from rows").fetchall()]
        removed = database.sql(f"select {removed_sql(rule, None, 'fail')} from rows").fetchall()
    dropped = [decision["_dropped"] for decision in decisions]
    assert dropped == [v is not True for v in verdicts] == [v for (v,) in removed]
    for verdict, decision in zip(verdicts, decisions, strict=True):
        start, _, named = decision["_why"].partition(": ")
        assert start == {True: "", False: "keep is false", None: "keep is null"}[verdict]
        assert bool(named) == (verdict is not True)


NUMBERS = st.floats(allow_nan=False, allow_infinity=False, max_value=1e308)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=5)


@settings(max_examples=settings().max_examples // 10)
@given(st.dictionaries(NAMES, NUMBERS, min_size=8, max_size=12))
def test_numbers_and_names_in_the_condition_are_exact(numbers: dict[str, float]) -> None:
    """A score equal to its group's threshold stays, and the next number above it goes."""
    pairs = [
        (group, score)
        for group, number in numbers.items()
        for score in (number, math.nextafter(number, math.inf))
    ]
    rows = pa.RecordBatch.from_pylist(
        [{"row": n, "status": "ok", "s": s, "g": g} for n, (g, s) in enumerate(pairs)],
        pa.schema([*DOCUMENTS, ("s", pa.float64()), ("g", pa.string())]),
    )
    top = {"share": 0.5, "of": "s", "by": "g", "smallest": 1}
    rule = FilterRule.of(FilterSpec(drop_top=top), {}, rows.schema)
    with decided(rule, [rows], "drop") as table:
        assert table.of_shard(0)["_dropped"].to_pylist() == [False, True] * len(numbers)
        removes = removed_sql(rule, table.thresholds, "fail")
    more = pa.table({"s": [math.nan, None] * len(numbers), "g": [*numbers, *numbers]})
    with duckdb.connect() as database:
        database.register("rows", pa.concat_tables([pa.table(rows.select(["s", "g"])), more]))
        verdicts = database.sql(f"select ({removes}) is true from rows").fetchall()
    assert [v for (v,) in verdicts] == [False, True] * len(numbers) + [False] * len(more)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"keep": "a < 1 and b > 2"}, "a < 1 and b > 2"),
        ({"drop_top": {"share": 0.05, "of": "s"}}, "s is at most the threshold of the highest 5 %"),
        (
            {"keep": "a > 1 -- c", "drop_top": {"share": 0.1, "of": "s", "by": "g"}},
            "(a > 1) and (s is at most the threshold of the highest 10 % of its group by g)",
        ),
    ],
)
def test_what_a_rule_keeps_is_described_in_one_line(rule: dict[str, Any], words: str) -> None:
    assert kept_words(FilterRule.of(in_sql(FilterSpec(**rule), {}), {}, COLUMNS)) == words


def test_the_probabilities_of_a_rule_are_those_of_all_its_parts(folder: Path) -> None:
    rule = {**RULES["all"], "drop_top": {"share": 0.1, "of": SCORE}}
    found = SnapshotRule.of(spec_of(folder, **rule)).rule.probabilities
    assert found == {("topic", "law"), ("toxic", "toxic"), ("topic", "art")}
