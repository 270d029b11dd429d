"""A corpus that changes, runs of it in this process, and the answers that they must have: `p_of`.

Fixtures: `new_corpus` makes a `Corpus`; `plain` is one with one question; in `staged`, the task
`toxic` is a cascade. The engine answers at once from the question and the text, and notes what it
is asked. In `modelled`, the tiny model answers. Ray is not started.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Answering, Asked, p_of
from stages import run_without_ray

from pipeline.fitted.certificate import Thresholds, hash_of
from pipeline.hashes import parse_json, short_hash
from pipeline.integrity.gc import collect_garbage
from pipeline.integrity.verify import verify_output
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.keys import documents_key, parse_key, spec_key
from pipeline.ledger.label_files import read_file
from pipeline.options import RunOptions
from pipeline.runtime.cascades import write_certificate
from pipeline.runtime.dry_run import dry_run
from pipeline.runtime.job import job_of_output
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.plan import Plan, plan
from pipeline.sources.shards import Shard
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore
from pipeline.stores.store import open_store
from pipeline.verbs.run import judged_run

LABELS = ("clean", "toxic")
QUESTIONS = ("first", "second", "third")
TOXIC: dict[str, Any] = {"name": "toxic", "question": QUESTIONS[0], "labels": LABELS}
TOPIC: dict[str, Any] = {"name": "topic", "question": "topic", "labels": ["art", "law"]}
MAX_TOKENS = 512  # that are read of a document


class Killed(BaseException):
    """In the place of a signal that kills the process."""


def kill() -> None:
    raise Killed


@contextmanager
def acting_before(creates: int, act: Callable[[], object], *, folder: str = "") -> Iterator[None]:
    """Acts before the create of this number, after which nothing is deleted.

    A process that dies changes no object between two creates, so this is each point of death. With
    a folder of the output, only its creates count.
    """
    create, delete, left = LocalStore.create, LocalStore.delete, creates

    def counted(store: LocalStore, key: str, data: bytes) -> str | None:
        nonlocal left
        left -= key.startswith(folder)
        if left == 0 and key.startswith(folder):
            act()
        return create(store, key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "create", counted)
        # — a killed process deletes nothing
        patch.setattr(LocalStore, "delete", lambda *of: None if left == 0 else delete(*of))
        yield


@dataclass
class Corpus:
    """An input that changes, and the output that it is labelled to."""

    folder: Path
    model: dict[str, Any]  # empty: the spec names none
    asked: Asked = field(default_factory=Counter)  # by the last run
    # Questions and texts that are not answered with a number.
    broken: set[tuple[str, str]] = field(default_factory=set)
    task: dict[str, Any] = field(default_factory=TOXIC.copy)
    stages: list[dict[str, Any]] = field(default_factory=list)  # of this task, if several
    promise: dict[str, Any] = field(default_factory=dict)  # of these stages
    when: str = ""  # the condition of the task with these stages
    before: list[dict[str, Any]] = field(default_factory=list)  # tasks before it
    others: list[dict[str, Any]] = field(default_factory=list)  # and after it
    settings: dict[str, Any] = field(default_factory=dict)  # more keys of the spec
    files: dict[str, list[str]] = field(default_factory=dict)  # texts by name
    all_texts: dict[str, str] = field(default_factory=dict)  # of all versions, by hash
    name: str = "job"
    shard_bytes: int = 3_000

    def __post_init__(self) -> None:
        self.input, self.cache = self.folder / "in", self.folder / "cache"
        self.input.mkdir()

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """The tasks of the spec."""
        task = self.task
        if self.stages:
            cascade = {**self.promise, "stages": self.stages}
            task = {"name": "toxic", "labels": LABELS, "cascade": cascade}
            task |= {"when": self.when} if self.when else {}
        return [*self.before, task, *self.others]

    @property
    def spec_file(self) -> Path:
        content = {
            "name": self.name,
            **({"model": self.model} if self.model else {}),
            "input": {"path": str(self.input), "id": "id", "shard_bytes": self.shard_bytes},
            "output": str(self.folder / "out"),
            "documents": {"max_tokens": MAX_TOKENS},
            "tasks": self.tasks,
            **self.settings,
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
    def max_tokens(self) -> int:
        """The most tokens that are read of a document."""
        return int(self.settings.get("documents", {}).get("max_tokens", MAX_TOKENS))

    @property
    def texts(self) -> dict[str, str]:
        """The documents by id, in the order of the input."""
        files = sorted(self.files.items())
        return {f"{name}-{row}": text for name, texts in files for row, text in enumerate(texts)}

    def write(self, name: str, texts: Sequence[str], **columns: Sequence[Any]) -> None:
        """Writes a file, which may have more columns; the id of its first row is `name-0`."""
        lines = []
        for row, text in enumerate(texts):
            more = {column: values[row] for column, values in columns.items()}
            lines.append(json.dumps({"id": f"{name}-{row}", "text": text, **more}))
        (self.input / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        self.files[name] = [*texts]
        self.all_texts |= {short_hash(text.encode()): text for text in texts}

    def delete(self, *names: str) -> list[str]:
        """Deletes the files; their texts."""
        for name in names:
            (self.input / f"{name}.jsonl").unlink()
        return [text for name in names for text in self.files.pop(name)]

    def move(self, folder: str) -> None:
        shutil.move(self.input, self.folder / folder)
        self.input = self.folder / folder

    def decide(self, low: float, high: float, *, task: str = "toxic", label: str = "toxic") -> None:
        """Writes a certificate with these thresholds for a task's stages as they are now."""
        write_thresholds(self.spec, task, {label: (low, high)}, self.cache)

    def run(self, **options: Any) -> Outcome:
        """A run with these options; `asked` has what the model was asked by it alone."""
        self.asked.clear()
        own = RunOptions(**options)
        return judged_run(self.spec, cache_dir=self.cache, options=own).outcome

    def run_until(
        self, creates: int, act: Callable[[], object], *, folder: str = "", **options: Any
    ) -> Outcome | None:
        """Runs, `acting_before` the create of this number; None if it was `Killed` there."""
        with acting_before(creates, act, folder=folder), suppress(Killed):
            return self.run(**options)
        return None

    def collect(self, **options: Any) -> tuple[str, ...]:
        """What gc deletes if it keeps one snapshot, ten minutes after any run that was killed."""
        self.store.delete([each.key for each in self.store.list("attempts/")])
        how = {"keep": 1, "delete": True, "older_than_days": 0, **options}
        return collect_garbage(self.spec, **how).keys

    def plan(self, **options: Any) -> Plan:
        """What a run with these options would do."""
        return dry_run(self.spec, RunOptions(**options), cache_dir=self.cache)

    def rows(self, task: str = "", snapshot: int | None = None) -> dict[str, dict[str, Any]]:
        """The rows of a snapshot, by document; each document is in it once."""
        column = task or self.task["name"]
        labels = open_labels(str(self.folder / "out"), snapshot=snapshot)
        rows = labels.to_table(columns=["doc_id", column]).to_pylist()
        by_id = {row["doc_id"]: row[column] for row in rows}
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
        asked = {task["name"]: [task.get("question")] for task in self.tasks}
        if self.stages:
            asked["toxic"] = list(QUESTIONS[: len(self.stages)])
        # — a condition of these tests is `toxic.p.toxic > BOUND`
        bounds = {t["name"]: float(t["when"].split()[-1]) for t in self.tasks if "when" in t}
        toxic = self.rows("toxic") if bounds else {}
        for task, questions in asked.items():
            rows = self.rows(task)
            assert [*rows] == [*self.texts]
            for name in rows.keys() - documents.keys():
                assert (rows[name]["status"], rows[name]["label"]) == ("skipped", None), name
            for name, whole in documents.items() if None not in questions else ():
                row, text = rows[name], whole[: self.max_tokens]
                if text and task in bounds:
                    answered_p = toxic[name]["p"]
                    if not answered_p or answered_p["toxic"] <= bounds[task]:
                        assert (row["status"], row["label"]) == ("skipped", None), (name, row)
                        continue
                stage, p = decided(text, low, high, questions)
                if row["status"].startswith("error:"):
                    assert any((each, text) in broken for each in questions[:stage]), (name, row)
                    assert row["label"] is None
                    continue
                answered = "ok" if text == whole else "truncated"
                assert row["status"] == (answered if text else "empty")
                if "stage" in row:
                    assert row["stage"] == (stage if text else None), name
                if text:
                    first, second = row["p"].values()
                    assert (first, second) == pytest.approx((1 - p, p), abs=1e-6)
                    assert row["label"] == [*row["p"]][int(p > 0.5)]
        self.verify()

    def verify(self) -> None:
        """`assay verify` finds the output intact."""
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
            sid: {self.all_texts[each.as_py()] for each in table["content_hash"]}
            for sid, table in hashes.items()
        }

    def stored(self) -> dict[tuple[str, str], set[str]]:
        """By question and text, the shards with a label file that has the answer."""
        answers: dict[tuple[str, str], set[str]] = {}
        for listed in (*self.store.list("labels/"), *self.store.list("retries/")):
            key = parse_key(listed.key)
            assert key is not None, listed.key
            version = parse_json(self.store.read(spec_key(key.task, key.fp)))
            if "task" not in version:
                continue  # it is made of the answers in other files
            question = version["task"]["question"]
            hashes = read_file(self.store, documents_key(key.sid), ["content_hash"])
            rows = read_file(self.store, listed.key, None)
            for row, status in enumerate(rows["status"].to_pylist()):
                if status == "ok":
                    text = self.all_texts[hashes["content_hash"][row].as_py()]
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
    """Writes files that share some texts, and have empty and repeated ones; the documents.

    Each file is two shards.
    """
    corpus.shard_bytes = 9_000
    for number in range(files):
        of_file = [f"text {(7 * number + row) % 40} says so" for row in range(25)]
        corpus.write(f"f{number}", [*of_file, "", "again"])
    return corpus.texts


