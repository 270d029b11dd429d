"""CSV, JSON and text files from the spec to a filtered corpus, without Ray."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import zstandard
from stages import run_without_ray

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.runtime.plan import check_places
from pipeline.spec.parse import parse_spec

ROWS = [(f"d{n}", f'Text {n}, with "quotes"\nand two lines.') for n in range(12)]


def write_csv(folder: Path) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([("id", "text"), *ROWS])
    (folder / "a.csv").write_text(text.getvalue(), newline="")


def write_files(folder: Path) -> None:
    for identifier, text in ROWS:
        (folder / f"{identifier}.txt").write_text(text)


def kept_rows(folder: Path) -> list[tuple[str, str]]:
    """The rows of all files that `filter` kept, by readers that are not assay's."""
    rows: list[dict[str, Any]] = []
    for file in sorted((folder / "kept").rglob("*.*")):
        if file.suffix == ".csv":
            rows += csv.DictReader(io.StringIO(file.read_bytes().decode(), newline=""))
        else:
            lines = zstandard.ZstdDecompressor().decompressobj().decompress(file.read_bytes())
            rows += [json.loads(line) for line in lines.splitlines()]
    return [(row["id"], row["text"]) for row in rows]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_without_ray(monkeypatch)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("write", [write_csv, write_files])
def test_documents_are_labelled_verified_exported_and_filtered(
    write: Callable[[Path], None],
    write_spec: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "in put"
    folder.mkdir()
    write(folder)
    suffix = ".txt" if write is write_files else ""
    source = {"path": str(folder), "id": "id", "shard_bytes": 3_000}
    spec = str(write_spec(input=source, filter={"keep": "doc_id not like '%1%'"}))

    def shown(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == 0, capsys.readouterr().err
        value: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return value

    expected = sorted((f"{identifier}{suffix}", text) for identifier, text in ROWS)
    shown("run", spec)
    shown("verify", spec)
    assert main(["export", spec, "--to", str(tmp_path / "t.parquet"), "--with-text"]) == 0
    capsys.readouterr()
    table = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert sorted((row["doc_id"], row["text"]) for row in table) == expected
    shown("filter", spec, "--to", str(tmp_path / "clean"))
    kept = [(doc_id, text) for doc_id, text in expected if "1" not in doc_id]
    assert sorted(kept_rows(tmp_path / "clean")) == kept and 0 < len(kept) < len(expected)


def test_a_new_text_file_is_the_only_one_that_is_labelled(
    write_spec: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").mkdir()
    for identifier, text in ROWS:
        (tmp_path / "in" / f"{identifier}.txt").write_text(text)
    spec = str(write_spec(input={"path": str(tmp_path / "in"), "id": "id", "shard_bytes": 3_000}))

    def run() -> dict[str, Any]:
        assert main(["run", spec, "--json"]) == 0
        value: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return value

    assert run()["documents_read_by_model"] == len(ROWS)
    (tmp_path / "in" / "d05.txt").write_text("Another text.")
    assert run()["documents_read_by_model"] == 1
    assert run()["documents_read_by_model"] == 0


SPEC = """
name: linked
model: {{path: some/model}}
input: {{path: {path}}}
output: {output}
tasks: [{{name: toxic, question: "Rude?", labels: ["a", "b"]}}]
"""


@pytest.mark.parametrize(
    ("path", "output", "message"),
    [
        ("data", "data", "1 of its files are in the output "),
        ("data/**", ".", "1 of its files are in the output "),
        ("linked", "data", "1 of its files are in the output "),
        ("data/a.jsonl", "linked", "1 of its files are in the output "),
        ("data", "data/out", None),
        ("linked/*.jsonl", "data/out", None),
    ],
)
def test_an_input_in_the_output_is_refused_before_there_are_results(
    tmp_path: Path, path: str, output: str, message: str | None
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "linked").symlink_to("data")
    spec = parse_spec(SPEC.format(path=tmp_path / path, output=(tmp_path / output).resolve()))
    if message is None:
        check_places(spec, tmp_path / "cache")
    else:
        with pytest.raises(SpecError, match=message):
            check_places(spec, tmp_path / "cache")
