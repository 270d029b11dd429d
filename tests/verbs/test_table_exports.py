"""Exports to real Delta, Iceberg and Lance tables, whose files DuckDB reads by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
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
from pipeline.verbs.export import export
from pipeline.verbs.hub_dataset import write_export
from pipeline.verbs.label_table import ExportResult, LabelTable

deltalake = pytest.importorskip("deltalake")
lance = pytest.importorskip("lance")
catalogs = pytest.importorskip("pyiceberg.catalog")

Row = tuple[Any, ...]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A labelled corpus of 90 documents, and a catalog `local` of Iceberg."""
    from pyiceberg.utils.config import Config

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
    append: Callable[[pa.Table], None]  # as another program
    rows: Callable[[], pa.Table]

    @property
    def all(self) -> list[Row]:
        return rows_of(self.files())


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
        deltalake.write_deltalake(str(place), rows, mode="append")

    def read() -> pa.Table:
        return deltalake.DeltaTable(str(place)).to_pyarrow_table()

    logs = place / "_delta_log"
    return Table(f"delta+{place}", files, lambda: sorted(map(str, logs.glob("*"))), append, read)


def iceberg_table(folder: Path) -> Table:
    def load() -> Any:
        return catalogs.load_catalog("local").load_table("labels.all")

    def files() -> list[str]:
        paths = load().inspect.files().column("file_path").to_pylist()
        return [path.removeprefix("file://") for path in paths]

    return Table(
        "iceberg://local/labels.all",
        files,
        lambda: [snapshot.snapshot_id for snapshot in load().snapshots()],
        lambda rows: load().append(rows),
        lambda: load().scan().to_arrow(),
    )


@pytest.fixture(params=[delta_table, iceberg_table])
def table(request: pytest.FixtureRequest, folder: Path) -> Table:
    made: Table = request.param(folder)
    return made


def strangers(table: Table, doc_id: str = "of another program") -> pa.Table:
    """A row as another program writes it."""
    rows = table.rows().slice(0, 1)
    at = rows.schema.names.index("doc_id")
    return rows.set_column(at, "doc_id", pa.array([doc_id], rows.schema.field(at).type))


def in_the_middle(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> list[int]:
    """Acts while the rows of an export are written, in a thread; the attempts so far."""
    attempts: list[int] = []
    rows = LabelTable.rows

    def acting(labels: LabelTable) -> Iterator[pa.RecordBatch]:
        first, *rest = rows(labels)
        yield first
        attempts.append(len(attempts))
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        yield from rest

    monkeypatch.setattr(LabelTable, "rows", acting)
    return attempts


def test_a_table_has_the_rows_and_a_second_export_changes_nothing(
    folder: Path, table: Table
) -> None:
    first: ExportResult = run(folder, table.to)
    assert table.all == expected(folder) and len(table.all) == 90
    assert (first.rows, first.created, first.to) == (90, 1, table.to)
    version = table.version()
    again = run(folder, table.to)
    assert again.created == 0 and table.version() == version
    with_text = run(folder, table.to, with_text=True)
    assert with_text.created == 1 and table.all == expected(folder, with_text=True)


def test_a_later_snapshot_replaces_its_documents_and_keeps_other_rows(
    folder: Path, table: Table
) -> None:
    run(folder, table.to)
    table.append(strangers(table))
    before = table.all
    label_anew(folder)
    run(folder, table.to, columns=("id",))
    after = expected(folder, columns=("id",))
    own = [row for row in table.all if "of another program" not in row]
    assert own == after and len(table.all) == 91
    [kept] = [row for row in before if "of another program" in row]
    [other] = [row for row in table.all if "of another program" in row]
    assert [*other].count(None) == [*kept].count(None) + 1  # the column that it did not have
    label_anew(folder, "1")  # the answers of the first snapshot again
    assert run(folder, table.to, columns=("id",)).created == 1
    assert len(table.all) == 91


def test_rows_that_another_export_commits_in_the_middle_are_there_once(
    folder: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**toy_spec(folder), "name": "other"}
    corpus, store = Corpus(folder / "in", folder / "cache"), LocalStore(folder / "out")
    finish(store, corpus.shards(store), toy_fingerprints("3"), "other")
    done: list[ExportResult] = []

    def act() -> None:
        if not done:
            done.append(run(folder, table.to, other))

    plain = LabelTable.rows
    attempts = in_the_middle(monkeypatch, lambda: (monkeypatch.undo, act())[1])
    acting = LabelTable.rows
    monkeypatch.setattr(
        LabelTable,
        "rows",
        lambda labels: (plain if labels.labelled.spec.name == "other" else acting)(labels),
    )
    run(folder, table.to)
    assert len(attempts) == 2 and [each.created for each in done] == [1]
    monkeypatch.setattr(LabelTable, "rows", plain)
    assert table.all == expected(folder)


def test_a_table_that_others_keep_changing_is_left_to_a_later_run(
    folder: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, table.to)
    label_anew(folder)
    others = iter(range(9))

    def act() -> None:
        stranger = strangers(table, f"row {next(others)}")
        if "iceberg" in table.to:
            table.append(stranger)
        else:
            deltalake.DeltaTable(table.to.removeprefix("delta+")).delete("row = 0")
            table.append(table.rows().slice(0, 1).set_column(2, "row", pa.array([0])))

    attempts = in_the_middle(monkeypatch, act)
    with pytest.raises(UnavailableError, match="others keep changing the table; run again"):
        run(folder, table.to)
    assert len(attempts) == 3
