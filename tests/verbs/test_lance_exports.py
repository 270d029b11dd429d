"""Exports to real Lance datasets, which get columns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import duckdb
import lance
import pyarrow as pa
import pytest
from exported_tables import (
    Row,
    expected,
    in_the_middle,
    kill_before_the_commit,
    labelled_with_catalog,
    run,
)
from finished import LABELS, finish_folder, toy_spec
from servers import Server

from pipeline.errors import SpecError
from pipeline.stores.file_systems import native_options


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return labelled_with_catalog(tmp_path, monkeypatch)


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
        finish_folder(folder, snapshot)
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


def test_labels_that_a_dataset_does_not_have_are_added_by_the_same_command(
    folder: Path, dataset: Path
) -> None:
    lance.dataset(dataset).delete("id in ('0-1', '2-2')")
    run(folder, f"lance+{dataset}")
    rows = {"id": ["0-1", "2-2"], "text": ["is back", ""], "more": ["0-1!", "2-2!"]}
    lance.write_dataset(pa.table(rows), dataset, mode="append")
    for lost in ([], ["toxic_p_clean"]):
        if lost:
            lance.dataset(dataset).drop_columns(lost)
        assert run(folder, f"lance+{dataset}").created == 1
        assert labels_of(dataset)[:-1] == plain_labels(folder)
        assert run(folder, f"lance+{dataset}").created == 0


def test_labels_and_columns_may_change_between_exports(
    folder: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, f"lance+{dataset}")
    lance.dataset(dataset).add_columns({"last": "'of another program'"})
    for number, labels in enumerate(("abcde", "ab", "acd"), start=2):
        monkeypatch.setitem(LABELS, "topic", tuple(labels))
        finish_folder(folder, str(number))
        version = lance.dataset(dataset).version
        assert run(folder, f"lance+{dataset}").created == 1
        lance.dataset(dataset).validate()
        assert lance.dataset(dataset).version == version + 1
        lance.dataset(dataset).drop_columns(["last"])
        assert labels_of(dataset)[:-1] == plain_labels(folder)
        lance.dataset(dataset).optimize.compact_files()
        lance.dataset(dataset).add_columns({"last": "'of another program'"})


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
    finish_folder(folder, "2")
    lance.write_dataset(pa.table({"id": pa.array([7, 99, 5], pa.float64())}), folder / "a.lance")
    run(folder, f"lance+{folder}/a.lance")
    labels = lance.dataset(folder / "a.lance").to_table()["toxic"].to_pylist()
    expected(folder)
    toxic = dict(duckdb.sql(f"select doc_id, toxic from '{folder}/plain.parquet'").fetchall())
    assert labels == [toxic["7"], None, toxic["5"]]


def test_a_dataset_that_is_the_input_gets_columns_however_it_is_spelled(
    folder: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    spec = toy_spec(folder, input={"path": str(dataset), "id": "id"})
    assert run(folder, "lance+documents.lance", spec).created == 1
    assert labels_of(dataset)[:-1] == plain_labels(folder)


@pytest.mark.parametrize(
    ("ids", "line"),
    [
        (["1", "1", "2"], "several documents have the id '1'; give each"),
        (["1", "2", None], "1 rows have no id, by which their labels are found"),
    ],
)
def test_documents_that_share_an_id_or_have_none_are_refused(
    folder: Path, ids: list[str | None], line: str
) -> None:
    for file in (folder / "in").iterdir():
        file.unlink()
    rows = [{"id": id, "text": f"text {number}"} for number, id in enumerate(ids)]
    (folder / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finish_folder(folder, "2")
    lance.write_dataset(pa.Table.from_pylist(rows), folder / "a.lance")
    with pytest.raises(SpecError, match=f"^to: {line}"):
        run(folder, f"lance+{folder}/a.lance")
    assert lance.dataset(folder / "a.lance").version == 1


@pytest.mark.parametrize("label", ["U.S.", "`law`"])
def test_a_label_that_lance_cannot_have_in_a_name_is_refused_by_name(
    folder: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    monkeypatch.setitem(LABELS, "topic", (label, "law", "sport"))
    finish_folder(folder, "2")
    line = rf"^to: Lance has no columns with a dot .*topic_p_{re.escape(label)}"
    with pytest.raises(SpecError, match=line):
        run(folder, f"lance+{dataset}")


def test_a_dataset_in_a_bucket_is_written_with_the_storage_options(
    folder: Path, dataset: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, own = moto.new_url(), moto.options
    moto.file_system().put(f"{dataset}/", f"{url}/", recursive=True)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", own.pop("key"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", own.pop("secret"))
    run(folder, f"lance+{url}", toy_spec(folder, storage_options=own))
    run(folder, f"lance+{dataset}")
    stored = lance.dataset(url, storage_options=native_options(url, own)).to_table()
    assert stored.equals(lance.dataset(dataset).to_table())
