"""A calibration is made from existing answers, and applied to them without the model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from stages import label_and_commit

from pipeline.cli import main
from pipeline.ledger.cells import record_specs
from pipeline.ledger.counts import LabelCost
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.snapshots import publish
from pipeline.runtime.answer_sources import newly_cut, plan_reuse
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.runtime.plan import list_missing, plan
from pipeline.runtime.worker import load_readers
from pipeline.spec.parse import load_spec
from pipeline.stores.store import open_store

TOXIC: dict[str, Any] = {
    "name": "toxic",
    "question": "Rude?",
    "labels": {"clean": ["No"], "toxic": ["Yes", "yes"]},
}
TOPIC: dict[str, Any] = {"name": "topic", "question": "About what?", "labels": ["art", "law"]}
LABELS = ["clean", "toxic"]
DOCUMENTS = 20


@dataclass
class Output:
    """An output that is brought up to date again and again."""

    write_spec: Callable[..., Path]
    folder: Path
    tasks: list[dict[str, Any]] = field(default_factory=lambda: [TOXIC])

    def spec(self) -> Path:
        return self.write_spec(
            input={"path": str(self.folder / "in.jsonl"), "id": "id", "shard_bytes": 900},
            tasks=self.tasks,
        )

    def run(self) -> list[dict[str, Any]]:
        """What a run does, without Ray: the graph's stages one after another, here."""
        spec = load_spec(self.spec())
        store = open_store(spec.output, spec.storage_options)
        job = make_job(spec, Placement("cpu", "float32", 1, 1), self.folder / "cache")
        planned = plan(job, store)
        first = plan_reuse(job, store, planned, newly_cut(job, store, planned))
        assert len(first.shards) > 2
        record_specs(store, job.fp, {n: f.json() for n, f in job.fingerprints.items()})
        readers = load_readers(job, asks=any(work.asked_rows for work in first.work_items))
        counted = list(label_and_commit(first.work_items, job, readers=readers))
        last = list_missing(job, store, first.cuts)
        assert not last.work_items
        publish(store, spec.name, job.snapshot_tasks, last.shards, last.done, created_at="now")
        loaded = {"model_loaded": "_engine" in vars(readers[0])}
        costs = [sum((Counter(asdict(c)) for c in s.costs.values()), Counter()) for s in counted]
        pairs = zip(counted, costs, strict=True)
        zero = asdict(LabelCost())
        return [{**asdict(counts), **zero, **cost, **loaded} for counts, cost in pairs]

    def calibrate(self, name: str, *options: str) -> Path:
        """Writes a calibration of the task `toxic` by the command itself."""
        path = self.folder / "files" / f"{name}.json"
        words = ["calibrate", str(self.spec()), "--task", "toxic", "--to", str(path)]
        assert main([*words, *options]) == 0
        assert main([*words, *options]) == 2, "the file exists"
        assert main([*words, *options, "--overwrite", "--json"]) == 0
        return path

    def rows(self, task: str = "toxic") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (
            open_labels(str(self.folder / "out"), [task]).to_table(columns=[task])[task].to_pylist()
        )
        return rows


@pytest.fixture
def output(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Output:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    texts = [f"{i:03d} says a little. " * (1 + i % 5) for i in range(DOCUMENTS)]
    texts[4] = " "  # has no answer
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    gold = [{"id": f"d{i}", "toxic": "toxic" if i % 3 else "clean"} for i in range(DOCUMENTS)]
    (tmp_path / "gold.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in gold))
    return Output(write_spec, tmp_path)


def asked(counted: list[dict[str, Any]]) -> int:
    return sum(counts["asked_rows"] for counts in counted)


def probabilities(rows: list[dict[str, Any]]) -> NDArray[np.float64]:
    return np.array([[row["p"][label] for label in LABELS] for row in rows if row["p"]])


def assert_calibrated(rows: list[dict[str, Any]], weights: NDArray[Any]) -> None:
    """The calibrated column is these weights [answers, labels], normalised by hand."""
    expected = weights / weights.sum(axis=1, keepdims=True)
    answers = [row["calibrated"] for row in rows if row["p"]]
    assert [row["calibrated"] is None for row in rows] == [row["p"] is None for row in rows]
    assert rows[4]["calibrated"] is None and len(answers) == DOCUMENTS - 1
    np.testing.assert_allclose(probabilities(answers), expected, rtol=0, atol=1e-6)
    for answer, p in zip(answers, expected, strict=True):
        assert answer["label"] == LABELS[int(p.argmax())]
        assert answer["margin"] == pytest.approx(abs(p[0] - p[1]), abs=1e-6)


def without_calibrated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if name != "calibrated"} for row in rows]


