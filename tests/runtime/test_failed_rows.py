"""Documents that kill their worker, rows that fail, and a limit on them, by the command itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pytest
from command import COMMANDS
from command import assay as run_assay

DEADLY = "document d7=die"
DOCUMENTS = 40


def current(output: Path, task: str) -> dict[str, dict[str, Any]]:
    """The rows of the highest snapshot by document, read by DuckDB."""
    snapshot = json.loads(max(output.glob("snapshots/*.json")).read_text())
    keys = [entry["key"] for entry in snapshot["files"] if entry["task"] == task]
    table = duckdb.sql(f"select * from read_parquet({[str(output / key) for key in keys]})")
    names = [column[0] for column in table.description]
    rows = [dict(zip(names, row, strict=True)) for row in table.fetchall()]
    assert len(rows) == len({row["doc_id"] for row in rows}) == DOCUMENTS
    return {row["doc_id"]: row for row in rows}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_document_that_kills_its_worker_is_set_aside_counted_and_tried_again(
    command: Sequence[str], write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    assay = partial(run_assay, command=command)
    corpus, output = tmp_path / "many.jsonl", tmp_path / "out"
    texts = {f"d{i}": f"Text {i} says hello. " * (1 + i % 5) for i in range(DOCUMENTS)}
    corpus.write_text("\n".join(json.dumps({"id": i, "text": t}) for i, t in texts.items()))
    options = {"input": {"path": str(corpus), "id": "id", "shard_bytes": 15_000}}
    code, result, errors = assay(write_spec(**options), fault=DEADLY)
    assert code == 0, errors
    assert result["status"] == {"ok": DOCUMENTS - 1, "quarantined": 1}
    first = current(output, "toxic")
    assert [i for i, row in first.items() if row["status"] != "ok"] == ["d7"]
    assert first["d7"]["label"] is first["d7"]["p"] is None
    assert not [file for file in (output / "attempts").rglob("*-*-*") if "probe" not in file.name]

    code, result, errors = assay(write_spec(**options, max_error_rate=0.02))
    assert code == 1 and result == {}
    assert errors.splitlines()[-1].startswith(
        "assay: 1 of 40 rows failed, more than max_error_rate"
    )
    assert len(list(output.glob("snapshots/*.json"))) == 1

    code, result, errors = assay(write_spec(**options, max_error_rate=0.02), "--retry-failed")
    assert code == 0, errors
    assert (result["documents_read_by_model"], result["objects_created"]) == (1, 2)
    assert result["snapshot"] == 2
    second = current(output, "toxic")
    assert second["d7"]["status"] == "ok" and sum(second["d7"]["p"].values()) > 0.999
    assert all(second[i] == row for i, row in first.items() if i != "d7")
    code, result, errors = assay(write_spec(**options), "--retry-failed")
    assert code == 0 and result["documents_read_by_model"] == 0 and result["snapshot"] == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_above_its_limit_stops_and_unreadable_rows_count(
    command: Sequence[str], write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    assay = partial(run_assay, command=command)
    corpus, output = tmp_path / "many.jsonl", tmp_path / "out"
    lines = [json.dumps({"id": f"d{i}", "text": f"Text {i}."}) for i in range(DOCUMENTS)]
    lines[3] = lines[30] = '{"id": "broken'
    corpus.write_text("\n".join(lines))
    options = {"input": {"path": str(corpus), "id": "id"}}
    code, _, errors = assay(write_spec(**options, max_error_rate=0.04), "--publish-partial")
    assert code == 1
    assert "2 of 40 rows failed" in errors and "error:not JSON 2" in errors
    assert "Traceback" not in errors
    assert not list(output.glob("snapshots/*"))
    code, result, errors = assay(write_spec(**options, max_error_rate=0.05))
    assert code == 0, errors
    assert result["documents_labelled"] == 0 and result["snapshot"] == 1
    code, result, _ = assay(write_spec(**options), "--retry-failed")
    assert code == 0 and result["objects_created"] == 0  # what cannot be read stays so
