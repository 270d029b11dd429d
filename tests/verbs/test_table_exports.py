"""Exports to real Delta, Iceberg and Lance tables, whose files DuckDB reads by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from calls import Assay
from finished import Corpus, finish, toy_fingerprints, toy_spec

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.options import ExportOptions
from pipeline.spec.parse import parse_spec
from pipeline.stores.local import LocalStore
from pipeline.verbs import table_exports
from pipeline.verbs.export import export
from pipeline.verbs.hub_dataset import write_export
from pipeline.verbs.label_table import ExportResult

deltalake = pytest.importorskip("deltalake")
lance = pytest.importorskip("lance")
catalogs = pytest.importorskip("pyiceberg.catalog")
Config = pytest.importorskip("pyiceberg.utils.config").Config

Row = tuple[Any, ...]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A labelled corpus of 90 documents, and a catalog `local` of Iceberg."""
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    store = LocalStore(tmp_path / "out")
    finish(store, corpus.shards(store), toy_fingerprints())
    for name, value in settings(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())  # — which it reads when it is imported
    return tmp_path


def settings(folder: Path) -> dict[str, str]:
    """The catalog in pyiceberg's own configuration."""
    prefix = "PYICEBERG_CATALOG__LOCAL__"
    return {
        f"{prefix}TYPE": "sql",
        f"{prefix}URI": f"sqlite:///{folder}/catalog.db",
        f"{prefix}WAREHOUSE": f"file://{folder}/warehouse",
    }


def run(folder: Path, to: str, spec: Mapping[str, Any] | None = None, **options: Any) -> Any:
    parsed = parse_spec(json.dumps(spec or toy_spec(folder)))
    chosen = ExportOptions(to, **options)
    return write_export(parsed, chosen, cache_dir=folder / "cache", command="assay export")


def label_anew(folder: Path, version: str = "2") -> None:
    """Another snapshot, with other answers to all documents."""
    corpus, store = Corpus(folder / "in", folder / "cache"), LocalStore(folder / "out")
    finish(store, corpus.shards(store), toy_fingerprints(version))


def expected(folder: Path, **options: Any) -> list[Row]:
    """The rows of a plain export, with its columns by name."""
    to = ExportOptions(str(folder / "plain.parquet"), overwrite=True, **options)
    export(parse_spec(json.dumps(toy_spec(folder))), to, cache_dir=folder / "cache")
    return rows_of([str(folder / "plain.parquet")])


def rows_of(files: list[str]) -> list[Row]:
    """The rows of Parquet files, with their columns by name."""
    described = duckdb.sql(f"describe from read_parquet({files})").fetchall()
    names = ", ".join(f'"{name}"' for name in sorted(name for name, *_ in described))
    return duckdb.sql(f"select {names} from read_parquet({files}) order by doc_id, path").fetchall()


@dataclass(frozen=True)
class Table:
    """A place for an export, and what its format's log says about it."""

    to: str
    files: Callable[[], list[str]]  # of the last version
    version: Callable[[], object]
    append: Callable[[pa.Table], None]  # as another export does; it makes a missing table

    @property
    def all(self) -> list[Row]:
        return rows_of(self.files())

    def add_stranger(self, *_: object) -> None:
        """Adds a row as another program does."""
        row = f"select * replace ('of another program' as doc_id) from read_parquet({self.files()})"
        self.append(duckdb.sql(f"{row} limit 1").to_arrow_table())


def delta_table(folder: Path) -> Table:
    place = folder / "delta"

    def files() -> list[str]:
        """As the protocol says: what is added, and not removed."""
        live: dict[str, None] = {}
        for log in sorted((place / "_delta_log").glob("*.json")):
            for action in map(json.loads, log.read_text().splitlines()):
                if "remove" in action:
                    live.pop(action["remove"]["path"], None)
                if "add" in action:
                    live[action["add"]["path"]] = None
        return [str(place / path) for path in live]

    def append(rows: pa.Table) -> None:
        done = [deltalake.Transaction("assay", 1)]
        properties = deltalake.CommitProperties(app_transactions=done)
        deltalake.write_deltalake(str(place), rows, mode="append", commit_properties=properties)

    logs = place / "_delta_log"
    return Table(f"delta+{place}", files, lambda: sorted(map(str, logs.glob("*"))), append)


