"""CSV files for people: no cell is a formula, and gold labels read every text as it was."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.errors import UnreadableError
from pipeline.gold.files import gold_format, read_gold_rows
from pipeline.stores.named_files import open_target
from pipeline.verbs.export import write_table

STARTS = st.text("'=+-@\t\r\n\"a1 ", max_size=4)
TEXTS = st.builds(str.__add__, STARTS, st.text(st.characters(exclude_categories=["Cs"])))


def write(path: Path, table: pa.Table) -> None:
    write_table(open_target(str(path), {}), "csv", table.schema, table.to_batches())


@given(st.lists(TEXTS, min_size=1, max_size=20), st.sampled_from([pa.string(), pa.large_string()]))
@example(["=1+1", "'=1+1", "''@x", "'", "''", "-1", "\r\n=", "a\n=b", ""], pa.large_string())
def test_every_text_survives_a_csv_file_and_no_cell_begins_a_formula(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], kind: pa.DataType
) -> None:
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    write(path, pa.table({"text": pa.array(texts, kind), "n": pa.array(range(len(texts)))}))
    columns = read_gold_rows(str(path), "csv", {}).columns
    assert columns == {"text": texts, "n": list(map(str, range(len(texts))))}
    with path.open(encoding="utf-8", newline="") as file:
        cells = [row["text"] for row in csv.DictReader(file)]
    assert not [cell for cell in cells if cell.startswith(tuple("=+-@\t\r"))]
    # — what begins no formula is written as it is
    plain = [text for text in texts if not text.lstrip("'").startswith(tuple("=+-@\t\r"))]
    assert [cell for cell in cells if cell in plain] == plain


def test_numbers_stay_numbers_and_a_label_that_begins_with_a_minus_is_a_text(
    tmp_path: Path,
) -> None:
    table = pa.table({"margin": [-0.5, None], "n": [-3, 4], "label": ["-1", None]})
    write(tmp_path / "t.csv", table)
    assert (tmp_path / "t.csv").read_text().splitlines()[1:] == ['-0.5,-3,"\'-1"', ",4,"]
    assert read_gold_rows(str(tmp_path / "t.csv"), "csv", {}).columns["label"] == ["-1", ""]


@pytest.mark.parametrize("name", ["gold.tsv", "gold.tsv.gz", "gold.ndjson", "gold.csv"])
def test_gold_files_are_read_as_input_files_are(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ['"Late again', "fine", 'so he said"'] if "tsv" in name else ["a", "b", "c"]
    sign = "\t" if "tsv" in name else ","
    lines = [f"{i}{sign}{text}" for i, text in enumerate(texts)]
    data = "\n".join([f"id{sign}label", *lines])
    if "json" in name:
        data = "\n".join(f'{{"id": "{i}", "label": "{text}"}}' for i, text in enumerate(texts))
    packed = gzip.compress(data.encode()) if name.endswith("gz") else data.encode()
    (tmp_path / name).write_bytes(packed)
    format = gold_format(name)
    assert format == name.partition(".")[2]
    columns = read_gold_rows(str(tmp_path / name), format, {}).columns
    assert columns == {"id": ["0", "1", "2"], "label": texts} and not caplog.records


def test_a_quote_that_merges_rows_of_gold_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "gold.csv"
    path.write_text('id,label,text\n1,yes,a\n2,yes,"b\n3,no,c\n4,no,"d\n5,no,e\n')
    with pytest.raises(UnreadableError, match="line 5: a quote seems not to be closed"):
        read_gold_rows(str(path), "csv", {})
