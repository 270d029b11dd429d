"""Delta, Iceberg and Lance tables as input, written by their libraries and read by them again."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from changing_corpus import Corpus
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from lake_tables import (
    COLUMNS,
    LAKES,
    Delta,
    Iceberg,
    Lake,
    Lance,
    documents,
    map_columns,
    rows,
    shards_of,
)
from pyiceberg import catalog as catalogs
from pyiceberg.manifest import DataFileContent
from pyiceberg.types import StringType
from pyiceberg.utils.config import Config
from servers import Server
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.filters.run import filter_corpus
from pipeline.options import FilterOptions
from pipeline.runtime.conditions import input_columns
from pipeline.sources.source import cut, find_files, find_objects, read_rows
from pipeline.spec.schema import Columns

PACKAGES = {"delta": "deltalake", "iceberg": "pyiceberg", "lance": "lance"}


def texts(lake: Lake) -> dict[str, str]:
    """What the library of the table reads."""
    return {row["id"]: row["text"] for row in lake.read()}


@pytest.fixture
def iceberg_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyiceberg's configuration with a catalog `local` in SQLite, and one that is down."""
    folder = tmp_path / "warehouse"
    folder.mkdir()
    own = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    down = {"uri": "http://127.0.0.1:9"}
    content = yaml.safe_dump({"catalog": {"local": own, "down": down}})
    (folder / ".pyiceberg.yaml").write_text(content)
    monkeypatch.setenv("PYICEBERG_HOME", str(folder))
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())


@pytest.fixture(params=list(LAKES))
def lake(request: pytest.FixtureRequest, tmp_path: Path, iceberg_catalog: None) -> Lake:
    """An empty table of each kind."""
    return LAKES[request.param](tmp_path)


@pytest.fixture
def labelled(lake: Lake, plain: Corpus) -> Corpus:
    """A table of two data files, labelled."""
    lake.append(rows("a"))
    lake.append(rows("b"))
    plain.settings["input"] = {"path": lake.path, "id": "id", "shard_bytes": 4_000}
    plain.run()
    return plain


