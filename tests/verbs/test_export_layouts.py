"""The files of the layouts of other tools, made by DuckDB of rows that are written here."""

from __future__ import annotations

import json

import duckdb
import pyarrow as pa

from pipeline.ledger.columns import CHUNK_TYPE, LABELS_TYPE
from pipeline.ledger.flat import flat_columns, flatten
from pipeline.ledger.rows import TEXT_COLUMN
from pipeline.verbs.export_layouts import layout_files


def test_spans_of_dolma_are_those_of_the_answer_and_of_several_labels_the_text() -> None:
    chunk, p = {"start": 5, "end": 9}, {"art": 0.25, "law": 0.75}
    kinds = pa.struct([("art", pa.float32()), ("law", pa.float32())])
    one = pa.struct([("label", pa.string()), ("p", kinds), ("chunk", CHUNK_TYPE)])
    several = pa.struct([("labels", LABELS_TYPE), ("p", kinds), ("chunk", CHUNK_TYPE)])
    columns = {
        "doc_id": pa.array(["a"]),
        "n_chars": pa.array([9]),
        TEXT_COLUMN: pa.array(["some text"]),
        "topic": pa.array([{"label": "law", "p": p, "chunk": chunk}], one),
        "topics": pa.array([{"labels": ["law"], "p": p, "chunk": chunk}], several),
    }
    rows = pa.RecordBatch.from_pydict(columns)
    flat = flat_columns(rows.schema)
    _, attributes = layout_files("dolma", "a", flat, "job")
    with duckdb.connect() as database:
        database.register("exported", flatten(rows, flat))
        [[attributes_of_a]] = database.sql(
            f"select attributes from ({attributes.query})"
        ).fetchall()
    spans = {name: json.loads(value) for name, value in attributes_of_a.items()}
    assert spans == {
        "job__topic__art": [[5, 9, 0.25]],
        "job__topic__law": [[5, 9, 0.75]],
        "job__topics__art": [[0, 9, 0.25]],
        "job__topics__law": [[0, 9, 0.75]],
    }
