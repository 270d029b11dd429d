"""A filtered corpus, its files read with DuckDB, pyarrow and json alone."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filtered import (
    ANSWERED,
    SCORE,
    content_of,
    filtered_with,
    ids,
    kept_folder,
    previewed,
    query,
    spec_of,
)
from finished import Corpus, finish, finish_folder, label_file, toy_fingerprints

from pipeline.errors import FailedRowsError, SpecError, StorageError
from pipeline.filters.result import FilterResult
from pipeline.filters.run import filter_corpus
from pipeline.filters.writers import kept_rows
from pipeline.ledger import rows
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.label_files import LabelFile
from pipeline.options import FilterOptions
from pipeline.sources.shards import Shard
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import parse_spec
from pipeline.stores.local import LocalStore
from pipeline.stores.store import Store

LANGUAGES = ("en", "de")
CONDITIONS = (f"{SCORE} < 0.6", "topic.label <> 'law'")
KEEP = " and ".join(CONDITIONS)
TOP = {"share": 0.2, "of": SCORE, "by": "topic", "smallest": 1}


def oracle(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The ids that a plain query keeps, drops, and has no answer for."""
    queries = (f"{KEEP} and {ANSWERED}", f"not ({KEEP}) and {ANSWERED}", f"not ({ANSWERED})")
    rows = [query(folder, f"select doc_id from labels where {each}") for each in queries]
    kept, dropped, failed = ([identifier for (identifier,) in each] for each in rows)
    assert len(kept) > 20 and len(dropped) > 20 and len(failed) == 3
    assert len(kept) + len(dropped) + len(failed) == 90
    return kept, dropped, failed


def kept_lines(filtered: FilterResult) -> list[str]:
    files = sorted(kept_folder(filtered).rglob("*.jsonl"))
    return [line for file in files for line in file.read_text().splitlines(keepends=True)]


def input_lines(folder: Path) -> dict[str, str]:
    files = [folder / "in" / name for name in ("0.jsonl", "2.jsonl", "deep/1.jsonl")]
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    return {json.loads(line)["id"]: line for line in lines}


def state(folder: Path) -> dict[str, int]:
    files = (file for file in (folder / "to").rglob("*") if file.is_file())
    return {
        str(file.relative_to(folder / "to")): file.stat().st_mtime_ns
        for file in files
        if "attempts" not in file.parts and file.name != "current.json"
    }


def test_kept_and_dropped_are_those_of_a_plain_query_in_the_layout_of_the_input(
    folder: Path,
) -> None:
    filtered = filtered_with(folder, keep=KEEP)
    kept, dropped, failed = oracle(folder)
    written = input_lines(folder)
    assert kept_lines(filtered) == [written[i] for i in written if i in kept]
    files = kept_folder(filtered).rglob("*.jsonl")
    names = {str(file.relative_to(kept_folder(filtered))).split(".")[0] for file in files}
    assert names == {"0", "2", "deep/1"}
    assert filtered.written is not None
    [pattern] = filtered.written.dropped.globs
    table = duckdb.sql(f"select * from '{pattern}'").to_arrow_table()
    rows = {row["doc_id"]: row for row in table.to_pylist()}
    assert sorted(rows) == sorted(dropped + failed) and len(rows) == table.num_rows
    whole = {row["doc_id"]: row for row in open_labels(str(folder / "out")).to_table().to_pylist()}
    meeting = {each: ids(folder, each) for each in CONDITIONS}
    for identifier, row in rows.items():
        assert row.pop("_text") == json.loads(written[identifier])["text"]
        broken = "; ".join(each for each in CONDITIONS if identifier not in meeting[each])
        reason = "on_error: empty" if identifier in failed else f"keep is false: {broken}"
        assert row.pop("_dropped_by") == reason
        assert row == whole[identifier]


@pytest.mark.parametrize("rule", [{"keep": KEEP}, {"drop_top": TOP}], ids=["keep", "top"])
def test_a_second_run_reads_no_label_writes_nothing_and_reports_the_same(
    own_folder: Path, rule: dict[str, Any]
) -> None:
    first, before = filtered_with(own_folder, **rule), state(own_folder)
    shutil.rmtree(own_folder / "out" / "labels")
    second = filtered_with(own_folder, **rule)
    assert first.written is not None and second.written is not None
    assert first.written.created > 15 and state(own_folder) == before
    assert second == replace(first, written=replace(first.written, created=0))