def test_a_table_has_the_rows_that_its_library_reads(
    lake: Lake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lake.append(rows("a"))
    lake.append(rows("b"))
    assert documents(shards_of(lake.path, tmp_path)) == texts(lake)
    lake.delete(["a-0", "a-3", "a-4", "a-19"])
    lake.delete(["a-5", "b-1"])
    shards = shards_of(lake.path, tmp_path)
    assert documents(shards) == texts(lake)
    assert len(texts(lake)) == 34 and len(shards) > 4
    assert f"version {lake.version}, data files: 2" in caplog.text


def test_of_another_version_only_the_new_rows_are_asked_about(labelled: Corpus, lake: Lake) -> None:
    before = labelled.rows()
    labelled.run()
    assert not labelled.asked
    known = {shard.id for shard in labelled.plan().shards}
    lake.append(new := rows("c"))
    labelled.run()
    assert {*labelled.asked} == {("first", text) for text in new["text"]}
    assert known < {shard.id for shard in labelled.plan().shards}
    lake.delete(["a-1", "c-2"])
    labelled.run()
    assert not labelled.asked
    assert labelled.rows().keys() == texts(lake).keys()
    assert (
        before.items() >= {id: row for id, row in labelled.rows().items() if id in before}.items()
    )
    labelled.verify()
    labelled.collect()
    labelled.verify()
    labelled.run()
    assert not labelled.asked


def test_a_condition_reads_only_columns_of_a_named_version_of_lance(
    plain: Corpus, tmp_path: Path
) -> None:
    lake = Lance(tmp_path)
    lake.append(rows("a"))

    def run() -> set[str]:
        path = f"lance+{lake.path}@{lake.version}"
        plain.settings["input"] = {"path": path, "id": "id"}
        plain.run()
        return {name for name, row in plain.rows().items() if row["status"] == "ok"}

    plain.task |= {"when": "doc.source = 'mail'"}
    assert run() == {f"a-{number}" for number in range(0, 20, 2)}
    lake.dataset.drop_columns(["source"])
    lake.dataset.add_columns({"source": "'mail'"})
    assert run() == {*texts(lake)}
    plain.settings["input"] = {"path": lake.path, "id": "id"}
    with pytest.raises(SpecError, match=r"tasks\.0\.when: reads column source of a Lance dataset"):
        plain.run()


def test_a_version_that_is_named_stays(lake: Lake, tmp_path: Path) -> None:
    lake.append(rows("a"))
    first, version = texts(lake), lake.version
    lake.append(rows("b"))
    lake.delete(["a-1"])
    assert documents(shards_of(f"{lake.path}@{version}", tmp_path)) == first
    with pytest.raises(SpecError, match=r"^input\.path: .*version 99|no such snapshot"):
        find_objects(f"{lake.path}@99", tmp_path / "cache")


def test_a_filter_keeps_rows_of_a_table(labelled: Corpus, lake: Lake, tmp_path: Path) -> None:
    lake.delete(["a-0", "b-7"])
    labelled.settings["filter"] = {"keep": "doc.source = 'web'"}
    with pytest.raises(StorageError, match="run `assay run`"):
        filter_corpus(labelled.spec, FilterOptions(str(tmp_path / "to")), cache_dir=labelled.cache)
    labelled.run()
    result = filter_corpus(
        labelled.spec, FilterOptions(str(tmp_path / "to")), cache_dir=labelled.cache
    )
    assert result.written is not None
    [pattern] = result.written.kept.globs
    kept = duckdb.sql(f"select id, text, source from read_parquet('{pattern}')").fetchall()
    expected = [tuple(r[n] for n in ("id", "text", "source")) for r in lake.read()]
    assert sorted(kept) == sorted(row for row in expected if row[2] == "web") and len(kept) == 19


def test_a_data_file_without_an_ending_is_kept_as_parquet(plain: Corpus, tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table(rows("a", 4)))
    [log] = (tmp_path / "t" / "_delta_log").glob("*.json")
    [file] = (tmp_path / "t").glob("*.parquet")
    log.write_text(log.read_text().replace(file.name, "000000_0"))  # — as of Hive
    file.rename(file.with_name("000000_0"))
    plain.settings["input"] = {"path": f"delta+{tmp_path}/t", "id": "id"}
    plain.settings["filter"] = {"keep": "doc.source = 'web'"}
    plain.run()
    result = filter_corpus(plain.spec, FilterOptions(str(tmp_path / "to")), cache_dir=plain.cache)
    assert result.written is not None
    [pattern] = result.written.kept.globs
    kept = duckdb.sql(f"select id from read_parquet('{pattern}') order by id").fetchall()
    assert kept == [("a-1",), ("a-3",)]


def test_a_data_file_that_is_gone_is_named(lake: Lake, tmp_path: Path) -> None:
    lake.append(rows("a"))
    shards = shards_of(lake.path, tmp_path)
    removed = Path(lake.data_files()[0].removeprefix("file://"))
    removed.unlink()
    with pytest.raises(StorageError, match=f"{removed}: is gone, and the table's version names it"):
        find_objects(lake.path, tmp_path / "cache")
    with pytest.raises(StorageError, match=str(removed)):
        documents(shards)


def test_a_nested_text_is_refused(lake: Lake, tmp_path: Path) -> None:
    lake.append({"text": [{"en": "one"}], "id": ["1"]})
    with pytest.raises(
        SpecError, match=r"^input\.text: .* has struct<en.* there; name a column of"
    ):
        shards_of(lake.path, tmp_path)


@pytest.mark.parametrize("kind, package", PACKAGES.items())
def test_a_missing_package_is_one_line(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    path = {"iceberg": "iceberg://local/docs.web"}.get(kind, f"{kind}+{tmp_path}")
    with pytest.raises(SpecError, match=rf"pip install 'corpus-assay\[{kind}\]'"):
        find_objects(path, tmp_path / "cache")


@pytest.mark.parametrize("kind", LAKES)
def test_a_table_that_is_not_there_is_a_mistake_in_the_spec(
    kind: str, tmp_path: Path, iceberg_catalog: None
) -> None:
    path = LAKES[kind](tmp_path).path
    named = path if kind != "lance" else f"lance+{path}"
    with pytest.raises(SpecError, match=r"^input\.path: "):
        find_objects(named, tmp_path / "cache")
    with pytest.raises(SpecError, match="a table may be read only as"):
        find_files(named, key="join.path")


def test_a_catalog_that_is_down_may_answer_later(tmp_path: Path, iceberg_catalog: None) -> None:
    with pytest.raises(UnavailableError, match="the catalog down did not answer"):
        find_objects("iceberg://down/docs.web", tmp_path / "cache")
    with pytest.raises(SpecError, match="of pyiceberg's configuration: URI missing"):
        find_objects("iceberg://other/docs.web", tmp_path / "cache")


def test_a_relative_table_is_in_the_folder_of_the_spec(plain: Corpus, tmp_path: Path) -> None:
    Delta(plain.folder).append(rows("a"))
    plain.settings["input"] = {"path": "delta+delta table@0", "id": "id"}
    plain.run()
    assert len(plain.rows()) == 20
    to = plain.folder / "delta table" / "kept"
    plain.settings["filter"] = {"keep": "toxic.label = 'toxic'"}
    with pytest.raises(SpecError, match="is in the input of the spec"):
        filter_corpus(plain.spec, FilterOptions(str(to)), cache_dir=plain.cache)


def test_columns_of_partitions_have_their_values(tmp_path: Path) -> None:
    table = pa.table({**rows("a", 4), "lang": ["en", "é %/x", None, "en"], "year": [1, 1, 2, 2]})
    write_deltalake(tmp_path / "t", table, partition_by=["lang", "year"])
    shards = shards_of(f"delta+{tmp_path}/t", tmp_path)
    assert sum(shard.rows for shard in shards) == 4
    read = [row.values for s in shards for row in read_rows(s, {}, ["id", "lang", "year"])]
    actual = {row["id"]: (row["lang"], row["year"]) for row in read}
    assert actual == {
        b"a-0": (b"en", 1), b"a-1": ("é %/x".encode(), 1), b"a-2": (None, 2), b"a-3": (b"en", 2)
    }  # fmt: skip
    columns = pa.concat_tables(input_columns(s, ["year", "lang"], {}) for s in shards)
    assert columns.schema.field("year").type == pa.int64()
    # — a partition may be the text itself
    assert len(documents(shards_of(f"delta+{tmp_path}/t", tmp_path, Columns("lang", "id")))) == 4


def test_mapped_columns_of_delta_are_read_by_their_names(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"c1": ["x", "y"], "c2": ["1", "2"]}))
    map_columns(tmp_path / "t", ["text", "c1"])  # — the second is a name that another column had
    by_library = QueryBuilder().register("t", DeltaTable(tmp_path / "t")).execute("select * from t")
    expected = [(row["c1"], row["text"]) for row in pa.table(by_library.read_all()).to_pylist()]
    shards = shards_of(f"delta+{tmp_path}/t", tmp_path, Columns("text", "c1"))
    assert documents(shards) == dict(expected) == {"1": "x", "2": "y"}


