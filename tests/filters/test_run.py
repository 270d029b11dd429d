"""A filtered corpus, its files read with DuckDB, pyarrow and json alone."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filtered import ids, labelled, query
from finished import Corpus, finish, toy_fingerprints, toy_spec
from rich.console import Console

from pipeline.errors import FailedRowsError, SpecError, StorageError
from pipeline.filters.run import FilterResult, filter_corpus
from pipeline.ledger.dataset import open_labels
from pipeline.options import FilterOptions, OnError
from pipeline.report.console import console_on
from pipeline.report.filters import show_filtered
from pipeline.sources.source import read_documents
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore

CONDITIONS = ("toxic.p.toxic < 0.6", "topic.label <> 'law'")
KEEP = " and ".join(CONDITIONS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files below one folder, one above, of three shards each, labelled."""
    return labelled(tmp_path, ("en", "de"), is_deep=True)


def spec_of(folder: Path, **filter: Any) -> JobSpec:
    content = toy_spec(folder, filter={"keep": KEEP, **filter})
    return parse_spec(json.dumps(content))


def run(folder: Path, on_error: OnError | None = "drop") -> FilterResult:
    filter_options = FilterOptions(str(folder / "to"), on_error=on_error)
    return filter_corpus(spec_of(folder), filter_options, cache_dir=folder / "cache")


