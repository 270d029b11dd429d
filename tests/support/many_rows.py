"""A corpus whose run takes long enough to be interrupted, and what its output must have then.

Nothing here depends on how the run is started, or on which process is killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb


def write_many(folder: Path, documents: int, shard_bytes: int) -> dict[str, Any]:
    """Writes the corpus; the spec's `input` that names it."""
    corpus = folder / "many.jsonl"
    lines = (
        json.dumps({"id": f"d{i}", "text": f"{i} says hello. " * 30}) for i in range(documents)
    )
    corpus.write_text("\n".join(lines))
    return {"path": str(corpus), "id": "id", "shard_bytes": shard_bytes}


def has_begun(output: Path) -> bool:
    """Whether two shards of two tasks are committed."""
    return len(list(output.glob("labels/*/*/*/*.parquet"))) >= 4


def assert_every_row_once(output: Path, documents: int) -> None:
    """None lost and none doubled, in the files of each task together and in the snapshot."""
    for task in ("toxic", "topic"):
        files = f"{output}/labels/{task}/*/*/*.parquet"
        counted = duckdb.sql(
            f"select count(*), count(distinct doc_id), count(label) from '{files}'"
        ).fetchall()
        assert counted == [(documents, documents, documents)]
    snapshot = json.loads((output / "snapshots" / "00000001.json").read_text())
    assert snapshot["rows"] == documents