def iceberg_table(folder: Path) -> Table:
    def load() -> Any:
        return catalogs.load_catalog("local").load_table("labels.all")

    def files() -> list[str]:
        paths = load().inspect.files().column("file_path").to_pylist()
        return [path.removeprefix("file://") for path in paths]

    def append(rows: pa.Table) -> None:
        catalog = catalogs.load_catalog("local")
        catalog.create_namespace_if_not_exists("labels")
        catalog.create_table_if_not_exists("labels.all", rows.schema).append(rows)

    def version() -> object:
        return [snapshot.snapshot_id for snapshot in load().snapshots()]

    return Table("iceberg://local/labels.all", files, version, append)


@pytest.fixture(params=[delta_table, iceberg_table])
def table(request: pytest.FixtureRequest, folder: Path) -> Table:
    made: Table = request.param(folder)
    return made


def in_the_middle(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object], before: str = "own_errors"
) -> list[int]:
    """Acts when an export has read the table, and has not written it; the attempts so far."""
    attempts: list[int] = []
    acts: list[bool] = []
    real = getattr(table_exports, before)

    def acting(*words: Any) -> Any:
        if not acts:  # — what acts may be an export, too
            acts.append(True)
            attempts.append(len(attempts))
            act(attempts[-1])
            acts.clear()
        return real(*words)

    monkeypatch.setattr(table_exports, before, acting)
    return attempts


def test_a_table_has_the_rows_and_a_second_export_changes_nothing(
    folder: Path, table: Table
) -> None:
    first: ExportResult = run(folder, table.to)
    assert table.all == expected(folder) and len(table.all) == 90
    assert (first.rows, first.created, first.to) == (90, 1, table.to)
    version = table.version()
    assert run(folder, table.to).created == 0 and table.version() == version
    assert run(folder, table.to, with_text=True).created == 1
    assert table.all == expected(folder, with_text=True)


def test_a_later_snapshot_replaces_its_documents_and_keeps_other_rows(
    folder: Path, table: Table
) -> None:
    run(folder, table.to)
    table.add_stranger()
    [kept] = [row for row in table.all if "of another program" in row]
    label_anew(folder)
    run(folder, table.to, columns=("id",))
    own = [row for row in table.all if "of another program" not in row]
    assert own == expected(folder, columns=("id",)) and len(table.all) == 91
    [other] = [row for row in table.all if "of another program" in row]
    assert [*other].count(None) == [*kept].count(None) + 1  # the column that it did not have
    label_anew(folder, "1")  # the answers of the first snapshot again
    assert run(folder, table.to, columns=("id",)).created == 1 and len(table.all) == 91


def test_rows_that_another_export_commits_in_the_middle_are_there_once(
    folder: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, store = Corpus(folder / "in", folder / "cache"), LocalStore(folder / "out")
    finish(store, corpus.shards(store), toy_fingerprints("3"), "other")
    wanted, done = expected(folder), []

    def act(attempt: int) -> None:
        done.append(run(folder, table.to, {**toy_spec(folder), "name": "other"}).created)

    attempts = in_the_middle(monkeypatch, act)
    run(folder, table.to)
    assert attempts == [0, 1] and done == [1, 0]
    assert table.all == wanted


def test_a_table_that_others_keep_changing_is_left_to_a_later_run(
    folder: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, table.to)
    label_anew(folder)
    attempts = in_the_middle(monkeypatch, table.add_stranger)
    with pytest.raises(UnavailableError, match="others keep changing the table; run again"):
        run(folder, table.to)
    assert attempts == [0, 1, 2] and len(table.all) == 93


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ("* replace ('1' as row)", "has the column row as string, and the export as int64; name"),
        ("*, 'mine' as note", "has the column note, and the export does not; drop the column, or"),
        ("* exclude (doc_id)", "has no column doc_id, by which its rows are found; name another"),
    ],
)
def test_a_table_with_other_columns_is_refused_and_stays(
    folder: Path, table: Table, columns: str, line: str
) -> None:
    expected(folder)
    rows = f"select {columns} from '{folder}/plain.parquet' limit 3"
    table.append(duckdb.sql(rows).to_arrow_table())
    before = table.version()
    with pytest.raises(SpecError, match=f"^to: {line}"):
        run(folder, table.to)
    assert table.version() == before