def oracle(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The ids that a plain query keeps, drops, and has no answer for."""
    answered = "toxic.status = 'ok' and topic.status = 'ok'"
    queries = (f"{KEEP} and {answered}", f"not ({KEEP}) and {answered}", f"not ({answered})")
    found = [query(folder, f"select doc_id from labels where {each}") for each in queries]
    assert sum(map(len, found)) == 90
    kept, dropped, failed = ([identifier for (identifier,) in rows] for rows in found)
    assert len(kept) > 20 and len(dropped) > 20 and len(failed) == 3
    return kept, dropped, failed


def kept_lines(filtered: FilterResult) -> list[str]:
    files = sorted(Path(filtered.kept_at).rglob("*.jsonl"))
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


def test_kept_and_dropped_are_what_a_plain_query_says(folder: Path) -> None:
    filtered = run(folder)
    kept, dropped, failed = oracle(folder)
    written = input_lines(folder)
    assert kept_lines(filtered) == [written[i] for i in written if i in kept]
    files = f"{filtered.dropped_at}/**/*.parquet"
    table = duckdb.sql(f"select * from '{files}'").to_arrow_table()
    rows = {row["doc_id"]: row for row in table.to_pylist()}
    assert sorted(rows) == sorted(dropped + failed) and len(rows) == table.num_rows
    whole = {row["doc_id"]: row for row in open_labels(str(folder / "out")).to_table().to_pylist()}
    meeting = {each: ids(folder, each) for each in CONDITIONS}
    for identifier, row in rows.items():
        assert row.pop("_text") == json.loads(written[identifier])["text"]
        broken = "; ".join(each for each in CONDITIONS if identifier not in meeting[each])
        wanted = "on_error: empty" if identifier in failed else f"keep is false: {broken}"
        assert row.pop("_dropped_by") == wanted
        assert row == whole[identifier]


def test_the_layout_is_the_inputs(folder: Path) -> None:
    names = {
        str(file.relative_to(run(folder).kept_at)).split(".")[0]
        for file in Path(run(folder).kept_at).rglob("*.jsonl")
    }
    assert names == {"0", "2", "deep/1"}


def test_what_is_counted_is_what_lies_there(folder: Path) -> None:
    filtered = run(folder)
    kept, dropped, _ = oracle(folder)
    written = {i: json.loads(line) for i, line in input_lines(folder).items()}
    labels = open_labels(str(folder / "out")).to_table().to_pylist()
    tokens = {row["doc_id"]: row["topic"]["n_tokens"] for row in labels}
    for amount, chosen in (
        (filtered.counts.all.kept, kept),
        (filtered.counts.all.dropped, written.keys() - set(kept)),
    ):
        assert amount.documents == len(chosen) > 0
        assert amount.text_bytes == sum(len(written[i]["text"].encode()) for i in chosen)
        assert amount.tokens == sum(tokens[i] for i in chosen)
    broken = {each: set(dropped) - ids(folder, each) for each in CONDITIONS}
    assert filtered.counts.reasons == {
        **{f"keep is false: {each}": len(found) for each, found in broken.items()},
        "on_error: empty": 3,
    }
    toxic, law = broken.values()
    assert filtered.counts.several == len(toxic & law) > 0


def test_a_second_run_writes_nothing_and_says_the_same(folder: Path) -> None:
    first, before = run(folder), state(folder)
    second = run(folder)
    assert first.created == len(before) > 20
    assert second.created == 0 and second.counts == first.counts
    assert state(folder) == before


@pytest.mark.parametrize("kind", ["kept", "dropped", "filters"])
def test_only_a_missing_object_is_written_again(folder: Path, kind: str) -> None:
    run(folder)
    before = state(folder)
    lost = sorted(name for name in before if name.startswith(kind))[1]
    content = (folder / "to" / lost).read_bytes()
    (folder / "to" / lost).unlink()
    assert run(folder).created == 1
    after = state(folder)
    assert {name for name in after if after[name] != before[name]} == {lost}
    assert (folder / "to" / lost).read_bytes() == content


def test_another_rule_does_not_mix_with_the_first(folder: Path) -> None:
    first, before = run(folder), state(folder)
    filter_options = FilterOptions(str(folder / "to"), on_error="drop")
    other = filter_corpus(spec_of(folder, keep="true"), filter_options, cache_dir=folder / "cache")
    assert other.kept_at != first.kept_at
    assert len(kept_lines(other)) == 87 and kept_lines(first) == kept_lines(run(folder))
    assert before.items() <= state(folder).items()


def current_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "to" / "current.json").read_text())
    return content


def ids_in(globs: list[str], column: str) -> list[str]:
    rows = duckdb.sql(f"select {column} from '{globs[0]}' order by 1").fetchall()
    assert len(globs) == 1
    return [identifier for (identifier,) in rows]


def test_current_json_names_the_files_of_the_last_filter_and_no_others(folder: Path) -> None:
    first = run(folder)
    file = folder / "to" / "current.json"
    wanted, _, _ = oracle(folder)
    before = current_of(folder)
    assert ids_in(before["kept"]["globs"], "id") == sorted(wanted)
    assert (before["snapshot"], before["keep"], before["complete"]) == (1, KEEP, True)
    written = file.stat().st_mtime_ns, file.stat().st_ino
    run(folder)
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == written

    filter_options = FilterOptions(str(folder / "to"), on_error="drop")
    filter_corpus(
        spec_of(folder, keep="topic.label = 'art'"), filter_options, cache_dir=folder / "cache"
    )
    now = current_of(folder)
    art = duckdb.sql(
        f"select doc_id from '{folder}/out/labels/topic/*/*/*.parquet' where label = 'art'"
    ).fetchall()
    assert ids_in(now["kept"]["globs"], "id") == sorted(i for (i,) in art)
    dropped = ids_in(now["dropped"]["globs"], "doc_id")
    assert len(dropped) == 90 - len(art) and dropped != ids_in(before["dropped"]["globs"], "doc_id")

    run(folder)  # the first rule again: its files exist, and are current again
    assert current_of(folder) == before and before["kept"]["folder"] == first.kept_at


def test_current_json_is_not_replaced_by_a_filter_that_fails(folder: Path) -> None:
    run(folder)
    before = current_of(folder)
    filter_options = FilterOptions(str(folder / "to"), on_error="fail")
    with pytest.raises(FailedRowsError):
        filter_corpus(spec_of(folder, keep="true"), filter_options, cache_dir=folder / "cache")
    assert current_of(folder) == before


@pytest.mark.parametrize("columns", [0, 80])
def test_each_path_of_the_report_is_on_one_line(folder: Path, columns: int) -> None:
    """On a stream that is no terminal (0) and on a terminal of 80 columns."""
    filter_options = FilterOptions(str(folder / ("long-" * 12) / "to"), on_error="drop")
    filtered = filter_corpus(spec_of(folder), filter_options, cache_dir=folder / "cache")
    shown = io.StringIO()
    console = console_on(shown)
    if columns:
        console = Console(file=shown, width=columns, highlight=False, soft_wrap=True)
    show_filtered(filtered, console)
    lines = shown.getvalue().splitlines()
    for path in (*filtered.kept_globs, filtered.dropped_glob, filtered.current):
        assert len(path) > 80 and [line for line in lines if line.endswith(f": {path}")], path


def test_documents_without_an_answer_do_what_is_asked(folder: Path) -> None:
    with pytest.raises(FailedRowsError, match=r"3 of 90 documents have no answer \(empty 3\)"):
        run(folder, on_error=None)
    assert not state(folder)
    kept, _, failed = oracle(folder)
    found = {json.loads(line)["id"] for line in kept_lines(run(folder, on_error="keep"))}
    assert found == {*kept, *failed}


def test_an_input_that_changed_since_is_refused_by_name(folder: Path) -> None:
    path = folder / "in" / "deep" / "1.jsonl"
    path.write_text(path.read_text().replace("0", "1", 1))
    with pytest.raises(
        StorageError, match=r"deep/1\.jsonl: is gone, or differs from what snapshot 1 labelled"
    ):
        run(folder)
    assert not any(name.startswith(("kept", "filters")) for name in state(folder))


def test_a_text_that_is_not_the_labelled_one_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the file's hash was remembered from before."""
    path = folder / "in" / "0.jsonl"
    path.write_text(path.read_text().replace("0 1 ", "0 9 ", 1))
    files = (folder / "out" / "documents").glob("*.parquet")
    origins = [json.loads(pq.read_schema(file).metadata[b"assay.shard"]) for file in files]
    hashes = {origin["path"]: origin["etag"] for origin in origins}
    monkeypatch.setattr("pipeline.sources.source.content_hash", lambda path, _: hashes[str(path)])
    with pytest.raises(StorageError, match=r"0\.jsonl: row 1 is not the text that was labelled"):
        run(folder)


def test_a_folder_inside_the_input_is_refused_before_anything_is_written(folder: Path) -> None:
    options = FilterOptions(str(folder / "in" / "to"), on_error="drop")
    with pytest.raises(SpecError) as refused:
        filter_corpus(spec_of(folder), options, cache_dir=folder / "cache")
    assert [problem.place for problem in refused.value.problems] == ["to"]
    assert not state(folder) and not (folder / "in" / "to").exists()


def add_table(folder: Path, name: str, columns: Mapping[str, Any], damaged: str = "") -> int:
    """Labels one more file, in which a column's middle page may be broken; its rows."""
    path, table = folder / "in" / name, pa.table(dict(columns))
    if path.suffix == ".arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path, row_group_size=20, compression="none", use_dictionary=False)
    if damaged:
        chunk = pq.ParquetFile(path).metadata.row_group(1).column(table.schema.names.index(damaged))
        data = bytearray(path.read_bytes())
        data[chunk.data_page_offset : chunk.data_page_offset + 30] = b"\xff" * 30
        path.write_bytes(data)
    store = LocalStore(folder / "out")
    finish(store, Corpus(folder / "in", folder / "cache").shards(store), toy_fingerprints())
    return table.num_rows


IDS, WORDS = [f"p{i}" for i in range(60)], [f"text number {i} " * 5 for i in range(60)]


@pytest.fixture
def any_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "finished.documents_of",
        lambda shard: pa.concat_tables(read_documents(shard)).combine_chunks(),
    )


