"""A corpus that changes, and runs in this process whose answers a test can compute: `p_of`.

Fixtures: `new_corpus`, and `staged`, whose task `toxic` is a cascade. The engine answers at once
from the question and the text, and notes what it is asked. Ray is not started.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from numpy.typing import NDArray
from stages import run_without_ray
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.fitted.cascade_file import Thresholds
from pipeline.hashes import parse_json, short_hash
from pipeline.inference.continuations import Continuation
from pipeline.inference.engine import Labelled
from pipeline.integrity.gc import collect_garbage
from pipeline.integrity.verify import verify_output
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.keys import documents_key, parse_key, spec_key
from pipeline.ledger.label_files import read_file, shard_in
from pipeline.options import RunOptions
from pipeline.runtime.job import make_job
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.placement import Placement
from pipeline.runtime.run import run
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore

LABELS = ("clean", "toxic")
QUESTIONS = ("first", "second", "third")
TOPIC: dict[str, Any] = {"name": "topic", "question": "topic", "labels": ["art", "law"]}
EXPLAIN = "explain"  # in the place of the question, where an answer is continued
EXPLAINED_BYTES = 3
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())

_CONTINUED = re.compile(r"text \d+ says so\.")

Asked = Counter[tuple[str, str]]  # how often a question was asked about a text


class Killed(BaseException):
    """In the place of a signal that kills the process."""


def text_of(document: Sequence[int]) -> str:
    """The text of these tokens of the byte tokenizer."""
    decoded: str = decoders.ByteLevel().decode([ALPHABET[token] for token in document])
    return decoded


def p_of(question: str, text: str) -> float:
    """What the model answers to a question: the probability of the second label."""
    seed = zlib.crc32(f"{question} {text}".encode())
    return float(np.random.default_rng(seed).uniform(0.001, 0.999))


class Answering(FakeEngine):
    """Answers by the question and the tokens, and notes what it is asked."""

    def __init__(self, job: Any, asked: Asked, broken: set[tuple[str, str]]) -> None:
        super().__init__(job.spec.tasks)
        self._questions = {task.name: task.question for task in job.spec.tasks}
        self._asked, self._broken = asked, broken

    def label(self, documents: Sequence[Sequence[int]], **how: Any) -> Labelled:
        for task in how["tasks"]:
            question = self._questions[task]
            self._asked.update((question, text_of(document)) for document in documents)
        return super().label(documents, **how)

    def _answer(self, document: Sequence[int], task: str) -> NDArray[np.float32]:  # [labels]
        question = self._questions[task]
        if (question, text_of(document)) in self._broken:
            return np.full(2, np.nan, np.float32)
        p = p_of(question, text_of(document))
        return np.log(np.array([1 - p, p]) / 2).astype(np.float32)


@dataclass(frozen=True)
class Continuing:
    """Continues an answer with the first bytes of its text, `text <number> says so.`"""

    asked: Asked

    def decode(
        self, prompts: Sequence[Sequence[int]], _tokens: int, **_how: Any
    ) -> list[Continuation]:
        texts = []
        for prompt in prompts:  # — with the prefix, and control tokens, which have no bytes
            (text,) = _CONTINUED.findall(text_of([each for each in prompt if each < len(ALPHABET)]))
            texts.append(text)
        self.asked.update((EXPLAIN, text) for text in texts)
        beginnings = (text[:EXPLAINED_BYTES] for text in texts)
        size = EXPLAINED_BYTES
        return [Continuation([*map(ALPHABET.index, each)], [0.5] * size) for each in beginnings]


@dataclass
class Corpus:
    """An input that changes, and the output that it is labelled to."""

    folder: Path
    model: dict[str, Any]
    asked: Asked  # by the last run
    broken: set[tuple[str, str]]  # questions and texts that are not answered with a number
    stages: list[dict[str, Any]] = field(default_factory=list)  # of the task `toxic`, if several
    before: list[dict[str, Any]] = field(default_factory=list)  # tasks before it
    others: list[dict[str, Any]] = field(default_factory=list)  # and after it
    files: dict[str, list[str]] = field(default_factory=dict)  # texts by name
    seen: dict[str, str] = field(default_factory=dict)  # all texts there ever were, by hash
    name: str = "job"
    shard_bytes: int = 3_000

    def __post_init__(self) -> None:
        self.input, self.cache = self.folder / "in", self.folder / "cache"
        self.input.mkdir()

    @property
    def spec_file(self) -> Path:
        task: dict[str, Any] = {"name": "toxic", "labels": LABELS, "question": QUESTIONS[0]}
        if self.stages:
            del task["question"]
            task["cascade"] = {"stages": self.stages, "file": str(self.folder / "thresholds")}
        content = {
            "name": self.name,
            "model": self.model,
            "input": {"path": str(self.input), "id": "id", "shard_bytes": self.shard_bytes},
            "output": str(self.folder / "out"),
            "documents": {"max_tokens": 512},
            "tasks": [*self.before, task, *self.others],
        }
        (self.folder / "spec.yaml").write_text(json.dumps(content))
        return self.folder / "spec.yaml"

    @property
    def spec(self) -> JobSpec:
        return load_spec(self.spec_file)

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.folder / "out")

    @property
    def texts(self) -> dict[str, str]:
        """The documents by id, in the order of the input."""
        files = sorted(self.files.items())
        return {f"{name}-{row}": text for name, texts in files for row, text in enumerate(texts)}

    def write(self, name: str, texts: Sequence[str]) -> None:
        rows = [{"id": f"{name}-{row}", "text": text} for row, text in enumerate(texts)]
        (self.input / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self.files[name] = [*texts]
        self.seen |= {short_hash(text.encode()): text for text in texts}

    def delete(self, *names: str) -> list[str]:
        """Deletes the files; their texts."""
        for name in names:
            (self.input / f"{name}.jsonl").unlink()
        return [text for name in names for text in self.files.pop(name)]

    def move(self, folder: str) -> None:
        shutil.move(self.input, self.folder / folder)
        self.input = self.folder / folder

    def decide(self, low: float, high: float, *, task: str = "toxic", file: str = "") -> None:
        """Writes the thresholds of a task's stages as they are now."""
        place = Placement("cpu", "float32", 1, 1)
        stages = [own for of_stage in self.spec.stage_specs() for own in of_stage]
        jobs = [make_job(stage, place, self.cache) for stage in stages]
        fps = tuple(job.fp[task] for job in jobs if task in job.fp)
        chosen = Thresholds(task, LABELS, "toxic", fps, low, high)
        (self.folder / (file or "thresholds")).write_bytes(chosen.json())

    def run(self, **options: Any) -> Outcome:
        """A run with these options; `asked` has what the model was asked by it alone."""
        self.asked.clear()
        return run(self.spec, cache_dir=self.cache, options=RunOptions(**options))

    def run_until(self, creates: int, act: Callable[[], object], **options: Any) -> Outcome | None:
        """Runs, and acts before the create of this number; None if it was `Killed` there.

        A process that dies changes no object between two creates, so this is each point of death.
        """
        create, delete, left = LocalStore.create, LocalStore.delete, creates

        def counted(store: LocalStore, key: str, data: bytes) -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                act()
            return create(store, key, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStore, "create", counted)
            # — the dead do not tidy up
            patch.setattr(LocalStore, "delete", lambda *of: None if left == 0 else delete(*of))
            try:
                return self.run(**options)
            except Killed:
                return None

    def collect(self, **options: Any) -> tuple[str, ...]:
        """What gc deletes if it keeps one snapshot, ten minutes after any run that was killed."""
        self.store.delete([each.key for each in self.store.list("attempts/")])
        how = {"keep": 1, "delete": True, "older_than_days": 0, **options}
        return collect_garbage(self.spec, **how).keys

    def rows(self, task: str = "toxic", snapshot: int | None = None) -> dict[str, dict[str, Any]]:
        """The rows of a snapshot, by document; each document is in it once."""
        labels = open_labels(str(self.folder / "out"), snapshot=snapshot)
        rows = labels.to_table(columns=["doc_id", task]).to_pylist()
        by_id = {row["doc_id"]: row[task] for row in rows}
        assert len(by_id) == len(rows)
        return by_id

    def check(
        self,
        low: float = 0,
        high: float = 0,
        *,
        texts: Mapping[str, str] | None = None,
        broken: Collection[tuple[str, str]] = (),
    ) -> None:
        """The current snapshot has each document once, with the answer of the deciding stage.

        Documents that needed an answer of `broken` may have failed.
        """
        documents = self.texts if texts is None else texts
        stages = QUESTIONS[: max(1, len(self.stages))]
        asked = {task["name"]: [task.get("question")] for task in (*self.before, *self.others)}
        for task, questions in {"toxic": stages, **asked}.items():
            rows = self.rows(task)
            assert [*rows] == [*documents]
            for name, text in documents.items() if None not in questions else ():
                row = rows[name]
                stage, p = decided(text, low, high, questions)
                if row["status"].startswith("error:"):
                    assert any((each, text) in broken for each in questions[:stage]), (name, row)
                    assert row["label"] is None
                    continue
                assert row["status"] == ("ok" if text else "empty")
                if "stage" in row:
                    assert row["stage"] == (stage if text else None), name
                if text:
                    first, second = row["p"].values()
                    assert (first, second) == pytest.approx((1 - p, p), abs=1e-6)
                    assert row["label"] == [*row["p"]][int(p > 0.5)]
        verified = verify_output(self.spec, cache_dir=self.cache)
        assert verified.intact, verified

    def assert_asked(self, expected: Iterable[tuple[str, str]]) -> None:
        """The model was asked this, about each text at most once for each document that has it."""
        assert set(self.asked) == set(expected)
        documents = Counter(self.texts.values())
        assert all(count <= documents[text] for (_, text), count in self.asked.items())

    def shard_texts(self) -> dict[str, set[str]]:
        """The texts of each shard with a label file."""
        keys = [parse_key(listed.key) for listed in self.store.list("labels/")]
        hashes = {
            key.sid: read_file(self.store, documents_key(key.sid), ["content_hash"])
            for key in keys
            if key is not None
        }
        return {
            sid: {self.seen[each.as_py()] for each in table["content_hash"]}
            for sid, table in hashes.items()
        }

    def stored(self) -> dict[tuple[str, str], set[str]]:
        """By question and text, the shards with a label file that has the answer."""
        answers: dict[tuple[str, str], set[str]] = {}
        for listed in (*self.store.list("labels/"), *self.store.list("retries/")):
            key = parse_key(listed.key)
            assert key is not None, listed.key
            version = parse_json(self.store.read(spec_key(key.task, key.fp)))
            if "task" not in version or "explain" in version:
                continue  # it is made of the answers in other files
            question = EXPLAIN if "continuation" in version else version["task"]["question"]
            hashes = read_file(self.store, documents_key(key.sid), ["content_hash"])
            rows = read_file(self.store, listed.key, None)
            first = shard_in(rows).piece.start_row
            numbers = rows["row"].to_pylist() if key.part else range(first, first + len(rows))
            for row, status in zip(numbers, rows["status"].to_pylist(), strict=True):
                if status == "ok":
                    text = self.seen[hashes["content_hash"][row - first].as_py()]
                    answers.setdefault((question, text), set()).add(key.sid)
        return answers


