"""Two scheduled runs with a model: the first publishes, the second has nothing to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stages import run_without_ray

from jobs.scheduled_relabel import main


def test_scheduled_runs_label_and_publish_once(
    write_spec: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": f"d{i}", "text": f"number {i} says hello"} for i in range(6)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gold = tmp_path / "gold.csv"
    gold.write_text("id,toxic\nd0,toxic\nd1,clean\n")
    spec = str(write_spec())

    def run(code: int, *options: str) -> dict[str, Any]:
        run_without_ray(monkeypatch)
        returned, (printed, error) = main([spec, "--json", *options]), capfd.readouterr()
        assert returned == code, error
        result: dict[str, Any] = json.loads(printed)
        return result

    first, second = run(0), run(0)
    assert (first["snapshot"], first["run"]["documents_labelled"]) == (1, 6)
    assert (second["snapshot"], second["run"]["documents_labelled"]) == (1, 0)
    assert second["diff"]["tasks"]["toxic"]["flip_rate"] == 0
    rejected = run(1, "--gold", str(gold), "--gate", "toxic.accuracy > 1")
    assert [each["passed"] for each in rejected["gates"]] == [False]
    assert len(rejected["reasons"]) == 1 and not rejected["published"]
    names = {f.name for f in (tmp_path / "out" / "snapshots").iterdir()}
    assert names == {"00000001.json", "00000001.parquet"}


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--gate", "toxic.f1 > 0.5"], "--gold: missing"),
        (["--gold", "gold.csv"], "--gate: missing; --gold judges nothing"),
        (["--gold", "no/such.csv"], "--gate: missing; --gold judges nothing"),
        (["--gold", "gold.csv", "--gate", "toxic.much > 0.5"], "--gate: no such metric"),
        (["--gold", "gold.csv", "--gate", "topic.f1 > 0.5"], "no labels for this task"),
        (["--gold", "gold.csv", "--gate", "toxic.f1 > 0.5", "--column", "x"], "--column"),
    ],
)
def test_a_gate_that_cannot_be_is_refused_before_any_work(
    options: list[str],
    reason: str,
    write_spec: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gold.csv").write_text("id,toxic\nd0,toxic\n")
    assert main([str(write_spec()), *options]) == 2
    assert reason in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
