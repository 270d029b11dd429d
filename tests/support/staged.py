"""Runs of a cascade in this process, with stages whose answers a test can compute itself."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from numpy.typing import NDArray
from stages import label_and_commit, read_and_commit
from tokenizers import decoders, pre_tokenizers

from pipeline.fitted.thresholds import Thresholds
from pipeline.inference.engine import Labelled
from pipeline.integrity.verify import verify_output
from pipeline.ledger.dataset import open_labels
from pipeline.options import RunOptions
from pipeline.runtime.job import make_job
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.placement import Placement
from pipeline.runtime.run import run
from pipeline.spec.parse import load_spec

LABELS = ("clean", "toxic")
QUESTIONS = ("first", "second", "third")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def text_of(document: Sequence[int]) -> str:
    """The text of these tokens of the byte tokenizer."""
    decoded: str = decoders.ByteLevel().decode([ALPHABET[token] for token in document])
    return decoded


def p_of(question: str, text: str) -> float:
    """What a stage with this question answers: the probability of `toxic`."""
    seed = zlib.crc32(f"{question} {text}".encode())
    return float(np.random.default_rng(seed).uniform(0.001, 0.999))


class StagedEngine(FakeEngine):
    """Answers by the question and the tokens, and notes what it is asked."""

    def __init__(self, job: Any, asked: Counter[Any], broken: set[Any]) -> None:
        super().__init__(job.spec.tasks)
        self._questions = {task.name: task.question for task in job.spec.tasks}
        self._noted, self._broken = asked, broken

    def label(self, documents: Sequence[Sequence[int]], **how: Any) -> Labelled:
        for task in how["tasks"]:
            question = self._questions[task]
            self._noted.update((question, text_of(document)) for document in documents)
        return super().label(documents, **how)

    def _answer(self, document: Sequence[int], task: str) -> NDArray[np.float32]:  # [labels]
        question = self._questions[task]
        if (question, text_of(document)) in self._broken:
            return np.full(2, np.nan, np.float32)
        p = p_of(str(question), text_of(document))
        return np.log(np.array([1 - p, p]) / 2).astype(np.float32)


class Staged:
    """A spec with a cascade of questions, its corpus and its output, in a folder of their own."""

    def __init__(self, folder: Path, model: Path, asked: Counter[Any], broken: set[Any]) -> None:
        self.folder, self.asked, self.broken = folder, asked, broken
        self.model = {"path": str(model), "dtype": "float32"}
        self.stages: list[dict[str, Any]] = [{"question": "first"}, {"question": "second"}]
        self.before: list[dict[str, Any]] = []  # tasks before that of the cascade
        self.others: list[dict[str, Any]] = []  # and after it
        self.input = folder / "in"
        self.input.mkdir(exist_ok=True)

    @property
    def spec_file(self) -> Path:
        cascade = {"stages": self.stages, "file": str(self.folder / "thresholds")}
        task = {"name": "toxic", "labels": LABELS, "cascade": cascade}
        content = {
            "name": "job",
            "model": self.model,
            "input": {"path": str(self.input), "id": "id", "shard_bytes": 3_000},
            "output": str(self.folder / "out"),
            "tasks": [*self.before, task, *self.others],
        }
        (self.folder / "spec.yaml").write_text(json.dumps(content))
        return self.folder / "spec.yaml"

    def write(self, name: str, texts: Sequence[str]) -> None:
        rows = [{"id": f"{name}-{row}", "text": text} for row, text in enumerate(texts)]
        (self.input / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def decide(self, low: float, high: float) -> None:
        """Writes the thresholds of the stages as they are now."""
        spec = load_spec(self.spec_file)
        place = Placement("cpu", "float32", 1, 1)
        jobs = [
            make_job(stage, place, self.folder / "cache")
            for of_stage in spec.stage_specs()
            for stage in of_stage
        ]
        fps = tuple(job.fp["toxic"] for job in jobs if "toxic" in job.fp)
        file = Thresholds("toxic", ("clean", "toxic"), "toxic", fps, low, high)
        (self.folder / "thresholds").write_bytes(file.json())

    def run(self, **options: Any) -> Outcome:
        self.asked.clear()
        cache = self.folder / "cache"
        return run(load_spec(self.spec_file), cache_dir=cache, options=RunOptions(**options))

    def assert_asked(self, expected: Iterable[Any]) -> None:
        """The stages were asked this, each about a text at most once in a shard that has it."""
        assert set(self.asked) == set(expected)
        documents = Counter(
            json.loads(line)["text"]
            for file in self.input.glob("*.jsonl")
            for line in file.read_text().splitlines()
        )
        assert all(count <= documents[text] for (_, text), count in self.asked.items())

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of the current snapshot, by document."""
        columns = ["doc_id", "toxic"]
        rows = open_labels(str(self.folder / "out")).to_table(columns=columns).to_pylist()
        return {row["doc_id"]: row["toxic"] for row in rows}


def decided(text: str, low: float, high: float, stages: int = 2) -> tuple[int, float]:
    """The stage that decides a text, and its answer: the oracle."""
    for number, question in enumerate(QUESTIONS[:stages], 1):
        p = p_of(question, text)
        if number == stages or p <= low or p >= high:
            return number, p
    raise AssertionError(text)


def asked_of(texts: Sequence[str], low: float, high: float, stages: int = 2) -> set[Any]:
    """What the stages are asked about these texts."""
    return {
        (question, text)
        for text in texts
        for number, question in enumerate(QUESTIONS[:stages], 1)
        if text and number <= decided(text, low, high, stages)[0]
    }


def check(staged: Staged, texts: dict[str, str], low: float, high: float, stages: int = 2) -> None:
    """Every document has the answer of the stage that decides it."""
    rows = staged.rows()
    assert rows.keys() == texts.keys()
    for name, text in texts.items():
        row = rows[name]
        if not text:
            assert (row["status"], row["label"], row["p"], row["stage"]) == ("empty", *[None] * 3)
            continue
        stage, p = decided(text, low, high, stages)
        assert (row["status"], row["stage"]) == ("ok", stage), name
        assert row["p"]["toxic"] == pytest.approx(p, abs=1e-6)
        assert row["label"] == ("toxic" if p > 0.5 else "clean")
    verified = verify_output(load_spec(staged.spec_file), cache_dir=staged.folder / "cache")
    assert verified.intact, verified


def corpus(staged: Staged, files: int = 3) -> dict[str, str]:
    """Files that share some texts, and have empty and repeated ones."""
    texts = {}
    for number in range(files):
        of_file = [f"text {(7 * number + row) % 40} says so" for row in range(25)] + ["", "again"]
        staged.write(f"f{number}", of_file)
        texts |= {f"f{number}-{row}": text for row, text in enumerate(of_file)}
    return texts


@pytest.fixture
def staged(tmp_path: Path, model_folder: Path) -> Iterator[Staged]:
    """A cascade whose runs are in this process."""
    asked: Counter[Any] = Counter()
    broken: set[Any] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.runtime.run.local_ray", lambda _placement: nullcontext())
        patch.setattr("pipeline.runtime.graph.label_items", label_and_commit)
        patch.setattr("pipeline.runtime.graph.read_items", read_and_commit)
        patch.setattr(
            "pipeline.runtime.readers.job_engine",
            lambda job, _send: (StagedEngine(job, asked, broken), None),
        )
        yield Staged(tmp_path, model_folder, asked, broken)