def decided(
    text: str, low: float, high: float, questions: Sequence[str] = QUESTIONS[:2]
) -> tuple[int, float]:
    """The stage that decides a text, and its answer: the oracle."""
    for number, question in enumerate(questions, 1):
        p = p_of(question, text)
        if number == len(questions) or p <= low or p >= high:
            return number, p
    raise AssertionError(text)


def asked_of(
    texts: Iterable[str], low: float, high: float, questions: Sequence[str] = QUESTIONS[:2]
) -> set[tuple[str, str]]:
    """What the stages are asked about these texts."""
    return {
        (question, text)
        for text in texts
        for question in questions[: decided(text, low, high, questions)[0]]
        if text
    }


def write_shared(corpus: Corpus, files: int = 3) -> dict[str, str]:
    """Writes files that share some texts, and have empty and repeated ones; the documents."""
    for number in range(files):
        of_file = [f"text {(7 * number + row) % 40} says so" for row in range(25)]
        corpus.write(f"f{number}", [*of_file, "", "again"])
    return corpus.texts


def numbered(name: str, count: int) -> list[str]:
    """Different texts."""
    return [f"{number} of {name} says a little. " * 3 for number in range(count)]


@pytest.fixture
def new_corpus(
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
) -> Iterator[Callable[[], Corpus]]:
    asked: Asked = Counter()
    broken: set[tuple[str, str]] = set()
    model = {"path": str(model_folder), "dtype": "float32"}
    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        readers = "pipeline.runtime.readers"
        patch.setattr(f"{readers}.job_engine", lambda job, _send: Answering(job, asked, broken))
        continuing = Continuing(asked), byte_tokenizer
        patch.setattr(f"{readers}.continuation_engine", lambda _job, _send: continuing)
        yield lambda: Corpus(tmp_path_factory.mktemp("corpus"), model, asked, broken)


@pytest.fixture
def staged(new_corpus: Callable[[], Corpus]) -> Corpus:
    """A corpus with a cascade of two questions, whose files share some texts."""
    corpus = new_corpus()
    corpus.stages = [{"question": question} for question in QUESTIONS[:2]]
    return corpus