def test_renamed_columns_of_iceberg_are_read_by_their_ids(
    tmp_path: Path, iceberg_catalog: None
) -> None:
    lake = Iceberg(tmp_path)
    lake.append(rows("a", 2))
    with lake.table.update_schema() as update:
        update.rename_column("text", "body")
    with lake.table.update_schema() as update:
        update.rename_column("source", "text")
    lake.append({"body": ["new"], "id": ["b-0"], "text": ["mail"]})
    columns = Columns("body", "id")
    expected = {row["id"]: row["body"] for row in lake.read()}
    assert documents(shards_of(lake.path, tmp_path, columns)) == expected
    with lake.table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("body")
    with lake.table.update_schema() as update:
        update.add_column("body", StringType())
    # — a column that was dropped and added has no values in older files
    with pytest.raises(SpecError, match=r"^input\.text: .* has no such column; it has: id, text"):
        shards_of(lake.path, tmp_path, columns)


def test_a_column_that_partitions_an_iceberg_table_may_be_in_no_file(
    tmp_path: Path, iceberg_catalog: None
) -> None:
    lake = Iceberg(tmp_path)
    lake.append(rows("a", 4))
    with lake.table.update_spec() as update:
        update.add_identity("source")
    lake.append(rows("b", 4))
    for file in lake.data_files():  # — as a table of Hive that became one of Iceberg
        path = Path(file.removeprefix("file://"))
        if "source=" in file:
            pq.write_table(pq.read_table(path, partitioning=None).drop_columns("source"), path)
    shards = shards_of(lake.path, tmp_path)
    read = [row.values for s in shards for row in read_rows(s, {}, ["id", "source"])]
    assert {r["id"].decode(): r["source"].decode() for r in read} == {
        row["id"]: row["source"] for row in lake.read()
    }


