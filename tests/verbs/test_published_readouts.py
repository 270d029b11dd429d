"""A readout that a snapshot has answers of is replaced only in another place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from finished import finish

from pipeline.cache import cache_dir
from pipeline.cli import main
from pipeline.ledger.cells import record_specs
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore


def test_a_readout_that_answered_the_last_snapshot_is_not_replaced_in_its_place(
    write_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"name": "toxic", "labels": ["toxic", "clean"], "question": None}
    task["readout"] = str(tmp_path / "named.safetensors")
    spec_file, gold = write_spec(tasks=[task]), tmp_path / "gold.csv"
    rows = [f"{'xyz'[n % 3] * 9} {n},{'clean' if n % 3 else 'toxic'}" for n in range(30)]
    gold.write_text("\n".join(["text,toxic", *rows]))
    command = ["fit", str(spec_file), "--gold", str(gold), "--layers", "1"]
    assert main(command) == 0
    spec = load_spec(str(spec_file))
    job = make_job(spec, place(spec.model, this_machine()), cache_dir())
    store = LocalStore(Path(spec.output))
    record_specs(store, job.versions)
    finish(store, plan(job, store).shards, job.fingerprints, spec.name)
    capsys.readouterr()
    assert main([*command, "--overwrite"]) == 2
    assert "--to: missing; snapshot 00000001 has answers of" in capsys.readouterr().err
    assert main([*command, "--to", str(tmp_path / "new.safetensors")]) == 0