def in_file(path: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning")  # NaN
def test_existing_answers_are_calibrated_without_the_model(
    output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(output.run()) == DOCUMENTS - 1
    raw = output.rows()
    p = probabilities(raw)
    gold = ["--gold", str(output.folder / "gold.jsonl")]
    batch = output.calibrate("batch", "--method", "batch")
    made = in_file(batch)
    np.testing.assert_allclose(made["parameters"]["prior"], p.mean(axis=0), rtol=1e-6)
    assert made["source"] == {"snapshot": 1} and made["rows"] == len(p) == DOCUMENTS - 1
    files = {m: output.calibrate(m, "--method", m, *gold) for m in ("temperature", "isotonic")}
    for fitted in map(in_file, files.values()):
        assert (fitted["rows"], fitted["labels"]) == (len(p), LABELS)
        assert fitted["fingerprint"] == made["fingerprint"]

    output.tasks = [{**TOXIC, "calibration": {"method": "batch", "file": str(batch)}}]
    counted = output.run()
    assert counted and asked(counted) == sum(c["prefix_tokens_computed"] for c in counted) == 0
    assert not any(counts["model_loaded"] for counts in counted)
    rows = output.rows()
    assert without_calibrated(rows) == raw
    assert_calibrated(rows, p / p.mean(axis=0))

    # — the newest snapshot is calibrated; its raw answers give the same calibration
    assert output.calibrate("again", "--method", "batch", "--snapshot", "1").read_bytes() == (
        batch.read_bytes()
    )
    newer = in_file(output.calibrate("newer", "--method", "batch"))
    assert newer == {**made, "source": {"snapshot": 2}}

    temperature = {"method": "temperature", "file": str(files["temperature"])}
    output.tasks = [{**TOXIC, "calibration": temperature}, TOPIC]
    counted = output.run()
    assert asked(counted) == DOCUMENTS - 1  # about the new task alone
    rows = output.rows()
    assert without_calibrated(rows) == raw
    parameters = in_file(files["temperature"])["parameters"]
    assert_calibrated(rows, p ** (1 / parameters["temperature"]))
    assert parameters in written_parameters(output)
    assert "calibrated" not in output.rows("topic")[0]
    # — readable also with a spec that has no calibration
    for calibrated in (output.tasks[0], TOXIC):
        output.tasks[0] = calibrated
        assert main(["verify", str(output.spec())]) == main(["show", str(output.spec())]) == 0
    exported = output.folder / "exported"
    assert main(["export", str(output.spec()), "--to", str(exported)]) == 0
    file, *_ = exported.rglob("*.parquet")
    assert "toxic_calibrated_p_toxic" in pq.read_schema(file).names

    output.tasks[1] = {**TOPIC, "calibration": {"method": "batch", "file": str(batch)}}
    capsys.readouterr()
    assert main(["run", str(output.spec()), "--dry-run"]) == 2
    errors = capsys.readouterr().err
    assert "tasks.1.calibration.file: cannot be used for task 'topic'" in errors
    assert "['clean', 'toxic']" in errors and str(batch) in errors


def written_parameters(output: Output) -> list[Mapping[str, Any]]:
    """The parameters of the calibrations in the label files' metadata."""
    files = (output.folder / "out" / "labels").rglob("*.parquet")
    values = [pq.read_metadata(file).metadata.get(b"assay.calibration") for file in files]
    return [json.loads(value)["parameters"] for value in values if value]


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning")  # NaN
def test_calibrated_answers_are_not_judged_by_the_rows_that_the_calibration_was_fitted_to(
    output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    output.run()
    gold = output.folder / "gold.jsonl"
    file = output.calibrate("fitted", "--method", "temperature", "--gold", str(gold))
    assert (
        len(json.loads(file.read_text())["source"]["texts"]) == json.loads(file.read_text())["rows"]
    )
    output.tasks = [{**TOXIC, "calibration": {"method": "temperature", "file": str(file)}}]
    output.run()
    subset = output.folder / "subset.jsonl"
    subset.write_text("".join(gold.read_text().splitlines(keepends=True)[1:]))
    for path in (gold, subset):
        capsys.readouterr()
        words = ["eval", str(output.spec()), "--gold", str(path), "--resamples", "10"]
        gate = ["--gate", "toxic.calibrated.ece <= 1"]
        assert main([*words, "--json", *gate]) == 1  # nothing is judged, so the gate fails
        task = json.loads(capsys.readouterr().out)["tasks"]["toxic"]
        assert set(task["versions"]) == {"raw"} and task["rows"]["fitted"] == 0
        evaluated = task["rows"]["evaluated"]
        assert task["fitted"] == {"raw": 0, "calibrated": evaluated}
        assert main(words) == 0
        expected = f"{evaluated} more left out of the calibrated figures, because the calibration"
        assert expected in capsys.readouterr().out
