"""Exports equal a join that DuckDB makes over the Parquet files and the input by itself."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from calls import Assay
from data_fixtures import Row
from filtered import labelled
from finished import LABELS, Corpus, commit_all, finish, finish_folder, toy_fingerprints, toy_spec
from servers import Server

from pipeline.errors import SpecError, StorageError
from pipeline.ledger.cells import committed
from pipeline.ledger.cuts import load_or_cut
from pipeline.ledger.snapshots import SnapshotTask, publish
from pipeline.options import ExportOptions
from pipeline.sources.source import find_objects
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import Columns, JobSpec
from pipeline.stores.local import LocalStore
from pipeline.stores.named_files import Target
from pipeline.verbs.export import MANIFEST, TEXT_CHARS, export, head
from pipeline.verbs.label_table import ExportResult, TableFormat

READERS = {"parquet": "read_parquet", "jsonl": "read_json", "csv": "read_csv"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A labelled corpus of three files of three shards each, one of them in a folder below."""
    return labelled(tmp_path, ["en"])


def spec_of(folder: Path, **changes: Any) -> JobSpec:
    return parse_spec(json.dumps(toy_spec(folder, **changes)))


def run(folder: Path, to: str, **options: Any) -> ExportResult:
    chosen = ExportOptions(str(folder / to) + "/" * to.endswith("/"), **options)
    return export(spec_of(folder), chosen, cache_dir=folder / "cache")


def rows_of(result: ExportResult) -> list[tuple[Any, ...]]:
    """The rows of the files, in the files' order; the columns in that of the report."""
    files = sorted(str(path) for path in Path(result.to).rglob(f"*.{result.format}"))
    # — numbers as text are read as 64 bits
    casts = {"float": "::float", "string": "::varchar"}
    columns = ", ".join(f'"{c.name}"{casts.get(str(c.type), "")}' for c in result.columns)
    files_read = f"{READERS[result.format]}({files or [result.to]})"
    return duckdb.sql(f"select {columns} from {files_read}").fetchall()


def joined(folder: Path, *, with_text: bool) -> list[tuple[Any, ...]]:
    """The rows by a join of the raw files, in the order of the input's files."""
    columns = ["doc_id", "i.path", "i.row", "d.content_hash", "d.n_chars", "d.status::varchar"]
    columns += ["i.text"] * with_text
    for task in sorted(LABELS):
        p = [f"{task}.p.{label}" for label in LABELS[task]]
        measures = [f"{task}.{name}" for name in ("mass", "margin", "n_tokens", "n_chunks")]
        columns += [f"{task}.label::varchar", *p, *measures, f"{task}.status::varchar"]
    answers = " ".join(
        f"join '{folder}/out/labels/{task}/*/*/*.parquet' {task} using (doc_id)" for task in LABELS
    )
    lines = (
        f"read_json('{folder}/in/**/*.jsonl', filename=true, columns={{id:'text', text:'text'}})"
    )
    numbered = f"(select *, filename as path, split_part(id, '-', 2)::int as row from {lines})"
    return duckdb.sql(
        f"select {', '.join(columns)} from {numbered} i "
        f"join '{folder}/out/documents/*.parquet' d on i.id = doc_id {answers} "
        f"order by i.path, i.row"
    ).fetchall()


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize(
    ("to", "format"),
    [("there/", "parquet"), *((f"a/table.{each}", each) for each in READERS)],
)
def test_an_export_equals_a_join_of_the_raw_files(
    folder: Path, to: str, format: TableFormat, with_text: bool
) -> None:
    result = run(folder, to, with_text=with_text)
    expected = joined(folder, with_text=with_text)
    rows = rows_of(result)
    assert rows == expected and len(rows) == 90
    files = 9 if to.endswith("/") else 1
    assert (result.rows, result.files, result.created) == (90, files, files)
    assert result.complete and result.format == format


