"""A dry run counts what any machine would find to do, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import Assay
from changing_corpus import TOPIC, Corpus
from finished import commit_all

from pipeline.runtime.dry_run import dry_run
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.runtime.plan import SMALL_INPUT_SHARDS, plan
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore
from pipeline.verbs.run import RunResult


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_another_machine_answered_in_its_number_format_is_not_missing(
    write_spec: Callable[..., Path], model_folder: Path, tmp_path: Path, dtype: str
) -> None:
    spec = load_spec(str(write_spec(model={"path": str(model_folder), "dtype": "auto"})))
    job = make_job(spec, Placement("cuda", dtype, 8, 1), tmp_path)
    store = LocalStore(tmp_path / "out")
    commit_all(store, plan(job, store).shards, job.fingerprints)
    assert dry_run(spec, cache_dir=tmp_path).missing_rows == 0


def test_it_counts_without_the_gpu_that_the_spec_requires(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    folder = load_spec(str(write_spec())).model.path
    spec = load_spec(str(write_spec(model={"path": folder, "device": "cuda"})))
    assert dry_run(spec, cache_dir=tmp_path).missing_rows == 1


def test_it_reads_the_texts_of_few_shards_and_of_no_more(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(SMALL_INPUT_SHARDS + 1):
        (folder / f"{number}.jsonl").write_text(f'{{"id": "{number}", "text": "Hello."}}\n')
    spec = load_spec(str(write_spec(input={"path": str(folder), "id": "id"})))
    more = dry_run(spec, cache_dir=tmp_path / "cache")
    assert (more.missing_rows, more.distinct) == (SMALL_INPUT_SHARDS + 1, None)
    (folder / "0.jsonl").unlink()
    few = dry_run(spec, cache_dir=tmp_path / "cache")
    assert (few.missing_rows, few.distinct) == (SMALL_INPUT_SHARDS, 1)
    assert few.rows_for_model == SMALL_INPUT_SHARDS  # — each shard reads its own


@pytest.fixture
def grown(plain: Corpus) -> Corpus:
    """Failed rows in labelled shards, and a new file that has some known texts."""
    plain.others, plain.shard_bytes = [TOPIC], 9_000
    texts = [f"Text {row % 50}." for row in range(80)]
    years = [2000 + row % 4 for row in range(80)]
    plain.write("old", texts[:40], year=years[:40])
    plain.broken |= {("first", text) for text in texts[:40:10]}
    assert plain.run().complete
    plain.broken.clear()
    plain.write("new", texts[40:], year=years[40:])
    return plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"retry_failed": True, "publish_partial": True, "max_hours": 9.0},
        {"sample": "60%", "where": "year <= 2002", "retry_failed": True, "publish_partial": True},
    ],
    ids=str,
)
def test_a_dry_run_predicts_what_the_run_does_for_every_option(
    options: dict[str, Any], grown: Corpus
) -> None:
    folder = grown.store.root
    before = set(folder.rglob("*"))
    plan = grown.plan(**options)
    assert set(folder.rglob("*")) == before
    outcome = grown.run(**options)
    result = RunResult.of(outcome)
    assert outcome.complete and plan.missing_rows == result.documents_labelled > 0
    assert (plan.rows, len(plan.shards)) == (result.documents, result.shards)
    new = set(folder.rglob("*.parquet")) - before
    labelled = {path.stem for path in new if path.parts[-5] == "labels"}
    retried = {path.parent.name for path in new if path.parts[-5] == "retries"}
    assert plan.missing_shards == len(labelled | retried)
    # — under a condition there are other files, in which the failed rows are missing
    assert bool(retried) == (options.get("retry_failed", False) and outcome.limit is None)
    again = grown.plan(**options)
    assert again.missing_rows == again.missing_shards == 0


def test_options_that_may_end_the_run_are_named(grown: Corpus, assay: Assay) -> None:
    command = "run", grown.spec_file, "--dry-run"
    words = assay(*command, "--max-hours", 2).words
    assert "may end before --max-hours=2.0: exit code 3" in words
    assert "may end" not in assay(*command).out


def test_the_numbers_of_a_condition_on_a_large_input_are_upper_bounds(
    grown: Corpus, monkeypatch: pytest.MonkeyPatch, assay: Assay
) -> None:
    monkeypatch.setattr("pipeline.runtime.plan.SMALL_INPUT_SHARDS", 0)
    plan = grown.plan(where="year = 2001")
    assert plan.missing_rows == plan.rows == 80
    shown = assay("run", grown.spec_file, "--dry-run", "--where", "year = 2001").out
    assert "year = 2001: " in shown
