"""A dry run counts what any machine would find to do, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from finished import commit_all

from pipeline.errors import SpecError
from pipeline.runtime.dry_run import dry_run
from pipeline.runtime.job import SMALL_INPUT_SHARDS, make_job, plan
from pipeline.runtime.placement import Placement
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore


def test_it_leaves_the_cut_to_the_machine_that_labels(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    spec = load_spec(str(write_spec()))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "text": "Hello."}\n' * 50_000)
    here = dry_run(spec, cache_dir=tmp_path)
    assert here.missing_rows == here.rows == 50_000
    store = LocalStore(tmp_path / "out")
    assert not store.root.exists()
    large = spec.model_copy(
        update={"input": spec.input.model_copy(update={"shard_bytes": 999_999})}
    )
    job = make_job(large, Placement("cuda", "bfloat16", 8, 1), tmp_path)
    alone = plan(job, LocalStore(tmp_path / "fresh")).shards
    assert plan(job, store).shards == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_another_machine_answered_in_its_number_format_is_not_missing(
    write_spec: Callable[..., Path], model_folder: Path, tmp_path: Path, dtype: str
) -> None:
    spec = load_spec(str(write_spec(model={"path": str(model_folder), "dtype": "auto"})))
    job = make_job(spec, Placement("cuda", dtype, 8, 1), tmp_path)
    store = LocalStore(tmp_path / "out")
    commit_all(store, plan(job, store).shards, job.fingerprints)
    assert dry_run(spec, cache_dir=tmp_path).missing_rows == 0


def test_it_counts_without_the_gpu_that_the_spec_wants(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    folder = load_spec(str(write_spec())).model.path
    spec = load_spec(str(write_spec(model={"path": folder, "device": "cuda", "gpus": 2})))
    assert dry_run(spec, cache_dir=tmp_path).missing_rows == 1


def test_an_error_of_the_spec_is_one_in_every_number_format(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    labels = ["clean", "toxic"]
    task = {"name": "toxic", "question": None, "labels": labels, "readout": str(tmp_path / "none")}
    with pytest.raises(SpecError, match=r"readout: .*none"):
        dry_run(load_spec(str(write_spec(tasks=[task]))), cache_dir=tmp_path)


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
    assert (few.missing_rows, few.distinct, few.rows_for_model) == (SMALL_INPUT_SHARDS, 1, 1)