def test_a_folder_whose_files_had_other_names_is_not_added_to(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    to = tmp_path_factory.mktemp("to")
    first = run(folder, f"{to}/")
    spec = spec_of(folder, input={"path": f"{folder}/i*/**/*.jsonl", "id": "id"})
    options = ExportOptions(f"{to}/")
    with pytest.raises(SpecError, match=r"^to: holds another export \(snapshot 1 of job\)"):
        export(spec, options, cache_dir=folder / "cache")
    assert len(rows_of(first)) == 90
    result = export(spec, replace(options, overwrite=True), cache_dir=folder / "cache")
    assert len(rows_of(result)) == 90 and (to / "in" / "deep").is_dir()


def test_columns_of_the_input_are_added_and_a_missing_one_is_named(folder: Path) -> None:
    result = run(folder, "a.jsonl", columns=("id",))
    # — the name of the column of documents comes first
    rows = duckdb.sql(f"select doc_id, doc_id_2 from '{result.to}'").fetchall()
    assert len(rows) == 90 and all(own == of_input for own, of_input in rows)
    assert run(folder, "there/", columns=("id",)).created == 9
    with pytest.raises(SpecError, match=r"^columns: .* \(got 'year'\)$"):
        run(folder, "b.csv", columns=("year",))
    assert not (folder / "b.csv").exists()


def test_rows_of_a_parquet_file_are_in_few_row_groups_and_typed(folder: Path) -> None:
    result = run(folder, "a.parquet")
    described = duckdb.sql(f"describe select * from '{result.to}'").fetchall()
    types = {name: kind for name, kind, *_ in described}
    assert types["toxic"] == "VARCHAR" and types["toxic_p_clean"] == "FLOAT"
    assert types["row"] == "BIGINT" and types["toxic_n_chunks"] == "SMALLINT"
    groups = duckdb.sql(f"select count(distinct row_group_id) from parquet_metadata('{result.to}')")
    assert groups.fetchall() == [(1,)]


def state(folder: Path) -> dict[str, int]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_mtime_ns for file in files}


def edit_unseen(file: Path, before: str, after: str) -> None:
    """Changes a text as no file system shows it: the length and the time stay."""
    time_ns = file.stat().st_mtime_ns
    text = file.read_text()
    assert before in text and len(before) == len(after)
    file.write_text(text.replace(before, after, 1))
    os.utime(file, ns=(time_ns, time_ns))


def test_a_folder_that_an_error_stopped_is_finished_by_the_same_command(folder: Path) -> None:
    """The text of one shard in nine is not the labelled one, until it is as before."""
    last = folder / "in" / "deep" / "1.jsonl"
    edit_unseen(last, '"0 29 ', '"9 29 ')
    with pytest.raises(StorageError, match="is not the text that was labelled"):
        run(folder, "there/", with_text=True)
    before = state(folder / "there")
    manifest = folder / "there" / MANIFEST
    assert len(before) == 9 and json.loads(manifest.read_text())["finished"] is False
    edit_unseen(last, '"9 29 ', '"0 29 ')
    result = run(folder, "there/", with_text=True)
    after = state(folder / "there")
    assert result.created == 1 and len(after) == 10
    assert {name for name in before if before[name] != after[name]} == {MANIFEST}
    assert rows_of(result) == joined(folder, with_text=True)
    assert json.loads(manifest.read_text())["finished"] is True
    assert run(folder, "there/", with_text=True).created == 0 and state(folder / "there") == after


@pytest.mark.parametrize("to", ["a.csv", "there/"])
def test_an_existing_target_is_replaced_only_where_asked(folder: Path, to: str) -> None:
    first = run(folder, f"to/{to}")
    before = state(folder / "to")
    assert finish_folder(folder, "2") == 2
    with pytest.raises(SpecError, match=r"^to: .*--overwrite"):
        run(folder, f"to/{to}")
    assert before == state(folder / "to")
    old = rows_of(first)
    second = run(folder, f"to/{to}", overwrite=True)
    assert second.snapshot == 2 and len(rows_of(second)) == 90 and rows_of(second) != old


def test_an_export_that_ends_while_it_replaces_another_can_be_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, "there/")
    left = 1
    delete = Target.delete

    def ends(target: Target) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        delete(target)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "delete", ends)
        with pytest.raises(KeyboardInterrupt):
            run(folder, "there/", with_text=True, overwrite=True)
    result = run(folder, "there/", with_text=True, overwrite=True)
    assert rows_of(result) == joined(folder, with_text=True)


def test_files_of_others_are_never_deleted(folder: Path) -> None:
    (folder / "there").mkdir()
    (folder / "there" / "mine.parquet").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(SpecError, match="to: is a folder with 1 files of other programs"):
            run(folder, "there/", overwrite=overwrite)
    (folder / "there" / "mine.parquet").unlink()
    run(folder, "there/")
    (folder / "there" / "mine.parquet").write_text("mine")
    run(folder, "there/", with_text=True, overwrite=True)
    assert (folder / "there" / "mine.parquet").read_text() == "mine"


