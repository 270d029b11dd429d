"""A dry run counts what any machine would find to do, and leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command import TOY_ASSAY
from command import assay as run_assay
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


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--sample 50%",
        "--where year=2001",
        "--retry-failed",
        "--publish-partial",
        "--max-hours 9",
        "--max-cost 9 --price 1",
        "--stall-limit 99",
        "--retry-failed of the same corpus",
        "--retry-failed --publish-partial --max-hours 9",
        "--sample 60% --where year<=2002 --retry-failed --publish-partial",
    ],
)
def test_a_dry_run_predicts_what_the_run_does_for_every_flag(
    flags: str, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    assay = partial(run_assay, command=TOY_ASSAY)
    folder, output = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    rows = [
        {"id": f"d{i}", "text": f"Text {i % 25} of {i // 28}. " * (1 + i % 3), "year": 2000 + i % 4}
        for i in range(40)
    ]
    source = {"path": str(folder), "id": "id", "shard_bytes": 1_000}
    spec = write_spec(input=source)
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows[:20])))
    code, _, errors = assay(spec, fault="document d7=die")
    assert code == 0, errors
    if not flags.endswith("of the same corpus"):
        (folder / "b.jsonl").write_text("\n".join(map(json.dumps, rows[20:])))
    words = flags.removesuffix("of the same corpus").split()
    before = set(output.rglob("*"))
    code, planned, errors = assay(spec, "--dry-run", *words)
    assert code == 0, errors
    assert set(output.rglob("*")) == before
    code, result, errors = assay(spec, *words)
    assert code == 0, errors
    assert planned["missing_documents"] == result["documents_labelled"]
    assert planned["missing_cells"] == sum(sum(n.values()) for n in result["labels"].values())
    assert (planned["documents"], planned["shards"]) == (result["documents"], result["shards"])
    new = {
        path.stem for path in set(output.rglob("*")) - before if path.parts[-5:-4] == ("labels",)
    }
    retried = {path.parent.name for path in output.glob("retries/*/*/*/*")}
    assert planned["missing_shards"] == len(new | retried)
    if "--where" not in words:  # which leaves out the document that failed
        assert bool(retried) == ("--retry-failed" in words)
    assert bool(new or retried) == (planned["missing_documents"] > 0)
    _, again, _ = assay(spec, "--dry-run", *words)
    assert again["missing_documents"] == again["missing_shards"] == 0
