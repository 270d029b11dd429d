"""Runs of an output with damaged files: none is published, none fails a shard that has its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from changing_corpus import TOPIC, Corpus, numbered
from finished import rewrite

from pipeline.stores.store import Store

Damage = Callable[[Store, str], None]


def flip(store: Store, key: str) -> None:
    data = bytearray(store.read(key))
    data[len(data) // 3] ^= 1
    rewrite(store, key, bytes(data))


def empty(store: Store, key: str) -> None:
    rewrite(store, key, b"")


@pytest.fixture
def whole(plain: Corpus) -> Corpus:
    """A corpus whose files are one shard each."""
    plain.shard_bytes = 100_000
    return plain


def only_key(corpus: Corpus, folder: str) -> str:
    (key,) = (stored.key for stored in corpus.store.list(folder))
    return key


@pytest.mark.parametrize(("damage", "folder"), [(flip, "documents/"), (empty, "labels/toxic/")])
def test_a_damaged_source_of_reuse_costs_time_and_fails_no_shard(
    damage: Damage, folder: str, whole: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    whole.write("a", numbered("a", 6))
    whole.run()
    key = only_key(whole, folder)
    whole.delete("a")
    whole.write("b", numbered("a", 6))  # equal texts, in a shard that has no file yet
    damage(whole.store, key)
    outcome = whole.run()
    assert (outcome.complete, outcome.snapshot, outcome.tally.failures) == (True, 2, {})
    assert f"{key}: its content was changed" in caplog.text
    assert {text for _, text in whole.asked} == {*numbered("a", 6)}
    whole.check()
    whole.verify()


def test_a_damaged_documents_file_fails_its_shard_alone_and_is_read_again_once_it_is_deleted(
    whole: Corpus,
) -> None:
    whole.write("a", numbered("a", 6))
    whole.run()
    key = only_key(whole, "documents/")
    flip(whole.store, key)
    whole.others = [TOPIC]
    whole.write("b", numbered("b", 2))
    outcome = whole.run()
    assert not outcome.complete and outcome.snapshot is None
    (failed,) = outcome.failed_shards
    assert f"{key}: its content was changed" in failed and "delete this file" in failed
    whole.store.delete([key])
    assert whole.run().snapshot == 2
    assert {*whole.asked} == {("topic", text) for text in numbered("a", 6)}
    whole.check()
    whole.verify()