@pytest.mark.parametrize("content", ["", "[1]", '{"id": "a"}', '{"id": 1, "files": 2, "spec": 3}'])
def test_a_manifest_that_no_export_has_written_is_one_line(content: str, folder: Path) -> None:
    (folder / "there").mkdir()
    (folder / "there" / "_export.json").write_text(content)
    for overwrite in (False, True):
        with pytest.raises(SpecError, match=r"whose _export.json no export has written"):
            run(folder, "there/", overwrite=overwrite)
    assert (folder / "there" / "_export.json").read_text() == content


@pytest.mark.parametrize(
    "to, options, line",
    [
        ("a.tsv", {}, "to: end the name of a file in one of .parquet, .jsonl, .csv, and"),
        ("in/a.csv", {}, "to: is in the input"),
        ("in/0.jsonl", {"overwrite": True}, "to: is in the input"),
        ("out/a.csv", {"overwrite": True}, "to: is in the output"),
    ],
)
@pytest.mark.parametrize("input_path", ["in", "in/*.*"])
def test_a_wrong_target_is_named_and_nothing_is_written(
    folder: Path, input_path: str, to: str, options: dict[str, Any], line: str
) -> None:
    before = state(folder)
    spec = spec_of(folder, input={"path": str(folder / input_path), "id": "id"})
    with pytest.raises(SpecError) as refused:
        export(spec, ExportOptions(str(folder / to), **options), cache_dir=folder / "cache")
    assert str(refused.value).startswith(line) and state(folder) == before


