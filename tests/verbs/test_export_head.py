"""Example rows: the right ones, the same ones each time, and nothing that controls a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from calls import Assay
from finished import Corpus, finish_folder, toy_spec

from pipeline.errors import SpecError
from pipeline.ledger.dataset import open_labels
from pipeline.options import ExportOptions
from pipeline.spec.parse import parse_spec
from pipeline.verbs.export import TEXT_CHARS, head

HOSTILE = "\x1b[2J\u202ehidden [bold]not markup[/bold] :smile: " + "long " * 500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A labelled corpus in which one document is hostile."""
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    file = corpus.folder / "1.jsonl"
    lines = file.read_text().splitlines()
    lines[14] = json.dumps({"id": "1-\x1b]14", "text": HOSTILE})
    file.write_text("\n".join(lines))
    finish_folder(tmp_path)
    (tmp_path / "spec.json").write_text(json.dumps(toy_spec(tmp_path)))
    return tmp_path


def rows_of(folder: Path, **options: Any) -> list[dict[str, Any]]:
    spec = parse_spec((folder / "spec.json").read_text())
    chosen = ExportOptions(**{"head": 10, **options})
    rows: list[dict[str, Any]] = head(spec, chosen, cache_dir=folder / "cache").rows.to_pylist()
    return rows


def texts_of(folder: Path) -> dict[str, str]:
    lines = [line for file in (folder / "in").iterdir() for line in file.read_text().splitlines()]
    return {row["id"]: row["text"] for row in map(json.loads, lines)}


@pytest.mark.parametrize(
    "where", ["toxic.p.toxic > 0.8", "topic.label = 'law' and n_chars > 60", "status = 'empty'"]
)
@pytest.mark.parametrize("most", [2, 1_000])
def test_the_rows_are_those_of_a_plain_query_with_their_texts(
    folder: Path, where: str, most: int
) -> None:
    labels = open_labels(str(folder / "out"))
    expected = {
        row["doc_id"]: row
        for row in duckdb.sql(f"select * from labels where {where}").to_arrow_table().to_pylist()
    }
    assert labels.snapshot == 1 and len(expected) > 2
    rows, texts = rows_of(folder, where=where, head=most), texts_of(folder)
    assert len(rows) == min(most, len(expected)) == len({row["doc_id"] for row in rows})
    for row in rows:
        assert row.pop("_text") == texts[row["doc_id"]][:TEXT_CHARS]
        assert row == expected[row["doc_id"]]
    assert rows == sorted(rows, key=lambda row: (row["path"], row["row"]))


def test_columns_of_the_input_are_in_the_scope_of_the_condition_and_in_the_rows(
    folder: Path, assay: Assay
) -> None:
    where = "doc.id = '2-8' and toxic.p.toxic >= 0"
    [row] = rows_of(folder, where=where, columns=("id",))
    assert (row["doc_id"], row["doc"]) == ("2-8", {"id": "2-8"})
    shown = assay("export", folder / "spec.json", "--head", 9, "--where", where).out
    assert "    id 2-8, " in shown


def test_the_choice_is_stable_and_spread_over_the_files(folder: Path) -> None:
    ten = rows_of(folder)
    assert len(ten) == 10 and rows_of(folder) == ten
    assert len({row["path"] for row in ten}) == 3
    finish_folder(folder, "2")
    again = rows_of(folder)  # other answers to the same documents
    assert [row["doc_id"] for row in again] == [row["doc_id"] for row in ten] and again != ten


def test_a_document_that_is_hostile_is_shown_harmlessly(folder: Path, assay: Assay) -> None:
    command = "export", folder / "spec.json", "--head", 10, "--where"
    shown = assay(*command, "n_chars < 0").out
    assert shown.startswith("no document satisfies --where\n0 of 90 documents")
    shown = assay(*command, "n_chars > 1000").out
    assert all(char.isprintable() or char == "\n" for char in shown)
    line, answers, end = shown.splitlines()
    assert line.startswith(r"1-\x1b]14  \x1b[2J\u202ehidden [bold]not markup[/bold] :smile: long")
    assert line.endswith("…") and len(line) < 250
    label = duckdb.sql(
        f"select label, p from '{folder}/out/labels/toxic/*/*/*.parquet' where doc_id like '%]14'"
    ).fetchall()[0]
    assert f"toxic {label[0]} {label[1][label[0]]:.2f}" in answers and "topic " in answers
    assert end == "1 of 90 documents, snapshot 00000001 of job"


def test_json_has_flat_columns(folder: Path, assay: Assay) -> None:
    where = "doc_id = '2-7' or doc_id = '2-8'"
    result = assay("export", folder / "spec.json", "--head", 9, "--where", where, "--json").json
    assert (result["spec"], result["snapshot"], result["documents"]) == ("job", 1, 90)
    empty, answered = result["rows"]
    assert (empty["doc_id"], empty["toxic"], empty["toxic_p_clean"]) == ("2-7", None, None)
    assert answered["text"] == texts_of(folder)["2-8"] and answered["toxic_status"] == "ok"
    assert answered["toxic_p_toxic"] + answered["toxic_p_clean"] == pytest.approx(1, abs=1e-6)


def test_a_wrong_condition_is_one_line_that_names_the_option(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"^where: .*got 'toxic\.label'\)$"):
        rows_of(folder, where="toxic.label")