KILLED = """
import os, signal, sys
from importlib import import_module
module, owner, name = sys.argv[1:4]
kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if owner == "LabelTable":  # all rows are with the library
    rows = import_module(module).LabelTable.rows
    kill_after = lambda labels: (row for part in (rows(labels), map(kill, [0])) for row in part)
    import_module(module).LabelTable.rows = kill_after
else:
    setattr(getattr(import_module(module), owner), name, kill)
from pipeline.cli import main
main(sys.argv[4:])
"""
COMMITS = {
    "delta": ("pipeline.verbs.label_table", "LabelTable", "rows"),
    "iceberg": ("pyiceberg.catalog.sql", "SqlCatalog", "commit_table"),
    "lance": ("lance", "LanceDataset", "commit"),
}


def kill_before_the_commit(folder: Path, to: str) -> None:
    """Runs the command in a process that is killed when the rows are written."""
    (folder / "spec.json").write_text(json.dumps(toy_spec(folder)))
    [words] = [words for kind, words in COMMITS.items() if to.startswith(kind)]
    command = [sys.executable, "-c", KILLED, *words, "export", str(folder / "spec.json")]
    environment = {**os.environ, **settings(folder), "ASSAY_CACHE": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ended = subprocess.run([*command, "--to", to], env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_a_process_that_is_killed_before_the_commit_changes_nothing(
    folder: Path, table: Table
) -> None:
    run(folder, table.to)
    label_anew(folder)
    before, version = table.all, table.version()
    kill_before_the_commit(folder, table.to)
    assert table.version() == version and table.all == before
    assert run(folder, table.to).created == 1 and table.all == expected(folder)


@pytest.mark.parametrize(
    ("to", "options", "error", "line"),
    [
        ("delta+FOLDER/in", {}, SpecError, "to: is in the input of the spec"),
        ("delta+FOLDER/cache", {}, SpecError, "to: is a folder of other files, and no Delta table"),
        ("delta+FOLDER/in.txt/a", {}, StorageError, "delta.*: cannot be written: .*check the path"),
        ("delta+FOLDER/a", {"layout": "dolma"}, SpecError, "layout: is for a folder"),
        ("delta+FOLDER/a", {"overwrite": True}, SpecError, "overwrite: is for files"),
        ("iceberg://local", {}, SpecError, "to: write iceberg://CATALOG/NAMESPACE.TABLE"),
        ("iceberg://none/a.b", {}, SpecError, "to: check the catalog none in pyiceberg's"),
        ("lance+FOLDER/none", {}, SpecError, "to: there is no Lance dataset"),
        ("lance+FOLDER/a", {"with_text": True}, SpecError, "with_text: a Lance dataset gets"),
    ],
)
def test_a_wrong_place_is_named(
    folder: Path, to: str, options: dict[str, Any], error: type[Exception], line: str
) -> None:
    (folder / "in.txt").write_text("a file")
    with pytest.raises(error, match=f"(?s)^{line}"):
        run(folder, to.replace("FOLDER", str(folder)), **options)


def test_the_command_says_what_is_missing_and_what_was_written(
    folder: Path, assay: Assay, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "spec.json").write_text(json.dumps(toy_spec(folder)))
    command = "export", folder / "spec.json", "--to"
    printed = assay(*command, f"delta+{folder}/delta").out
    assert "90 in a table of delta, snapshot 00000001" in printed and "a version" in printed
    assert "nothing: the table has this" in assay(*command, f"delta+{folder}/delta").out
    for kind, package in ("delta", "deltalake"), ("lance", "lance"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            line = assay(*command, f"{kind}+{folder}/x", code=2).err.splitlines()[-1]
        assert line.startswith("--to: needs a package (") and f"corpus-assay[{kind}]'" in line
    config = "PYICEBERG_CATALOG__DOWN__"
    monkeypatch.setenv(f"{config}TYPE", "sql")
    monkeypatch.setenv(f"{config}URI", f"sqlite:///{folder}/none/catalog.db")
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())
    line = assay(*command, "iceberg://down/a.b", code=3).err.splitlines()[-1]
    assert "iceberg://down/a.b: cannot be written: " in line and line.endswith("or run again")


@pytest.fixture
def dataset(folder: Path) -> Path:
    """A Lance dataset of the documents and one more, in fragments; it has lost a column."""
    place = folder / "documents.lance"
    documents = duckdb.sql(
        f"select text, id, 1 as gone from read_json('{folder}/in/*.jsonl') "
        "union all select 'not labelled', 'new', 1"
    )
    lance.write_dataset(documents.to_arrow_table(), place, max_rows_per_file=40)
    lance.dataset(place).drop_columns(["gone"])
    lance.dataset(place).add_columns({"more": "concat(id, '!')"})
    return place


def labels_of(dataset: Path) -> list[Row]:
    """The rows with the names of their columns in order, without what the documents had."""
    rows = lance.dataset(dataset).to_table()
    assert rows["more"].to_pylist() == [f"{id}!" for id in rows["id"].to_pylist()]
    names = sorted({*rows.column_names} - {"text", "more", "id"})
    return duckdb.sql(f"select id, {', '.join(names)} from rows order by id").fetchall()


def plain_labels(folder: Path) -> list[Row]:
    expected(folder)
    plain = f"'{folder}/plain.parquet'"
    names = [name for name, *_ in duckdb.sql(f"describe from {plain}").fetchall()]
    own = sorted(name for name in names if name.startswith(("toxic", "topic")))
    return duckdb.sql(f"select doc_id, {', '.join(own)} from {plain} order by doc_id").fetchall()


def files_of(dataset: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (dataset / "data").iterdir()}


def test_a_dataset_of_lance_gets_columns_and_its_files_stay(folder: Path, dataset: Path) -> None:
    before, version = files_of(dataset), lance.dataset(dataset).version
    for snapshot in ("1", "2", "1"):
        label_anew(folder, snapshot)
        version += 1
        assert run(folder, f"lance+{dataset}").created == 1
        *labelled, new = labels_of(dataset)
        assert labelled == plain_labels(folder) and {*new} == {"new", None}
        assert before.items() <= files_of(dataset).items()
        assert lance.dataset(dataset).version == version
        assert run(folder, f"lance+{dataset}").created == 0
        assert lance.dataset(dataset).version == version
    lance.dataset(dataset).validate()


def test_rows_that_a_dataset_gets_in_the_middle_are_there(
    folder: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_before_the_commit(folder, f"lance+{dataset}")
    assert lance.dataset(dataset).schema.names == ["text", "id", "more"]
    row = pa.table({"text": ["late"], "id": ["newer"], "more": ["newer!"]})

    def act(attempt: int) -> None:
        if attempt == 0:
            lance.write_dataset(row, dataset, mode="append")

    attempts = in_the_middle(monkeypatch, act, "_joined")
    run(folder, f"lance+{dataset}")
    assert attempts == [0, 1]
    *labelled, new, newer = labels_of(dataset)
    assert labelled == plain_labels(folder) and {*new, *newer} == {"new", "newer", None}


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ({"id": ["0-1"], "toxic": ["mine"]}, "to: has the column toxic, which is not of an export"),
        ({"text": ["0-1"]}, "to: has no column id, by which its rows are found"),
        ({"id": [17]}, "to: no value of its column id is the id of a labelled document"),
    ],
)
def test_a_dataset_that_is_not_that_of_the_documents_stays(
    folder: Path, rows: dict[str, list[Any]], line: str
) -> None:
    lance.write_dataset(pa.table(rows), folder / "a.lance")
    with pytest.raises(SpecError, match=f"^{line}"):
        run(folder, f"lance+{folder}/a.lance")
    assert lance.dataset(folder / "a.lance").version == 1


def test_ids_are_found_whichever_type_they_have(folder: Path) -> None:
    for file in (folder / "in").iterdir():
        file.unlink()
    lines = [json.dumps({"id": 5 + row, "text": f"text {row}"}) for row in range(9)]
    (folder / "in" / "a.jsonl").write_text("\n".join(lines) + "\n")
    label_anew(folder)
    lance.write_dataset(pa.table({"id": pa.array([7, 99, 5], pa.float64())}), folder / "a.lance")
    run(folder, f"lance+{folder}/a.lance")
    found = lance.dataset(folder / "a.lance").to_table()["toxic"].to_pylist()
    expected(folder)
    toxic = dict(duckdb.sql(f"select doc_id, toxic from '{folder}/plain.parquet'").fetchall())
    assert found == [toxic["7"], None, toxic["5"]]