@pytest.mark.parametrize(
    "corpus",
    ["corpus.parquet", "corpus.jsonl.gz", "stream.arrow", "corpus.warc.wet.gz", "corpus.csv"],
    indirect=True,
)
def test_texts_of_each_kind_of_format_are_those_of_the_rows(
    corpus: Path, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.sources.documents.SLICE_ROWS", 7)  # a shard has several
    names = {"id": "id", "text": "text"}
    store = LocalStore(tmp_path / "out")
    objects = find_objects(str(corpus), tmp_path / "cache")
    shards = load_or_cut(store, objects, Columns("text", "id"), 200_000).shards
    assert len(shards) > 1
    finish(store, shards, toy_fingerprints())
    spec = spec_of(tmp_path, input={"path": str(corpus), **names})
    options = ExportOptions(f"{tmp_path}/to/", with_text=True)
    result = export(spec, options, cache_dir=tmp_path / "cache")
    files = duckdb.sql(f"select doc_id, text from '{result.glob}' order by row").fetchall()
    assert files == rows and result.rows == len(rows)
    examples = head(spec, ExportOptions(head=200), cache_dir=tmp_path / "cache").rows
    shown = [text[:TEXT_CHARS] for _, text in rows]
    assert examples.column("_text").to_pylist() == shown


def test_texts_need_the_labelled_input_and_labels_do_not(folder: Path) -> None:
    path = folder / "in" / "0.jsonl"
    path.write_text(path.read_text().replace("0 1 ", "0 9 ", 1))
    with pytest.raises(StorageError, match=r"0\.jsonl: is gone, or differs from what snapshot 1"):
        run(folder, "a.csv", with_text=True)
    assert not (folder / "a.csv").exists()
    assert run(folder, "a.csv").rows == 90


def test_a_partial_snapshot_is_exported_with_exit_code_3(folder: Path, assay: Assay) -> None:
    store, corpus = LocalStore(folder / "out"), Corpus(folder / "in", folder / "cache")
    fingerprints = toy_fingerprints("2")
    shards = corpus.shards(store)
    commit_all(store, shards[:7], fingerprints)
    fp = {task: fingerprint.id for task, fingerprint in fingerprints.items()}
    tasks = {task: SnapshotTask(fp[task], LABELS[task]) for task in fp}
    done = committed(store, fp, [shard.id for shard in shards])
    publish(store, "job", tasks, shards, done, created_at="2026-11-02")
    (folder / "spec.json").write_text(json.dumps(toy_spec(folder)))
    command = "export", folder / "spec.json", "--to", folder / "a.jsonl"
    result = assay(*command, "--json", code=3).json
    missing = sum(shard.rows for shard in shards[7:])
    assert (result["missing_rows"], result["rows"], result["complete"]) == (
        missing,
        90 - missing,
        False,
    )
    assert len((folder / "a.jsonl").read_text().splitlines()) == 90 - missing
    p_clean = {"name": "toxic_p_clean", "source": ["toxic", "p", "clean"], "type": "float"}
    assert p_clean in result["columns"]
    shown = assay(*command, "--overwrite", code=3).out
    assert f"the snapshot leaves out {missing} documents" in shown


@pytest.mark.parametrize("to", ["a.parquet", "there/"])
def test_a_bucket_gets_the_same_rows(moto: Server, folder: Path, to: str) -> None:
    spec = spec_of(folder).model_copy(update={"storage_options": moto.options})
    options = ExportOptions(f"{moto.new_url()}/{to}", with_text=True)
    files = moto.file_system()
    bucket, _, key = str(options.to).removeprefix("s3://").partition("/")
    if to == "there/":  # — the object that a console makes for a new folder
        files.call_s3("put_object", Bucket=bucket, Key=key)
    result = export(spec, options, cache_dir=folder / "cache")
    place = result.to.removeprefix("s3://")
    names = sorted(name for name in files.find(place) if name.endswith(".parquet"))
    for number, name in enumerate(names):
        files.get_file(name, str(folder / f"copy-{number:02d}.parquet"))
    copies = sorted(str(path) for path in folder.glob("copy-*.parquet"))
    columns = ", ".join(f'"{column.name}"' for column in result.columns)
    rows = duckdb.sql(f"select {columns} from read_parquet({copies}) order by path, row")
    assert rows.fetchall() == joined(folder, with_text=True)
    if to == "a.parquet":
        with pytest.raises(SpecError, match="to: exists"):
            export(spec, options, cache_dir=folder / "cache")
        options = replace(options, overwrite=True)
    assert export(spec, options, cache_dir=folder / "cache").created == (to == "a.parquet")


@pytest.mark.parametrize("to", ["a[x] what? star* [!a]/", "a[x] what?.csv"])
def test_the_glob_of_a_name_with_wildcards_matches_the_written_files_alone(
    folder: Path, to: str
) -> None:
    result = run(folder, to)
    (rows,) = duckdb.sql(f"select count(*) from '{result.glob}'").fetchall()
    assert rows == (90,) and result.rows == 90


def test_datatrove_reads_what_is_written_in_its_layout(folder: Path) -> None:
    readers = pytest.importorskip("datatrove.pipeline.readers")
    result = run(folder, "trove/", layout="datatrove")
    assert result.glob == f"{folder}/trove/data/**/*.jsonl.gz" and result.created == 9
    read = {d.id: d for d in readers.JsonlReader(f"{folder}/trove/data", recursive=True).run()}
    expected = {row[0]: row for row in joined(folder, with_text=True) if row[6]}
    assert {name: document.text for name, document in read.items()} == {
        name: row[6] for name, row in expected.items()
    }
    plain = duckdb.sql(f"select * from '{run(folder, 'all.parquet').to}'").to_arrow_table()
    for row in plain.to_pylist():
        if row["doc_id"] in read:
            metadata = read[row.pop("doc_id")].metadata
            metadata.pop("file_path")
            assert metadata == {
                name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
                for name, value in row.items()
            }
    again = run(folder, "trove/", layout="datatrove")
    assert again == replace(result, created=0)


def test_documents_and_attributes_of_dolma_are_in_files_of_the_same_rows(folder: Path) -> None:
    result = run(folder, "dolma/", layout="dolma", columns=("id",))
    assert (result.files, result.created) == (18, 18)
    places = [Path(result.to, kind) for kind in ("documents", "attributes/job")]
    names = [sorted(str(f.relative_to(place)) for f in place.rglob("*.gz")) for place in places]
    assert names[0] == names[1] and len(names[0]) == 9
    scores = {
        row["doc_id"]: row
        for row in duckdb.sql(f"select * from '{run(folder, 'all.parquet').to}'")
        .to_arrow_table()
        .to_pylist()
    }
    for name in names[0]:
        documents, attributes = (
            [json.loads(line) for line in gzip.decompress((place / name).read_bytes()).splitlines()]
            for place in places
        )
        for document, of_document in zip(documents, attributes, strict=True):
            assert document["id"] == of_document["id"] and document["source"] == "job"
            row = scores[document["id"]]
            for task, labels in LABELS.items():
                for label in labels:
                    spans = of_document["attributes"][f"job__{task}__{label}"]
                    p = row[f"{task}_p_{label}"]
                    expected = [] if p is None else [[0, row["n_chars"], pytest.approx(p)]]
                    assert spans == expected
                    assert all(isinstance(place, int) for span in spans for place in span[:2])


def test_a_layout_is_that_of_a_folder(folder: Path) -> None:
    with pytest.raises(SpecError, match="layout: is for a folder; write --to FOLDER/"):
        run(folder, "out.jsonl", layout="dolma")
