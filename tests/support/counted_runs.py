"""Runs in this process with an engine that answers at once and counts what it is asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fake_engine import FakeEngine
from stages import label_and_commit

from pipeline.inference.engine import Labelled
from pipeline.ledger.dataset import open_labels
from pipeline.options import RunOptions
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.run import run
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec

Row = dict[str, Any]


class Counting(FakeEngine):
    """Counts how often it was asked about each text."""

    asked: Counter[Any]

    def label(self, documents: Sequence[Sequence[int]], **how: Any) -> Labelled:
        self.asked.update(tuple(document) for document in documents)
        return super().label(documents, **how)


@pytest.fixture(scope="module")
def asked() -> Iterator[Counter[Any]]:
    """How often the model was asked about each document; runs are in this process."""
    counted: Counter[Any] = Counter()

    def engine(job: Any, _send: Any) -> FakeEngine:
        made = Counting(job.spec.tasks)
        made.asked = counted
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.runtime.run.local_ray", lambda _placement: nullcontext())
        patch.setattr("pipeline.runtime.graph.label_items", label_and_commit)
        patch.setattr("pipeline.runtime.readers.job_engine", engine)
        yield counted


class Output:
    """A spec, its corpus and its output in a folder of their own."""

    def __init__(self, folder: Path, model: Path, asked: Counter[Any]) -> None:
        self.folder, self.asked = folder, asked
        task = {"question": "?", "labels": ["yes", "no"]}
        content = {
            "name": "job",
            "model": {"path": str(model), "dtype": "float32"},
            "input": {"path": str(folder / "in"), "id": "id", "shard_bytes": 3_000},
            "output": str(folder / "out"),
            "tasks": [{"name": "a", **task}, {"name": "b", **task}],
        }
        (folder / "in").mkdir(exist_ok=True)
        (folder / "spec.yaml").write_text(json.dumps(content))

    @property
    def spec(self) -> JobSpec:
        return load_spec(str(self.folder / "spec.yaml"))

    def write(self, rows: Sequence[Row], name: str = "corpus.jsonl") -> None:
        (self.folder / "in" / name).write_text("\n".join(map(json.dumps, rows)))

    def run(self, sample: str | None = None, where: str | None = None, **others: Any) -> Outcome:
        """A run of a slice, with these options."""
        options = RunOptions(sample=sample, where=where, **others)
        return run(self.spec, cache_dir=self.folder / "cache", options=options)

    def labels(self, snapshot: int | None = None) -> list[Row]:
        found = open_labels(str(self.folder / "out"), snapshot=snapshot)
        rows: list[Row] = pa.table(found).to_pylist()
        return rows


@pytest.fixture
def output(tmp_path: Path, model_folder: Path, asked: Counter[Any]) -> Output:
    asked.clear()
    return Output(tmp_path, model_folder, asked)


def corpus(count: int, mark: str = "text") -> list[Row]:
    return [
        {"id": f"{mark}-{i}", "text": f"{mark} number {i}", "year": 2000 + i % 10}
        for i in range(count)
    ]