def numbered(name: str, count: int) -> list[str]:
    """Different texts."""
    return [f"{number} of {name} says a little. " * 3 for number in range(count)]


def write_thresholds(
    spec: JobSpec, task: str, at: Mapping[str, tuple[float, float]], cache: Path
) -> None:
    """Writes a certificate of the input as it is now, which proves nothing."""
    store = open_store(spec.output, spec.storage_options)
    job = job_of_output(spec, store, cache)
    shards = hash_of(shard.id for shard in plan(job, store, keep=False).shards)
    unproved, thresholds = job.cascades[task].without_proof(0.1), Thresholds(at, each=True)
    write_certificate(store, replace(unproved, thresholds=thresholds, shards=shards))


@pytest.fixture
def new_corpus(
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Path,
) -> Iterator[Callable[[], Corpus]]:
    asked: Asked = Counter()
    broken: set[tuple[str, str]] = set()
    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        readers = "pipeline.runtime.readers"
        patch.setattr(
            f"{readers}.reader_engine", lambda job, _send, _models: Answering(job, asked, broken)
        )
        model = read_in_float32(model_folder)
        yield lambda: Corpus(tmp_path_factory.mktemp("corpus"), model, asked, broken)


@pytest.fixture
def plain(new_corpus: Callable[[], Corpus], monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """A corpus with one question, in no files yet; the cache of commands is its own."""
    corpus = new_corpus()
    monkeypatch.setenv("ASSAY_CACHE", str(corpus.cache))
    return corpus


@pytest.fixture
def staged(plain: Corpus) -> Corpus:
    """A corpus with a cascade of two questions, in no files yet."""
    plain.stages = [{"question": question} for question in QUESTIONS[:2]]
    return plain


@pytest.fixture
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents of a sample do not depend on the folder of the test."""
    identity = Shard._identity.fget
    by_name = property(lambda shard: {**identity(shard), "path": Path(shard.path).name})
    monkeypatch.setattr(Shard, "_identity", by_name)


@pytest.fixture
def modelled(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """A corpus whose questions the tiny model answers; the cache of commands is its own."""
    run_without_ray(monkeypatch)
    corpus = Corpus(tmp_path, read_in_float32(model_folder))
    monkeypatch.setenv("ASSAY_CACHE", str(corpus.cache))
    return corpus


def read_in_float32(model_folder: Path) -> dict[str, Any]:
    return {"path": str(model_folder), "dtype": "float32"}