def test_a_filter_reads_each_label_file_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, times = rows.read_file, Counter[str]()

    def noted(store: Store, key: str, *others: Any, **more: Any) -> pa.Table:
        times[key] += 1
        return read(store, key, *others, **more)

    monkeypatch.setattr(rows, "read_file", noted)
    filtered_with(folder, drop_top=TOP)
    assert len(times) == 9 * 3 and {*times.values()} == {1}


def test_only_a_missing_object_is_written_again(folder: Path) -> None:
    filtered_with(folder, keep=KEEP)
    before = state(folder)
    for kind in ("kept", "dropped", "filters"):
        lost = sorted(name for name in before if name.startswith(kind))[-1]
        content = (folder / "to" / lost).read_bytes()
        (folder / "to" / lost).unlink()
        again = filtered_with(folder, keep=KEEP).written
        assert again is not None and again.created == 1
        after = state(folder)
        assert {name for name in after if after[name] != before[name]} == {lost}
        assert (folder / "to" / lost).read_bytes() == content
        before = after


def current_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "to" / "current.json").read_text())
    return content


def ids_in(globs: list[str], column: str) -> list[str]:
    rows = duckdb.sql(f"select {column} from '{globs[0]}' order by 1").fetchall()
    assert len(globs) == 1
    return [identifier for (identifier,) in rows]


def test_current_json_names_the_files_of_the_last_filter_that_ended_and_no_others(
    folder: Path,
) -> None:
    first = filtered_with(folder, keep=KEEP)
    file = folder / "to" / "current.json"
    kept, _, _ = oracle(folder)
    before = current_of(folder)
    assert ids_in(before["kept"]["globs"], "id") == sorted(kept)
    assert (before["snapshot"], before["rule"], before["complete"]) == (1, KEEP, True)
    written = file.stat().st_mtime_ns, file.stat().st_ino
    filtered_with(folder, keep=KEEP)
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == written

    filtered_with(folder, keep="topic.label = 'art'")
    now, art = current_of(folder), ids(folder, "topic.label = 'art'")
    assert ids_in(now["kept"]["globs"], "id") == sorted(art)
    dropped = ids_in(now["dropped"]["globs"], "doc_id")
    assert len(dropped) == 90 - len(art) and dropped != ids_in(before["dropped"]["globs"], "doc_id")

    filtered_with(folder, keep=KEEP)  # its files exist, and are current again
    assert current_of(folder) == before and before["kept"]["folder"] == str(kept_folder(first))
    with pytest.raises(FailedRowsError):
        filtered_with(folder, keep="true", on_error="fail")
    assert current_of(folder) == before


def test_an_input_that_changed_since_is_refused_by_name(own_folder: Path) -> None:
    path = own_folder / "in" / "deep" / "1.jsonl"
    path.write_text(path.read_text().replace("0", "1", 1))
    with pytest.raises(
        StorageError, match=r"deep/1\.jsonl: is gone, or differs from what snapshot 1 labelled"
    ):
        filtered_with(own_folder, keep=KEEP)
    assert not any(name.startswith(("kept", "filters")) for name in state(own_folder))


def test_an_input_that_changes_between_its_two_reads_is_not_copied(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed_first(shard: Shard, *args: Any) -> bytes:
        path = Path(shard.path)
        new = own_folder / "new"
        new.write_text(path.read_text().replace('"lang"', '"kind"') + "\n")
        new.replace(path)
        return kept_rows(shard, *args)

    monkeypatch.setattr("pipeline.filters.run.kept_rows", changed_first)
    monkeypatch.setattr("pipeline.filters.run.SHARDS_AT_ONCE", 1)
    with pytest.raises(StorageError, match="changed while the job ran"):
        filtered_with(own_folder, keep=KEEP)
    assert not list((own_folder / "to" / "kept").rglob("*.jsonl"))


def add_table(folder: Path, name: str, table: pa.Table, damaged: str = "") -> None:
    """Labels one more file, in which a column's middle page may be broken."""
    path = folder / "in" / name
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".csv":
        rows = [table.column_names, *zip(*(c.to_pylist() for c in table.columns), strict=True)]
        path.write_text("".join(",".join(row) + "\n" for row in rows))
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path, row_group_size=20, compression="none", use_dictionary=False)
    if damaged:
        chunk = pq.ParquetFile(path).metadata.row_group(1).column(table.schema.names.index(damaged))
        data = bytearray(path.read_bytes())
        data[chunk.data_page_offset : chunk.data_page_offset + 30] = b"\xff" * 30
        path.write_bytes(data)
    finish_folder(folder)


