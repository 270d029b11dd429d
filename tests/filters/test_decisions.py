"""The table of decisions, beside the same rule in plain Python; what a filter removes, as SQL."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SpecError
from pipeline.filters.decisions import decided
from pipeline.filters.result import removed_sql
from pipeline.filters.rule import FilterRule
from pipeline.spec.filters import FilterSpec

P = pa.struct([("toxic", pa.float64())])
SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("row", pa.int64()),
        ("n_chars", pa.int64()),
        ("status", pa.string()),
        ("toxic", pa.struct([("p", P), ("n_tokens", pa.int32()), ("status", pa.string())])),
        ("doc", pa.struct([("year", pa.string())])),
    ]
)
TASKS: Any = {"toxic": None}
SCORE, DECADE = "toxic.p.toxic", "doc.year::INT // 10"
CONDITIONS = (f"coalesce({SCORE}, 0) < 0.9", "doc.year::INT > 2000")
OK = ("ok", "truncated", "skipped")


def rows_of(documents: list[tuple[str, str, float, str | None]]) -> pa.RecordBatch:
    """Rows with these statuses of reading and of the task, probabilities, and years."""
    rows = []
    for number, (status, of_task, p, year) in enumerate(documents):
        answer = {"p": {"toxic": p} if of_task in OK[:2] else None, "status": of_task}
        place = {"doc_id": str(number), "row": number, "n_chars": 2, "status": status}
        rows.append({**place, "toxic": {**answer, "n_tokens": 3}, "doc": {"year": year}})
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def expected(
    rows: pa.RecordBatch, share: str, smallest: int, on_error: str
) -> list[tuple[bool, list[str], str]]:
    """Whether each document is dropped, the reasons, and the reasons with thresholds."""

    def threshold(scores: list[float]) -> float:
        return sorted(scores)[len(scores) - int(len(scores) * Fraction(share)) - 1]

    known, parts = [], dict[str, list[float]]()
    for row in rows.to_pylist():
        statuses = row["status"], row["toxic"]["status"]
        failed = next((status for status in statuses if status not in OK), None)
        year = int(row["doc"]["year"]) if (row["doc"]["year"] or "n/a") != "n/a" else None
        p = (row["toxic"]["p"] or {}).get("toxic")
        part = "null" if year is None else str(year // 10)
        if failed is None and statuses[1] != "skipped":
            parts.setdefault(part, []).append(p)
        known.append((failed, p, part, [(p or 0) < 0.9, None if year is None else year > 2000]))
    whole = threshold([score for scores in parts.values() for score in scores])
    decisions = []
    for failed, p, part, verdicts in known:
        scores = parts.get(part, [])
        limit = threshold(scores) if scores and len(scores) >= smallest else whole
        kind = False if False in verdicts else None if None in verdicts else True
        word = "false" if kind is False else "null"
        broken = [c for c, v in zip(CONDITIONS, verdicts, strict=True) if v is kind is not True]
        reasons = [f"keep is {word}: {condition}" for condition in broken]
        words = [f"keep is {word}: {'; '.join(broken)}"] if broken else []
        if p is not None and p > limit:
            reasons.append(f"drop_top: {SCORE} is above its threshold")
            words.append(f"drop_top: {SCORE} > {limit:.6g} in {part}")
        if failed is not None:
            reasons = words = [f"on_error: {failed}"] if on_error == "drop" else []
        decisions.append((bool(reasons), reasons, "; ".join(words)))
    return decisions


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ok", "ok", "ok", "truncated", "empty"]),
            st.sampled_from(["ok", "ok", "ok", "truncated", "skipped", "error:x"]),
            st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(0, 1),
            st.sampled_from(["2021", "2001", "1999", "n/a", None]),
        ),
        max_size=30,
    ),
    st.sampled_from(["0.1", "0.25", "0.3333", "0.9"]),
    st.sampled_from([1, 4]),
    st.sampled_from(["keep", "drop"]),
)
def test_the_table_decides_as_plain_python_does_and_what_it_removes_pins_the_thresholds(
    documents: list[tuple[str, str, float, str | None]], share: str, smallest: int, on_error: str
) -> None:
    rows = rows_of([("ok", "ok", 0.5, "2021"), *documents])
    top = {"share": share, "of": SCORE, "by": DECADE, "smallest": smallest}
    rule = FilterRule.of(FilterSpec(keep=" AND ".join(CONDITIONS), drop_top=top), TASKS, SCHEMA)
    of_each = expected(rows, share, smallest, on_error)
    halves = rows.slice(0, len(rows) // 2), rows.slice(len(rows) // 2)
    with decided(rule, halves, on_error) as table:
        found = table.rows("select _dropped, _reasons, _why from documents order by row")
        counts = table.counts("unnest(_reasons)")
        removes = removed_sql(rule, table.thresholds, on_error)
        dropped = [each for n in (0, 1) for each in table.of_shard(n)["_dropped"].to_pylist()]
        kept, gone = table.whole
    assert found == of_each and dropped == [each for each, *_ in of_each]
    assert counts == Counter(reason for _, reasons, _ in of_each for reason in reasons)
    assert (gone.documents, gone.chars, gone.tokens) == tuple(n * sum(dropped) for n in (1, 2, 3))
    assert (kept + gone).documents == len(rows)
    with duckdb.connect() as database:
        database.register("rows", pa.Table.from_batches([rows]))
        verdicts = database.sql(f"select ({removes}) is true from rows").fetchall()
    assert [verdict for (verdict,) in verdicts] == dropped
    pinned = FilterRule.of(FilterSpec(keep=f"({removes}) IS NOT TRUE"), TASKS, SCHEMA)
    with decided(pinned, [rows], on_error) as table:
        assert table.of_shard(0)["_dropped"].to_pylist() == dropped


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ([], "no document has a score"),
        ([("ok", "skipped", 0.5, "2021"), ("empty", "ok", 0.5, "2021")], "no document has a score"),
        ([("ok", "ok", float("inf"), "2021")], "not a finite number for document '0'"),
        ([("ok", "ok", float("nan"), "2021")], "not a finite number for document '0'"),
    ],
)
def test_a_share_of_no_scores_is_one_line(documents: list[Any], words: str) -> None:
    top = {"share": 0.5, "of": SCORE}
    rule = FilterRule.of(FilterSpec(drop_top=top), TASKS, SCHEMA)
    with pytest.raises(SpecError, match=words), decided(rule, [rows_of(documents)], "keep"):
        pass


def test_a_document_is_ranked_where_the_score_is_asked_whatever_other_questions_are() -> None:
    """`keep` reads a task that is asked of the others alone: their group keeps its own share."""
    skipped = pa.struct([("score", pa.float64()), ("status", pa.string())])
    documents = rows_of([("ok", "ok", n / 100, "2021" if n % 2 else "1999") for n in range(100)])
    other = pa.array(
        [{"score": 1.0, "status": "ok"} if n % 2 else {"status": "skipped"} for n in range(100)],
        skipped,
    )
    rows = pa.RecordBatch.from_arrays(
        [*documents.columns, other], schema=SCHEMA.append(pa.field("edu", skipped))
    )
    top = {"share": "0.1", "of": SCORE, "by": DECADE, "smallest": 1}
    keep = "edu.status = 'skipped' or edu.score >= 0"
    spec, tasks = FilterSpec(keep=keep, drop_top=top), {**TASKS, "edu": None}
    with decided(FilterRule.of(spec, tasks, rows.schema), [rows], "keep") as table:
        dropped_rows = [n for n, of in enumerate(table.of_shard(0)["_dropped"].to_pylist()) if of]
    assert dropped_rows == [*range(90, 100)]


@pytest.mark.parametrize(
    "task",
    ["each", "is_above", "kept", "name", "of_part", "part", "place", "shown", "whole"],
)
def test_a_task_may_have_any_name(task: str) -> None:
    """`drop_top` drops the highest of five scores of each decade, and `keep` the lowest."""
    names = [task if name == "toxic" else name for name in SCHEMA.names]
    scores = (0.1, 0.2, 0.3, 0.4, 0.5)
    rows = rows_of([("ok", "ok", p, year) for year in ("2021", "1999") for p in scores])
    rows = pa.RecordBatch.from_arrays(rows.columns, names)
    top = {"share": 0.2, "of": f"{task}.p.toxic", "by": DECADE, "smallest": 1}
    spec = FilterSpec(keep=f"{task}.p.toxic > 0.1", drop_top=top)
    with decided(FilterRule.of(spec, {task: None}, rows.schema), [rows], "drop") as table:
        dropped_rows = [n for n, of in enumerate(table.of_shard(0)["_dropped"].to_pylist()) if of]
        assert table.of_shard(0).select(names) == pa.Table.from_batches([rows])
        assert table.sizes("_part", 9).keys() == {"202", "199"}
    assert dropped_rows == [0, 4, 5, 9]
