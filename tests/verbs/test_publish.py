"""Runs of a spec with `publish`: the first publishes, the second has nothing to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stages import run_without_ray

import pipeline
from pipeline.cli import main
from pipeline.spec.fingerprint import fingerprints
from pipeline.spec.parse import load_spec


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
    limits = {"max_psi": 0.1, "max_flip_rate": 0.05, "max_failing": 0.05}

    def run(code: int, **publish: Any) -> dict[str, Any]:
        run_without_ray(monkeypatch)
        spec = write_spec(gold={"path": str(gold)}, publish={**limits, **publish})
        returned, (printed, error) = main(["run", str(spec), "--json"]), capfd.readouterr()
        assert returned == code, error
        result: dict[str, Any] = json.loads(printed)
        return result

    first, second = run(0), run(0)
    assert (first["snapshot"], first["documents_labelled"]) == (1, 6)
    assert (second["snapshot"], second["documents_labelled"]) == (1, 0)
    assert second["diff"]["tasks"]["toxic"]["flip_rate"] == 0
    rejected = run(1, gates=["toxic.accuracy > 1"])
    assert [each["passed"] for each in rejected["gates"]] == [False]
    assert len(rejected["reasons"]) == 1 and not rejected["published"]
    run_without_ray(monkeypatch)
    assert pipeline.run(load_spec(tmp_path / "spec.yaml")).snapshot is None
    names = {f.name for f in (tmp_path / "out" / "snapshots").iterdir()}
    assert names == {"00000001.json", "00000001.parquet"}


@pytest.mark.parametrize(
    "keys, reason",
    [
        ({"publish": {"gates": ["toxic.f1 > 0.5"]}}, "gold.path: missing"),
        ({"publish": {"gates": ["toxic.much > 0.5"]}}, "publish.gates.0: no such metric"),
        ({"publish": {"gates": ["topic.f1 > .5"]}, "gold": {"path": "gold.csv"}}, "no labels for"),
        ({"publish": {"max_psi": "nan"}}, "publish.max_psi: write a number"),
        ({"publish": {"max_psi": -1}}, "publish.max_psi: write a number of at least 0"),
        ({"publish": {"max_flip_rate": 1.01}}, "publish.max_flip_rate: write a number of at most"),
        ({"publish": {"max_failing": "nan"}}, "publish.max_failing: write a number"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_any_work(
    keys: dict[str, Any],
    reason: str,
    write_spec: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gold.csv").write_text("id,toxic\nd0,toxic\n")
    assert main(["run", str(write_spec(**keys))]) == 2
    error = capfd.readouterr().err
    assert reason in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_judges_answers_changes_no_fingerprint(write_spec: Callable[..., Path]) -> None:
    plain = load_spec(write_spec())
    gold, publish = {"path": "g.csv", "values": {"1": "toxic"}}, {"gates": ["toxic.f1 > 0"]}
    judged = load_spec(write_spec(gold=gold, publish=publish))
    versions = [
        {name: of.id for name, of in fingerprints(each, weights={}, dtype="float32").items()}
        for each in (plain, judged)
    ]
    assert versions[0] == versions[1]
