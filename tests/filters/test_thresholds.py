"""Thresholds by group, beside DuckDB's `quantile_disc` on the same labels."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from filtered import (
    ANSWERED,
    SCORE,
    dropped,
    filtered_with,
    kept,
    query,
    thresholds,
)
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SpecError
from pipeline.filters.decisions import limits, scratch
from pipeline.stores.local import LocalStore


@pytest.mark.parametrize("share", [0.05, 0.333, 0.9])
@pytest.mark.parametrize(
    ("by", "column"),
    [("topic", "topic.label"), ("doc.lang", "coalesce(lang, 'null')"), (None, "''")],
)
def test_thresholds_and_documents_are_those_of_duckdb(
    share: float, by: str | None, column: str, folder: Path
) -> None:
    filtered = filtered_with(
        folder, drop_top={"share": share, "of": SCORE, "by": by, "smallest": 1}
    )
    quantile = 1 - Fraction(str(share))
    found = query(
        folder,
        f"""with q as (select {column} as g, quantile_disc({SCORE}, {float(quantile)}) as t
                from labels where {ANSWERED} group by g)
            select g, t, list(doc_id) filter ({SCORE} > t) from labels join q on {column} = g
            where {ANSWERED} group by g, t""",
    )
    limits = {group: limit for group, limit, _ in found}
    assert limits.items() <= thresholds(filtered).items()
    high = {id for _, _, ids in found for id in ids or ()}
    assert len(high) >= 1
    failed = {id for (id,) in query(folder, f"select doc_id from labels where not ({ANSWERED})")}
    reasons = dropped(filtered)
    by_score = {id for id, reason in reasons.items() if reason.startswith(f"drop_top: {SCORE} > ")}
    assert by_score == high - failed
    everything = {id for (id,) in query(folder, "select doc_id from labels")}
    assert kept(filtered) | reasons.keys() == everything
    assert not kept(filtered) & reasons.keys()


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]) | st.floats(0, 1), min_size=1),
    st.sampled_from(["0.01", "0.05", "0.1", "0.25", "0.3333", "0.5", "0.99"]),
)
def test_a_threshold_drops_at_most_its_share_and_no_lower_one_does(
    scores: list[float], share: str
) -> None:
    with scratch() as table:
        table.add("scores", pa.table({"part": ["all"] * len(scores), "score": scores}))
        [(*_, limit)] = table.rows(limits("scores", [float(share)]))
    above = sum(score > limit for score in scores)
    assert above <= Fraction(share) * len(scores)
    # — the next lower threshold would drop more
    lower = [score for score in scores if score < limit]
    if lower:
        assert sum(score > max(lower) for score in scores) > Fraction(share) * len(scores)


def test_a_small_group_has_the_threshold_of_all(folder: Path) -> None:
    filtered = filtered_with(
        folder, drop_top={"share": 0.2, "of": SCORE, "by": "doc.lang", "smallest": 30}
    )
    of_group = f"""select coalesce(lang, 'null'), count(*), quantile_disc({SCORE}, 0.8)
        from labels where {ANSWERED} group by 1"""
    [(of_all,)] = query(folder, f"select quantile_disc({SCORE}, 0.8) from labels where {ANSWERED}")
    expected = {g: of_all if size < 30 else limit for g, size, limit in query(folder, of_group)}
    assert thresholds(filtered) == expected
    assert 1 < len(set(expected.values())) < len(expected)


@pytest.mark.parametrize("stop_at", [0, 1, 9])
def test_a_filter_that_was_stopped_goes_on_with_the_same_thresholds(
    stop_at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule: dict[str, Any] = {"drop_top": {"share": 0.2, "of": SCORE, "by": "topic", "smallest": 1}}
    whole = filtered_with(folder, to="whole", **rule)
    create, calls = LocalStore.create, 0

    def stopping(store: LocalStore, key: str, data: bytes) -> bool:
        nonlocal calls
        if key.startswith(("filters/", "kept/", "dropped/")):
            calls += 1
            if calls > stop_at:
                raise KeyboardInterrupt
        return create(store, key, data)

    monkeypatch.setattr(LocalStore, "create", stopping)
    with pytest.raises(KeyboardInterrupt):
        filtered_with(folder, **rule)
    monkeypatch.undo()
    resumed = filtered_with(folder, **rule)
    assert (resumed.removes, resumed.groups) == (whole.removes, whole.groups)
    assert dropped(resumed) == dropped(whole) and kept(resumed) == kept(whole)


@pytest.mark.parametrize(
    ("rule", "place"),
    [
        ({}, "filter"),
        ({"keep": "toxic.p.rude < 1"}, "filter.keep"),
        ({"keep": "true; copy x to 'y'"}, "filter.keep"),
        ({"keep": "doc.no = 'x'"}, "filter"),
        ({"drop_top": {"share": 0, "of": SCORE}}, "filter.drop_top.share"),
        ({"drop_top": {"share": 1, "of": SCORE}}, "filter.drop_top.share"),
        ({"drop_top": {"share": 0.1, "of": "toxic.p.rude"}}, "filter.drop_top.of"),
        ({"drop_top": {"share": 0.1, "of": "topic.label"}}, "filter.drop_top.of"),
        ({"drop_top": {"share": 0.1, "of": SCORE, "by": "tongue"}}, "filter.drop_top.by"),
        ({"drop_top": {"share": 0.1, "of": SCORE, "by": "doc.tongue"}}, "filter"),
        # — a score that is no number for a document with an answer
        ({"drop_top": {"share": 0.1, "of": f"nullif({SCORE}, {SCORE})"}}, "filter.drop_top.of"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    rule: dict[str, Any], place: str, folder: Path
) -> None:
    with pytest.raises(SpecError) as refused:
        filtered_with(folder, **rule)
    assert [problem.place for problem in refused.value.problems] == [place]
    assert len(str(refused.value).splitlines()) == 1
    assert not list((folder / "to").rglob("*.parquet"))