@pytest.mark.usefixtures("any_format")
@pytest.mark.parametrize("name", ["z.parquet", "z.arrow"])
@pytest.mark.parametrize(
    "lang, told",
    [
        ({}, r"has no such column; it has: id, text"),
        ({"lang": [["en"]] * 60}, r"has list<.*> there; name a column of strings or numbers"),
    ],
)
def test_a_later_table_without_the_column_is_named(
    folder: Path, name: str, lang: dict[str, Any], told: str
) -> None:
    add_table(folder, name, {"id": IDS, "text": WORDS, **lang})
    options = FilterOptions(str(folder / "to"), on_error="drop")
    spec = spec_of(folder, keep="doc.lang = 'en'")
    with pytest.raises(SpecError, match=rf"^filter: .*{name} {told} \(got 'lang'\)"):
        filter_corpus(spec, options, cache_dir=folder / "cache")
    assert not state(folder)


@pytest.mark.usefixtures("any_format")
@pytest.mark.parametrize("damaged", ["id", "text", "lang"])
def test_rows_of_a_damaged_page_are_dropped_and_have_no_value(folder: Path, damaged: str) -> None:
    """A row is kept whole or not at all: with a damaged column it can only be dropped."""
    columns = {"id": IDS, "text": WORDS, "lang": ["en", "de"] * 30}
    add_table(folder, "z.parquet", columns, damaged=damaged)
    keep = "toxic.p.toxic < 0" if damaged == "lang" else "doc.lang in ('en', 'de')"
    filter_options = FilterOptions(str(folder / "to"), on_error="drop")
    counts = filter_corpus(
        spec_of(folder, keep=keep), filter_options, cache_dir=folder / "cache"
    ).counts
    assert counts.all.kept.documents + counts.all.dropped.documents == 150
    unreadable = sum(n for reason, n in counts.reasons.items() if "cannot be read" in reason)
    assert unreadable == (0 if damaged == "lang" else 20)
    assert damaged == "lang" or not any("keep is null" in reason for reason in counts.reasons)


def test_a_rule_that_says_neither_drops_and_says_so(folder: Path) -> None:
    keep = "nullif(toxic.label, 'toxic') = 'clean'"
    filter_options = FilterOptions(str(folder / "to"), on_error="drop")
    filtered = filter_corpus(spec_of(folder, keep=keep), filter_options, cache_dir=folder / "cache")
    toxic = open_labels(str(folder / "out")).to_table(
        filter=pa.compute.field("toxic", "label") == "toxic"
    )
    assert filtered.counts.reasons == {"on_error: empty": 3, f"keep is null: {keep}": len(toxic)}
