"""Values of another tool in a filter's rule; a plain query has what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from filtered import ANSWERED, SCORE, content_of, filtered_with, kept, previewed, query

from pipeline.errors import SpecError, StorageError
from pipeline.filters.side_table import SideTable
from pipeline.ledger.dataset import open_labels
from pipeline.spec.filters import JoinSpec

KEEP = f"{SCORE} < 0.8 and (joined.flagged is not true or joined.words > 20)"


def write_table(folder: Path, ending: str = "parquet", on: str = "doc_id") -> Path:
    """A table about two thirds of the documents, in another order, with flags and counts."""
    keys = dict.fromkeys(open_labels(str(folder / "out")).to_table()[on].to_pylist()[::-1])
    rows = [
        {on: key, "flagged": n % 2 == 0, "words": n, "note": [str(n)]}
        for n, key in enumerate(keys)
        if n % 3
    ]
    (folder / "side").mkdir(exist_ok=True)
    path = folder / "side" / f"flags.{ending}"
    table = pa.Table.from_pylist([*rows, {on: None, "flagged": True, "words": 1, "note": []}])
    if ending == "parquet":
        pq.write_table(table, path)
    elif ending == "csv":
        pa.csv.write_csv(table.drop_columns(["note"]), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def expected(folder: Path, on: str) -> set[str]:
    """The documents that a plain query keeps."""
    side = f"labels left join '{write_table(folder, on=on)}' as side on labels.{on} = side.{on}"
    rows = f"(select labels.*, side as joined from {side})"
    sql = f"select doc_id from {rows} where {ANSWERED} and {KEEP}"
    return {name for (name,) in query(folder, sql)}


@pytest.mark.parametrize(
    ("ending", "on"), [("csv", "doc_id"), ("jsonl", "doc_id"), ("parquet", "content_hash")]
)
def test_a_rule_reads_the_columns_of_a_side_table(folder: Path, ending: str, on: str) -> None:
    join = {"path": str(write_table(folder, ending, on)), "on": on}
    filtered = filtered_with(folder, keep=KEEP, join=join)
    assert kept(filtered) == expected(folder, on) and len(kept(filtered)) > 20


def test_documents_that_a_side_table_does_not_have_are_a_group_of_their_own(folder: Path) -> None:
    join = {"path": str(write_table(folder))}
    without = previewed(folder, keep="joined.words is null", join=join)
    assert without.sizes.kept.documents >= 29
    top = {"share": 0.2, "of": "coalesce(joined.words, 0)", "by": "joined.flagged"}
    groups = previewed(folder, join=join, drop_top=top)
    names = {name for group in groups.groups for name in group.group.values()}
    assert names == {"true", "false", "null"}


def test_a_changed_table_is_another_filter_and_the_same_one_is_done(own_folder: Path) -> None:
    path = write_table(own_folder)
    rule: dict[str, Any] = {"keep": KEEP, "join": {"path": str(path)}}
    first, again = filtered_with(own_folder, **rule), filtered_with(own_folder, **rule)
    assert first.written is not None and again.written is not None
    assert first.written.created > 0 and again.written.created == 0
    pq.write_table(pq.read_table(path).slice(5), path)
    changed = filtered_with(own_folder, **rule)
    assert changed.written is not None
    assert changed.written.created > 0 and changed.written.kept != first.written.kept
    assert previewed(own_folder, **rule).dropped == changed.dropped


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ({"keep": "joined.flaged"}, "filter.join: there is no such column; .* has: doc_id"),
        ({"keep": "joined.note[1] = 'a' and joined.words > 'x'"}, "filter.keep: "),
        ({"keep": KEEP, "join": {"on": "content_hash"}}, "filter.join.on: there is no"),
        ({"keep": KEEP, "join": {"path": "side/none.csv"}}, "filter.join.path: names no file"),
        ({"keep": KEEP, "join": {"path": "in/*.jsonl", "on": "doc_id"}}, "filter.join.on: there"),
    ],
)
def test_a_wrong_join_is_one_line(folder: Path, rule: dict[str, Any], line: str) -> None:
    write_table(folder)
    path = folder / rule.get("join", {}).pop("path", "side/flags.parquet")
    with pytest.raises(SpecError, match=line):
        filtered_with(folder, **{**rule, "join": {"path": str(path), **rule.get("join", {})}})


def test_a_table_that_contradicts_itself_and_a_damaged_one_are_refused(own_folder: Path) -> None:
    path = write_table(own_folder)
    whole = pq.read_table(path)
    other = whole.slice(0, 1).set_column(1, "flagged", pa.array([None], pa.bool_()))
    rule: dict[str, Any] = {"keep": KEEP, "join": {"path": str(path)}}
    pq.write_table(pa.concat_tables([whole, whole.slice(0, 1)]), path)
    assert previewed(own_folder, **rule).documents == 90  # — a row occurs twice, with equal values
    pq.write_table(pa.concat_tables([whole, other]), path)
    with pytest.raises(SpecError, match=r"filter\.join\.path: has different rows with this doc_id"):
        filtered_with(own_folder, **rule)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StorageError, match=r"flags\.parquet: cannot be read: "):
        filtered_with(own_folder, **rule)
    text = path.with_suffix(".txt")
    text.write_text("a")
    with pytest.raises(SpecError, match=r"filter\.join\.path: has txt files; name files of one of"):
        filtered_with(own_folder, keep=KEEP, join={"path": str(text)})


def test_joined_without_a_join_is_no_column(folder: Path) -> None:
    assert "join" not in content_of(folder, keep=KEEP)["filter"]
    with pytest.raises(SpecError, match=r"filter\.keep: .*joined"):
        filtered_with(folder, keep=KEEP)


def test_ids_like_dates_and_texts_of_several_lines_are_read(own_folder: Path) -> None:
    days = [f"2026-01-{day:02}" for day in range(1, 20)]
    path = own_folder / "side.jsonl"
    path.write_text("".join(json.dumps({"doc_id": day, "flagged": True}) + "\n" for day in days))
    assert SideTable.of(JoinSpec(path=str(path)), {}, ["flagged"]).dataset.count_rows() == 19
    path = own_folder / "side.csv"
    lines = (f'{day},"a text\nof several, lines {"x" * 60}"\n' for day in days * 2000)
    path.write_text("doc_id,note\n" + "".join(lines))
    side = SideTable.of(JoinSpec(path=str(path)), {}, ["note"])
    with duckdb.connect() as database:
        database.sql("create table labels as select '2026-01-07' as doc_id")
        database.execute(side.join(database, "labels", "joined.note"))
        assert database.execute("select count(*) from side").fetchone() == (38_000,)
    path.write_text("doc_id,flagged,words\n")  # — nothing is flagged
    rule = {"keep": KEEP, "join": {"path": str(path)}}
    assert kept(filtered_with(own_folder, **rule)) == kept(
        filtered_with(own_folder, "other", keep=f"{SCORE} < 0.8")
    )


def test_ids_of_a_csv_file_are_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "side.csv"
    path.write_text("flag,doc_id\n1,007\n2,7\n3,\n4,\n")
    side = SideTable.of(JoinSpec(path=str(path)), {}, ["flag", "doc_id"])
    with duckdb.connect() as database:
        database.sql("create table labels as select unnest(['007', '7', '07']) as doc_id")
        query = side.join(database, "labels", "doc_id, joined.flag, joined.doc_id")
        rows = sorted(database.sql(query).fetchall())
    assert rows == [("007", 1, "007"), ("07", None, None), ("7", 2, "7")]