@pytest.mark.parametrize("kind", ["delta", "lance"])
def test_a_table_in_a_bucket_is_read_with_the_storage_options(
    kind: str, moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = LAKES[kind](tmp_path)
    lake.append(rows("a"))
    lake.append(rows("b"))
    lake.delete(["a-3"])
    url = f"{moto.new_url()}/t"
    moto.file_system().put(f"{lake.path.removeprefix('delta+')}/", f"{url}/", recursive=True)
    [*objects] = find_objects(f"{kind}+{url}", tmp_path / "cache", moto.options)
    assert all(item.path.startswith(url) for item in objects)
    shards = [shard for item in objects for shard in cut(item, COLUMNS, 10**6)]
    read = pa.concat_tables(all_documents(shard, dict(moto.options)) for shard in shards)
    assert {*read["doc_id"].to_pylist()} == texts(lake).keys()


def test_deletion_vectors_of_iceberg_are_read(tmp_path: Path, iceberg_catalog: None) -> None:
    lake = Iceberg(tmp_path)
    lake.append(rows("a"))
    lake.append(rows("b"))
    lake.delete_by_vector(lake.data_files()[0], [0, 7, 19])
    lake.delete(["a-3"])
    assert documents(shards_of(lake.path, tmp_path)) == texts(lake)
    assert len(texts(lake)) == 36


def test_deletes_by_value_are_refused_by_name(tmp_path: Path, iceberg_catalog: None) -> None:
    lake = Iceberg(tmp_path)
    lake.append(rows("a", 2))
    content = DataFileContent.EQUALITY_DELETES
    location = lake.add_deletes(pa.table({"id": ["a-0"]}), content)
    with pytest.raises(SpecError, match=r"delete rows by value; compact the table") as raised:
        find_objects(lake.path, tmp_path / "cache")
    assert location in str(raised.value)


def test_names_that_files_of_iceberg_spell_otherwise_are_found(
    tmp_path: Path, iceberg_catalog: None
) -> None:
    lake = Iceberg(tmp_path)
    lake.append({"page-text": ["one", "two"], "id": ["1", "2"]})
    expected = {row["id"]: row["page-text"] for row in lake.read()}
    assert documents(shards_of(lake.path, tmp_path, Columns("page-text", "id"))) == expected
    [file] = lake.data_files()
    assert "page_x2Dtext" in pq.read_schema(file.removeprefix("file://")).names


@pytest.mark.parametrize("kind", ["delta", "lance"])
def test_a_profile_that_does_not_exist_is_named_on_one_line(kind: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"^s3://b/t: cannot be opened: .*nope.*$"):
        find_objects(f"{kind}+s3://b/t", tmp_path, {"profile": "nope"})
