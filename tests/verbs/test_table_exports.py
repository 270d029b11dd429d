"""Exports to real Delta and Iceberg tables, whose files DuckDB reads by itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import lake_tables
import pyarrow as pa
import pyiceberg.catalog as catalogs
import pyiceberg.exceptions as iceberg
import pytest
from calls import Assay
from exported_tables import (
    Row,
    expected,
    in_the_middle,
    kill_before_the_commit,
    labelled_with_catalog,
    rows_of,
    run,
)
from finished import finish_folder, toy_spec
from pyiceberg.manifest import DataFileContent
from pyiceberg.utils.config import Config
from servers import Server

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.stores.file_systems import native_options
from pipeline.verbs.label_table import ExportResult


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return labelled_with_catalog(tmp_path, monkeypatch)


@dataclass(frozen=True)
class Table:
    """A place for an export, and its entries in its format's log."""

    to: str
    files: Callable[[], list[str]]  # of the last version
    version: Callable[[], object]
    append: Callable[[pa.Table], None]  # as another export does; it makes a missing table
    restore: Callable[[], object]  # what the first export made
    delete: Callable[[str], object]  # the rows for which this is true

    @property
    def all(self) -> list[Row]:
        return rows_of(self.files())

    def add_foreign_row(self, *_: object) -> None:
        """Adds a row as another program does."""
        row = f"select * replace ('of another program' as doc_id) from read_parquet({self.files()})"
        self.append(duckdb.sql(f"{row} limit 1").to_arrow_table())


def delta_table(folder: Path) -> Table:
    place = folder / "delta"

    def files() -> list[str]:
        """By the protocol: what is added, and not removed."""
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

    def version() -> object:
        return sorted(map(str, logs.glob("*")))

    def restore() -> None:
        deltalake.DeltaTable(place).restore(1)

    def delete(rows: str) -> None:
        deltalake.DeltaTable(place).delete(rows)

    return Table(f"delta+{place}", files, version, append, restore, delete)


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

    def restore() -> None:
        first = load().snapshots()[0].snapshot_id
        load().manage_snapshots().rollback_to_snapshot(first).commit()

    def delete(rows: str) -> None:
        load().delete(rows)

    return Table("iceberg://local/labels.all", files, version, append, restore, delete)


@pytest.fixture(params=[delta_table, iceberg_table])
def table(request: pytest.FixtureRequest, folder: Path) -> Table:
    made: Table = request.param(folder)
    return made


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
    table.add_foreign_row()
    [kept] = [row for row in table.all if "of another program" in row]
    finish_folder(folder, "2")
    run(folder, table.to, columns=("id",))
    own = [row for row in table.all if "of another program" not in row]
    assert own == expected(folder, columns=("id",)) and len(table.all) == 91
    [other] = [row for row in table.all if "of another program" in row]
    assert [*other].count(None) == [*kept].count(None) + 1  # the column that it did not have
    finish_folder(folder, "1")  # the answers of the first snapshot again
    assert run(folder, table.to, columns=("id",)).created == 1 and len(table.all) == 91


def test_labels_that_a_table_has_no_longer_are_written_again(folder: Path, table: Table) -> None:
    finish_folder(folder, "3", "other")
    run(folder, table.to)
    assert run(folder, table.to, {**toy_spec(folder), "name": "other"}).created == 1
    assert run(folder, table.to).created == 1 and table.all == expected(folder)
    finish_folder(folder, "2")
    run(folder, table.to)
    assert table.all == expected(folder)
    table.restore()
    assert table.all != expected(folder)
    assert run(folder, table.to).created == 1 and table.all == expected(folder)
    table.delete("toxic = 'clean'")
    assert len(table.all) < 70
    assert run(folder, table.to).created == 1 and table.all == expected(folder)
    table.add_foreign_row()
    assert run(folder, table.to).created == 0


def test_rows_that_another_export_commits_in_the_middle_are_there_once(
    folder: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_folder(folder, "3", "other")
    rows, done = expected(folder), []

    def act(attempt: int) -> None:
        done.append(run(folder, table.to, {**toy_spec(folder), "name": "other"}).created)

    attempts = in_the_middle(monkeypatch, act)
    run(folder, table.to)
    assert attempts == [0, 1] and done == [1, 0]
    assert table.all == rows


def test_a_table_that_others_keep_changing_is_left_to_a_later_run(
    folder: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, table.to)
    finish_folder(folder, "2")
    attempts = in_the_middle(monkeypatch, table.add_foreign_row)
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


def test_a_process_that_is_killed_before_the_commit_changes_nothing(
    folder: Path, table: Table
) -> None:
    run(folder, table.to)
    finish_folder(folder, "2")
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


@pytest.mark.parametrize(
    ("raised", "error", "line"),
    [
        (iceberg.ForbiddenError("no"), SpecError, "to: .*: no; use credentials that may write"),
        (iceberg.ServerError("no"), UnavailableError, "iceberg.*: no; check its configuration"),
        (ValueError("no"), SpecError, "to: cannot be written: no; name another table"),
    ],
)
def test_what_a_catalog_refuses_is_one_line(
    folder: Path,
    raised: Exception,
    error: type[Exception],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("pyiceberg.catalog.sql.SqlCatalog.commit_table", refuse)
    with pytest.raises(error, match=line):
        run(folder, "iceberg://local/labels.all")


def test_tables_whose_rows_cannot_be_read_are_refused(folder: Path) -> None:
    labels = {"doc_id": ["0-1", "0-2"], "path": ["a", "b"]}
    vectors, by_value = lake_tables.Delta(folder), lake_tables.Iceberg(folder)
    vectors.append(labels)
    with pytest.raises(SpecError, match=r"^to: cannot be written: .*deletionVectors"):
        run(folder, vectors.path)
    by_value.append(labels)
    by_value.add_deletes(pa.table({"path": ["a"]}), DataFileContent.EQUALITY_DELETES)
    with pytest.raises(SpecError, match=r"^to: cannot be written: .*equality deletes"):
        run(folder, by_value.path)
    deltalake.write_deltalake(folder / "mapped", pa.table({"c1": ["0-1"], "c2": ["a"]}))
    lake_tables.map_columns(folder / "mapped", ["doc_id", "path"])
    with pytest.raises(SpecError, match=r"^to: has column mapping; name a table without it"):
        run(folder, f"delta+{folder}/mapped")
    append_only = {"configuration": {"delta.appendOnly": "true"}}
    deltalake.write_deltalake(folder / "only", pa.table({"doc_id": ["0-1"]}), **append_only)
    with pytest.raises(SpecError, match=r"^to: is append-only; name a table that is not"):
        run(folder, f"delta+{folder}/only")


def test_a_table_in_a_bucket_is_written_with_the_storage_options(
    folder: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, own = moto.new_url(), moto.options
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", own.pop("key"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", own.pop("secret"))
    spec = {**toy_spec(folder), "storage_options": own}
    for _ in range(2):
        created = run(folder, f"delta+{url}", spec).created
    assert created == 0
    paths = deltalake.DeltaTable(url, storage_options=native_options(url, own)).file_uris()
    for number, path in enumerate(paths):
        moto.file_system().get(path, str(folder / f"{number}.copy"))
    copies = [str(folder / f"{number}.copy") for number in range(len(paths))]
    assert rows_of(copies) == expected(folder)


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
