"""A corpus whose files change their form, and a run of it that notes what the model is asked.

Fixture: `new_corpus`. The engine answers at once, from the text (`FakeEngine`); Ray is not started.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from fake_engine import FakeEngine
from stages import run_without_ray
from transformers import PreTrainedTokenizerFast

from pipeline.inference.engine import Labelled
from pipeline.ledger.snapshots import read_snapshot
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.run import run
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.local import LocalStore

TOXIC = {"name": "toxic", "question": "Rude?", "labels": {"toxic": ["Yes"], "clean": ["No"]}}
TOPIC = {"name": "topic", "question": "About what?", "labels": ["art", "law", "sport"]}


class Killed(BaseException):
    """In the place of a signal that kills the process."""


class Noting(FakeEngine):
    """Notes each task and text that it is asked about."""

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        asked: list[tuple[str, str]],
        last_asked: list[tuple[str, str]],
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        super().__init__(tasks)
        self._asked, self._last_asked = asked, last_asked
        self._tokenizer = tokenizer

    def label(
        self, documents: Sequence[Sequence[int]], *, tasks: Sequence[str], **named: Any
    ) -> Labelled:
        texts = [self._tokenizer.decode(document) for document in documents]
        self._last_asked[:] = [(task, text) for text in texts for task in tasks]
        self._asked += self._last_asked
        return super().label(documents, tasks=tasks, **named)


@dataclass
class Corpus:
    """An input that changes its form, and the output that it is labelled to."""

    root: Path
    model: Path
    asked: list[tuple[str, str]]
    last_asked: list[tuple[str, str]]  # of one shard: a shard is labelled in one call
    tokenizer: PreTrainedTokenizerFast
    files: dict[str, list[str]] = field(default_factory=dict)  # texts by path below the root
    tasks: list[dict[str, Any]] = field(default_factory=lambda: [TOXIC, TOPIC])
    folder: str = "in"
    shard_bytes: int = 3_000

    def write(self, name: str, texts: list[str]) -> None:
        path = self.root / self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"id": f"{name}-{row}", "text": t}) for row, t in enumerate(texts))
        path.write_text("".join(f"{line}\n" for line in lines))
        self.files[name] = texts

    def move(self, folder: str) -> None:
        shutil.move(self.root / self.folder, self.root / folder)
        self.folder = folder

    @property
    def spec(self) -> JobSpec:
        content = {
            "name": "corpus",
            "model": {"path": str(self.model), "dtype": "float32"},
            "input": {
                "path": str(self.root / self.folder),
                "id": "id",
                "shard_bytes": self.shard_bytes,
            },
            "output": str(self.root / "out"),
            "documents": {"max_tokens": 512},
            "tasks": self.tasks,
        }
        return parse_spec(yaml.safe_dump(content))

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.root / "out")

    def run(self) -> tuple[Outcome, list[tuple[str, str]]]:
        """The outcome, and what the model was asked."""
        self.asked.clear()
        outcome = run(self.spec, cache_dir=self.root / "cache")
        assert outcome.complete
        return outcome, list(self.asked)

    def run_until(self, creates: int, act: Callable[[], None]) -> Outcome | None:
        """Runs, and acts before the create of this number; the outcome, unless `act` killed it."""
        create, left = LocalStore.create, creates

        def counted(store: LocalStore, key: str, data: bytes) -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                act()
            return create(store, key, data)

        self.asked.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStore, "create", counted)
            try:
                return run(self.spec, cache_dir=self.root / "cache")
            except Killed:
                return None

    def rows(self, outcome: Outcome, task: str) -> dict[str, tuple[str, dict[str, float], str]]:
        """Label, probabilities and status by id, of the snapshot."""
        assert outcome.snapshot is not None
        files = read_snapshot(self.store, outcome.snapshot)["files"]
        tables = [
            pq.read_table(self.root / "out" / file["key"]) for file in files if file["task"] == task
        ]
        rows = pa.concat_tables(tables).to_pylist()
        assert len({row["doc_id"] for row in rows}) == len(rows)
        return {row["doc_id"]: (row["label"], row["p"], row["status"]) for row in rows}

    def check(self, outcome: Outcome) -> None:
        """The snapshot has each row of the input once, with the answer that the engine gives."""
        engine = FakeEngine(self.spec.tasks)
        for task in self.spec.tasks:
            rows = self.rows(outcome, task.name)
            expected = {
                f"{name}-{row}": text
                for name, texts in self.files.items()
                for row, text in enumerate(texts)
            }
            assert rows.keys() == expected.keys()
            for doc_id, text in expected.items():
                label, p, status = rows[doc_id]
                if not text:
                    assert (label, status) == (None, "empty")
                    continue
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                (answer,) = engine.label([ids], tasks=[task.name]).log_probs
                names = list(task.labels)
                assert status == "ok" and label == names[int(answer[0].argmax())]
                assert list(p) == names


@pytest.fixture
def new_corpus(
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
) -> Iterator[Callable[[], Corpus]]:
    asked: list[tuple[str, str]] = []
    last: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        patch.setattr(
            "pipeline.runtime.readers.job_engine",
            lambda job, _send: (Noting(job.spec.tasks, asked, last, byte_tokenizer), None),
        )
        root = tmp_path_factory.mktemp
        yield lambda: Corpus(root("corpus"), model_folder, asked, last, byte_tokenizer)


def texts(name: str, count: int) -> list[str]:
    return [f"{number} of {name} says a little. " * 3 for number in range(count)]
