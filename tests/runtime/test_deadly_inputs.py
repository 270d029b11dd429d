"""A text that kills or stops what reads it is quarantined, and all other rows are labelled.

Each shard is labelled in a child process, which is started again when it dies, as Ray does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import stages
from changing_corpus import TOPIC, Corpus
from toy_assay import in_children

from pipeline.errors import ModelError, SpecError, StorageError, WorkerError
from pipeline.inference.classifiers import _FastText
from pipeline.ledger.attempts import DEATHS_OF_A_STEP
from pipeline.runtime import mailbox, worker
from pipeline.runtime.assembly import DocumentReader
from pipeline.runtime.readers import LoadedReader
from pipeline.runtime.worker import load_readers

DEADLY = "the deadly text"
TEXTS = [f"text {number}" for number in range(40)]
CLASSIFIED = {"name": "lang", "classifier": {"kind": "language"}}


class NoMailbox:
    put = SimpleNamespace(remote=lambda _report: None)


class PanicError(BaseException):
    """As a panic of Rust is: not an Exception."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def panic() -> None:
    raise PanicError("index out of bounds")


def fail() -> None:
    raise AssertionError("n_tokens has 3 rows, and p has 4")


def broken_gpu() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def corpus(plain: Corpus, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Two files; the deadly text is in the middle of one of them."""
    monkeypatch.setattr("pipeline.runtime.graph.label_items", in_children)
    plain.write("a", [*TEXTS[:17], DEADLY, *TEXTS[17:]])
    plain.write("b", TEXTS)
    plain.shard_bytes = 1_000_000
    return plain


def markers(corpus: Corpus) -> list[str]:
    keys = [stored.key for stored in corpus.store.list("attempts/")]
    return [key for key in keys if not key.endswith("probe")]


def assert_quarantined(corpus: Corpus) -> None:
    outcome = corpus.run()
    assert outcome.complete and outcome.snapshot == 1
    rows = {name: row["status"] for name, row in corpus.rows().items()}
    assert {name for name, status in rows.items() if status != "ok"} == {"a-17"}
    assert rows["a-17"] == "quarantined"
    assert markers(corpus) == []


def at(
    patch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[[], None]
) -> Callable[..., Any]:
    """Acts where `owner.name` gets the deadly text."""
    own = getattr(owner, name)

    def acting(self: Any, texts: Sequence[str], *others: Any) -> Any:
        if DEADLY in texts:
            act()
        return own(self, texts, *others)

    patch.setattr(owner, name, acting)
    return acting


@pytest.mark.parametrize("act", [die, fail])
def test_a_text_that_ends_the_tokenizer(
    act: Callable[[], None], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, DocumentReader, "text_chunks", act)
    assert_quarantined(corpus)


@pytest.mark.parametrize(
    ("beside", "act"), [([], panic), ([TOPIC], die)], ids=["alone", "beside a question"]
)
def test_a_text_that_ends_a_classifier(
    beside: list[dict[str, Any]],
    act: Callable[[], None],
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus.task, corpus.others = CLASSIFIED, beside
    corpus.model = corpus.model if beside else {}
    at(monkeypatch, _FastText, "probabilities", act)
    assert_quarantined(corpus)


@pytest.mark.parametrize("act", [panic, broken_gpu])
def test_a_text_that_ends_the_model(
    act: Callable[[], None], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = LoadedReader.label

    def acting(self: Any, documents: pa.Table, chunks: Any, *others: Any) -> Any:
        texts = documents["text"].to_pylist()
        if any(text == DEADLY and chunks[row] for row, text in enumerate(texts)):
            act()
        return label(self, documents, chunks, *others)

    monkeypatch.setattr(LoadedReader, "label", acting)
    assert_quarantined(corpus)


def test_a_shard_whose_commit_keeps_killing_its_worker_fails_and_is_named(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_FAULT", "create 1=die")  # between the documents file and the labels
    outcome = corpus.run()
    assert not outcome.complete and outcome.missing_shards == 2
    rows = {"a": 41, "b": 40}
    assert sorted(outcome.failed_shards) == [
        f"{corpus.input}/{name}.jsonl: rows 0 to {count}: the worker died {DEATHS_OF_A_STEP} times "
        "while committing this shard; memory is short, or the output does not answer: use a "
        "machine with more memory"
        for name, count in rows.items()
    ]
    monkeypatch.delenv("ASSAY_FAULT")
    assert corpus.run().complete and not markers(corpus)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each child has no mailbox, and ends itself after a second without a sign of life."""
    node = SimpleNamespace(get_node_id=lambda: "n1")
    # — an earlier test of this process may have started Ray
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.get_runtime_context", lambda: node)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("ray.get", lambda _sent, timeout: [])
    monkeypatch.setattr(mailbox, "REPEAT_S", 0.2)
    post = mailbox.Post(NoMailbox(), stall_limit_s=1.0)
    monkeypatch.setattr(
        stages,
        "load_readers",
        lambda job, asks: load_readers(job, asks=asks, send=mailbox.sender(post)),
    )


@pytest.mark.parametrize(
    ("owner", "name"), [(DocumentReader, "text_chunks"), (_FastText, "probabilities")]
)
def test_a_text_at_which_a_tokenizer_or_a_classifier_hangs(
    owner: type, name: str, corpus: Corpus, watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if owner is _FastText:
        corpus.task, corpus.model = CLASSIFIED, {}
    at(monkeypatch, owner, name, partial(time.sleep, 300))
    began = time.monotonic()
    assert_quarantined(corpus)
    assert time.monotonic() - began < 200


def test_an_error_of_every_row_is_one_clear_error_without_ray(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.write("a", TEXTS)

    def refuse(*_: Any) -> Iterator[Any]:
        raise AssertionError("p has 3 columns")

    monkeypatch.setattr(DocumentReader, "text_chunks", refuse)
    with pytest.raises(WorkerError, match=r"^AssertionError: p has 3 columns$"):
        plain.run()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("load_tokenizer", StorageError("/cache/m: the model cannot be written: the disk is full")),
        ("load", SpecError([])),
        ("load", OSError(28, "No space left on device")),
        ("load_classifier", ModelError("cannot be loaded")),
    ],
)
def test_what_is_loaded_later_and_cannot_be_is_no_fault_of_the_rows(
    error: Exception, name: str, plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.write("a", TEXTS)
    plain.others = [CLASSIFIED] if name == "load_classifier" else []

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(LoadedReader, name, refuse)
    # — without Ray, an error of the constructor is raised as it is
    with pytest.raises((type(error), ModelError)):
        plain.run()
    assert markers(plain) == [] == list(plain.store.list("labels/"))


def test_an_error_outside_of_the_markers_fails_its_shard_alone(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = worker.commit_shard

    def fail_one(store: Any, shard: Any, *others: Any, **options: Any) -> Any:
        if shard.path.endswith("a.jsonl"):
            raise pa.ArrowInvalid("column 2 has 3 rows")
        return commit(store, shard, *others, **options)

    monkeypatch.setattr(worker, "commit_shard", fail_one)
    plain.shard_bytes = 1_000_000
    plain.write("a", TEXTS)
    plain.write("b", TEXTS)
    outcome = plain.run()
    assert not outcome.complete and outcome.missing_shards == 1
    (reason,) = outcome.failed_shards
    assert reason.endswith(
        "a.jsonl: rows 0 to 40: internal error: ArrowInvalid: column 2 has 3 rows"
    )