IDS, WORDS = [f"p{i}" for i in range(60)], [f"text number {i} " * 5 for i in range(60)]


@pytest.mark.parametrize("name", ["a.parquet", "z.arrow"])
def test_the_rows_of_a_table_without_the_column_are_not_kept_and_are_counted(
    own_folder: Path, name: str
) -> None:
    add_table(own_folder, name, pa.table({"id": IDS, "text": WORDS}))
    result = filtered_with(own_folder, keep="doc.lang in ('en', 'de')")
    assert result.dropped < result.documents
    assert result.reasons["keep is null: doc.lang in ('en', 'de')"] >= 60


@pytest.mark.parametrize("damaged", ["id", "text", "lang"])
def test_rows_of_a_damaged_page_are_dropped_and_have_no_value(
    own_folder: Path, damaged: str
) -> None:
    """A row is kept whole or not at all: with a damaged column it can only be dropped."""
    columns = {"id": IDS, "text": WORDS, "lang": ["en", "de"] * 30}
    add_table(own_folder, "z.parquet", pa.table(columns), damaged)
    keep = "toxic.p.toxic < 0" if damaged == "lang" else "doc.lang in ('en', 'de')"
    result = filtered_with(own_folder, keep=keep)
    assert result.documents == 150
    unreadable = sum(n for reason, n in result.reasons.items() if "cannot be read" in reason)
    assert unreadable == (0 if damaged == "lang" else 20)
    assert damaged == "lang" or not any("keep is null" in reason for reason in result.reasons)


def twins(names: Sequence[str]) -> pa.Table:
    """A table with these columns beside the id and the text."""
    arrays = [pa.array(values) for values in (IDS, WORDS, *([f"20{n}"] * 60 for n in range(9)))]
    return pa.Table.from_arrays(arrays[: 2 + len(names)], ["id", "text", *names])


@pytest.mark.parametrize("name", ["z.parquet", "z.arrow", "z.csv"])
def test_a_table_with_columns_of_one_name_is_kept_with_all_of_them(
    tmp_path: Path, name: str
) -> None:
    names = ("year", "YEAR", "year")
    add_table(tmp_path, name, twins(names))
    filtered = filtered_with(tmp_path, keep="toxic.p.toxic < 2")
    files = [path for path in kept_folder(filtered).iterdir() if path.is_file()]
    assert files and filtered.sizes.kept.documents == 60
    for file in files:
        header = file.read_text().partition("\n")[0].split(",") if name == "z.csv" else None
        assert (header or pq.read_schema(file).names) == ["id", "text", *names]


@pytest.mark.parametrize(
    ("name", "columns", "line"),
    [
        ("z.parquet", {"lang": [["en"]] * 60}, "has list<.*> there; name a column of strings or "),
        ("z.parquet", ("lang", "lang"), "has 2 such columns; it has: id, lang, lang, text"),
        ("z.csv", ("lang", "lang"), "has 2 such columns; it has: id, lang, lang, text"),
        ("z.parquet", ("a, b", ""), "has no such column; it has: '', 'a, b', id, text"),
    ],
)
def test_a_column_that_a_rule_cannot_read_is_named(
    tmp_path: Path, name: str, columns: Any, line: str
) -> None:
    others = {"id": IDS, "text": WORDS}
    table = pa.table(others | columns) if isinstance(columns, dict) else twins(columns)
    add_table(tmp_path, name, table)
    with pytest.raises(SpecError, match=rf"^filter: .*{name} {line}.* \(got 'lang'\)"):
        filtered_with(tmp_path, keep="doc.lang = 'en'")
    assert not state(tmp_path)


@pytest.mark.parametrize("name", ["z.arrow", "z.csv"])
def test_a_rule_that_names_columns_that_sql_does_not_tell_apart_is_refused(
    tmp_path: Path, name: str
) -> None:
    """SQL would read the first of both in each place."""
    add_table(tmp_path, name, twins(("year", "Year")))
    with pytest.raises(SpecError, match="SQL takes year, Year for one name; rename one of them"):
        previewed(tmp_path, keep="doc.year = '200' and doc.Year = '201'")
    for one in ("doc.year = '200'", "doc.Year = '201'"):
        assert previewed(tmp_path, keep=one).sizes.kept.documents == 60


