"""A dry run reports what is left to do, and how long that takes at the speed of the last run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from calls import Assay, WriteSpec
from finished import commit_all

from pipeline.runtime.job import limited, make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore

ROWS, FILES = 4, 5


@pytest.fixture
def spec_file(write_spec: WriteSpec, tmp_path: Path) -> Path:
    for number in range(FILES):
        lines = [json.dumps({"id": f"{number}-{n}", "text": f"Text {n}."}) for n in range(ROWS)]
        (tmp_path / f"corpus_{number}.jsonl").write_text("\n".join(lines))
    return write_spec(input={"path": str(tmp_path / "corpus_*.jsonl"), "id": "id"})


def label(spec_file: Path, files: int, *, seconds_apart: float, limit: str | None = None) -> None:
    """Labels of the first files, one after the other."""
    spec, cache = load_spec(str(spec_file)), spec_file.parent / "cache"
    store = LocalStore(Path(spec.output))
    job = limited(make_job(spec, place(spec.model, this_machine()), cache), limit)
    shards = plan(job, store).shards[:files]
    commit_all(store, shards, job.fingerprints)
    now = time.time()
    for number, shard in enumerate(shards):
        for path in (store.root / "labels").rglob(f"{shard.id}.parquet"):
            os.utime(path, (now + number * seconds_apart, now + number * seconds_apart))


def test_of_a_new_output_the_counts_are_known_and_how_to_know_the_time(
    spec_file: Path, assay: Assay
) -> None:
    shown = assay("run", spec_file, "--dry-run", "--json", "--price", 3).json
    assert shown["documents_for_model"] == shown["missing_documents"] == ROWS * FILES
    assert shown["seconds"] is shown["tokens"] is shown["cost"] is None
    table = assay("run", spec_file, "--dry-run").words
    assert f"`assay run {spec_file} --sample 50%` labels a few" in table


@pytest.mark.parametrize("limit", [None, "sample < 0.9"])
def test_time_and_cost_are_those_of_the_missing_documents_at_the_last_run_s_speed(
    limit: str | None, spec_file: Path, assay: Assay
) -> None:
    label(spec_file, 3, seconds_apart=10.0, limit=limit)
    shown = assay("run", spec_file, "--dry-run", "--json", "--price", 9).json
    left = ROWS * (FILES - 3) if limit is None else shown["documents_for_model"]
    assert shown["documents_for_model"] == left > 0
    assert shown["docs_per_s"] == pytest.approx(2 * ROWS / 20)
    assert shown["seconds"] == pytest.approx(left * 20 / (2 * ROWS))
    assert shown["cost"] == pytest.approx(shown["seconds"] * 9 / 3600)
    assert shown["tokens"] == pytest.approx(left * shown["tokens_per_document"]) and left > 0
    table = assay("run", spec_file, "--dry-run", "--price", 9).words
    assert "with the workers of the last run, which read 0.40 documents a second" in table
    assert "cost" in table and "tokens" in table


def test_a_finished_output_takes_no_time(spec_file: Path, assay: Assay) -> None:
    label(spec_file, FILES, seconds_apart=10.0)
    shown = assay("run", spec_file, "--dry-run", "--json", "--price", 9).json
    assert (shown["documents_for_model"], shown["seconds"], shown["cost"]) == (0, 0.0, 0.0)
    assert "no document needs the model" in assay("run", spec_file, "--dry-run").out


@pytest.mark.parametrize("price", ["0", "-1", "nan", "inf"])
def test_a_price_that_gives_no_cost_is_refused(price: str, spec_file: Path, assay: Assay) -> None:
    error = assay("run", spec_file, "--dry-run", "--price", price, code=2).error
    assert error.startswith("--price: write a number above 0 (got ")