def test_the_globs_of_a_folder_with_wildcards_in_its_name_match_its_files_alone(
    folder: Path,
) -> None:
    to = "a[x] what? star* [!a] x[1-3]y"
    filtered = filtered_with(folder, to, keep="true")
    current = json.loads((folder / to / "current.json").read_text())
    assert len(ids_in(current["kept"]["globs"], "id")) == 87 == filtered.sizes.kept.documents
    assert len(ids_in(current["dropped"]["globs"], "doc_id")) == 3


def test_what_a_killed_filter_left_is_deleted(folder: Path) -> None:
    left = folder / "to" / "attempts" / f"create-{'0' * 32}"
    left.parent.mkdir(parents=True)
    left.write_text("a text")
    options = FilterOptions(str(folder / "to"))
    filter_corpus(spec_of(folder, keep="true"), options, cache_dir=folder / "cache")
    assert not left.exists()


def test_files_with_other_names_are_those_of_another_filter(
    own_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    to = str(tmp_path_factory.mktemp("to"))
    first = filtered_with(own_folder, to, keep=KEEP)
    wider = {**content_of(own_folder, keep=KEEP)}
    wider["input"] = {"path": f"{own_folder}/i*/**/*.jsonl", "id": "id"}
    again = filter_corpus(
        parse_spec(json.dumps(wider)), FilterOptions(to), cache_dir=own_folder / "cache"
    )
    assert again.written is not None and kept_folder(again) != kept_folder(first)
    rows = ids_in(list(again.written.kept.globs), "id")
    assert sorted(rows) == sorted({*rows}) and len(rows) == first.sizes.kept.documents


def test_answers_under_the_same_keys_are_another_filter(own_folder: Path) -> None:
    first = filtered_with(own_folder, keep=KEEP)
    shutil.rmtree(own_folder / "out" / "labels")  # — damaged, say; the model now answers otherwise
    store = LocalStore(own_folder / "out")
    shards = Corpus(own_folder / "in", own_folder / "cache").shards(store)

    def other(shard: Shard, task: str, fingerprint: Fingerprint) -> LabelFile:
        file = label_file(shard, task, Fingerprint({"other": task}))
        return replace(file, fp=fingerprint.id, metadata={"task": task, "fp": fingerprint.id})

    assert finish(store, shards, toy_fingerprints(), answer=other) == 2
    second = filtered_with(own_folder, keep=KEEP)
    assert kept_folder(second) != kept_folder(first) and second.dropped != first.dropped


@pytest.mark.parametrize("to", ["delta+{}/to", "lance+{}/to", "iceberg://local/docs.web"])
def test_a_table_is_no_folder_for_a_filter(folder: Path, to: str) -> None:
    options = FilterOptions(to.format(folder))
    with pytest.raises(SpecError, match=r"^to: is a table; name a folder or a URL"):
        filter_corpus(spec_of(folder, keep="true"), options, cache_dir=folder / "cache")


@pytest.mark.parametrize("to", ["out", "out/kept", "in", "in/x", ".", "../"])
def test_a_folder_of_the_spec_is_refused_before_anything_is_written(folder: Path, to: str) -> None:
    before = sorted(folder.rglob("*"))
    options = FilterOptions(str(folder / to))
    with pytest.raises(SpecError) as refused:
        filter_corpus(spec_of(folder, keep="true"), options, cache_dir=folder / "cache")
    assert [problem.place for problem in refused.value.problems] == ["to"]
    assert sorted(folder.rglob("*")) == before


def test_a_filter_of_the_same_answers_is_as_complete_as_the_snapshot_is_now(
    own_folder: Path,
) -> None:
    assert filtered_with(own_folder, keep=KEEP).complete
    for missing in (1, 0):
        finish_folder(own_folder, missing_files=missing)
        result = filtered_with(own_folder, keep=KEEP)
        assert result.missing_files == missing and result.complete == (not missing)
        assert result.written is not None and result.written.created == 0
        assert json.loads(Path(result.written.current).read_text())["complete"] == (not missing)
