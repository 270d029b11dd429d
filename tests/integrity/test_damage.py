"""No damage of a published file changes an answer silently: it is named, or repaired.

Every kind of file is damaged in every way, with and without a new file time, and then read,
verified and run again, as a user does who follows the advice of each error.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from finished import (
    Corpus,
    commit_all,
    exchanged,
    finish,
    read_parquet,
    rewrite,
    sealed_parquet,
    toy_fingerprints,
)
from memory_store import MemoryStore, Recording

from pipeline.errors import StorageError
from pipeline.integrity.verify import verify
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.keys import label_key, snapshot_key
from pipeline.ledger.label_files import metadata_of, to_parquet
from pipeline.ledger.snapshots import contents, last_contents, snapshot_numbers
from pipeline.stores.local import LocalStore
from pipeline.stores.store import Store

FP = {task: fingerprint.id for task, fingerprint in toy_fingerprints().items()}


class Output:
    """An output with two snapshots of two wordings, and what reads it and brings it up to date."""

    def __init__(self, store: Store, corpus: Corpus) -> None:
        self.store, self.corpus = store, corpus

    def run(self, version: str = "1") -> int:
        shards = self.corpus.shards(self.store)
        return finish(self.store, shards, toy_fingerprints(version))

    def rows(self) -> pa.Table:
        return open_labels(self.store.url).to_table()

    def damages(self) -> list[str]:
        result = verify(self.store, last_contents(self.store, "job"), self.corpus.cache_dir, {})
        return [str(damage) for damage in result.damages]

    def key(self, folder: str, number: int = 0) -> str:
        keys = [stored.key for stored in self.store.list(folder)]
        return keys[number % len(keys)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Output:
    folder = tmp_path_factory.mktemp("whole")
    output = Output(LocalStore(folder / "out"), Corpus(folder / "in", folder / "cache"))
    output.corpus.write()
    assert (output.run("0"), output.run("1")) == (1, 2)
    return output


@pytest.fixture
def output(whole: Output, store: LocalStore) -> Iterator[Output]:
    """A copy of the output, of the same corpus."""
    shutil.copytree(whole.store.url, store.root)
    yield Output(store, whole.corpus)
    (whole.corpus.folder / "3.jsonl").unlink(missing_ok=True)


Change = Callable[[Output, str, random.Random], bytes | None]


def flipped(output: Output, key: str, source: random.Random) -> bytes:
    data = bytearray(output.store.read(key))
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data)


def cut_off(output: Output, key: str, source: random.Random) -> bytes:
    data = output.store.read(key)
    return data[: source.randrange(len(data))]


def neighbour(output: Output, key: str, source: random.Random) -> bytes:
    """Another file of the same folder: of another shard, or of an older wording."""
    folder = "/".join(key.split("/")[:2]) + "/" if key.startswith("labels") else key.split("/")[0]
    others = [each.key for each in output.store.list(folder) if each.key != key]
    suffix = key.rpartition(".")[2]
    return output.store.read(source.choice([k for k in others if k.endswith(suffix)]))


def deleted(output: Output, key: str, source: random.Random) -> None:
    return None


# With the file's time: a damage of the disk keeps it, and another program does not.
DAMAGES: list[Any] = [
    (flipped, True),
    pytest.param(flipped, False, marks=pytest.mark.slow),
    (cut_off, True),
    (neighbour, False),
    (deleted, False),
]
FOLDERS = [
    "documents/",
    f"labels/toxic/{FP['toxic']}/",
    "labels/topic/",  # of both wordings
    "snapshots/00000002",
    "inputs/",
    "specs/",
]


@pytest.mark.parametrize(("damage", "keeps_time"), DAMAGES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_any_damage_is_named_or_repaired_and_the_advice_repairs_it(
    folder: str, damage: Change, keeps_time: bool, output: Output
) -> None:
    if folder == "inputs/" and damage is neighbour:
        pytest.skip("there is one file")
    truth = output.rows()
    assert isinstance(output.store, LocalStore)
    source = random.Random(f"{folder} {damage.__name__}")
    key = output.key(folder, source.randrange(100))
    is_current = key in {*contents(output.store, 2).files["key"].to_pylist(), snapshot_key(2)}
    path = output.store.root / key
    before, data = path.stat(), damage(output, key, source)
    path.unlink()
    if data is not None:
        path.write_bytes(data)
        if keeps_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if key != snapshot_key(2) or data is not None:  # — else nothing shows that it was there
        check_reading(output, key, truth, is_current)
    follow_advice(output)
    assert output.rows().equals(truth)
    assert output.damages() == [], key


def check_reading(output: Output, key: str, truth: pa.Table, must_be_named: bool) -> None:
    """Readers give the right rows or name the file."""
    try:
        assert output.rows().equals(truth) and not must_be_named
    except StorageError as error:
        assert key in str(error)
    try:
        named = output.damages()
        assert all(line.startswith(key) for line in named) and (named or not must_be_named)
    except StorageError as error:  # of the snapshot itself
        assert key in str(error) and key.startswith("snapshots/")


def follow_advice(output: Output) -> None:
    """Runs, and deletes what the run and `verify` name."""
    for _ in range(3):
        try:
            output.run()
            lines = [f"{output.store.url}/{line}" for line in output.damages()]
        except StorageError as error:
            lines = str(error).split("\n")
        if not lines:
            return
        for line in lines:
            assert "delete" in line
            named = re.match(rf"{re.escape(output.store.url)}/([\w/.]+): ", line)
            assert named is not None, line
            output.store.delete([named[1]])
    pytest.fail(f"the advice does not help: {lines}")


def swap(store: Store, first: str, second: str) -> None:
    contents = store.read(second), store.read(first)
    for key, data in zip((first, second), contents, strict=True):
        rewrite(store, key, data)


def reseal(output: Output, key: str) -> None:
    """As assay itself would write other answers."""
    rewrite(output.store, key, sealed_parquet(exchanged(read_parquet(output.store, key))))


def take_another(output: Output, key: str) -> None:
    """The answers of another shard."""
    swap(output.store, key, output.key(f"labels/toxic/{FP['toxic']}", 1))


def take_older(output: Output, key: str) -> None:
    """The answers to an older wording."""
    sid = key.rpartition("/")[2][:32]
    swap(output.store, key, label_key("toxic", toy_fingerprints("0")["toxic"].id, sid))


@pytest.mark.parametrize(
    ("change", "has_more"),
    [
        (reseal, False),
        (take_older, True),
        (take_another, True),
        (lambda output, key: rewrite(output.store, key, b"PAR1"), False),
    ],
    ids=["other answers", "an older wording", "another shard", "too short"],
)
def test_a_run_publishes_no_file_that_changed_and_names_it(
    change: Callable[[Output, str], None], has_more: bool, output: Output
) -> None:
    truth, key = output.rows(), output.key(f"labels/toxic/{FP['toxic']}/")
    change(output, key)
    if has_more:
        (output.corpus.folder / "3.jsonl").write_text('{"id": "x", "text": "a new one"}\n')
    for _ in range(2):
        with pytest.raises(StorageError) as named:
            output.run()
        (line,) = (line for line in str(named.value).split("\n") if f"/{key}: " in line)
        assert line.endswith("delete this file, then `assay run` makes it again")
    assert snapshot_numbers(output.store) == [2, 1]
    assert any(line.startswith(key) for line in output.damages())
    follow_advice(output)
    assert (
        output.rows().slice(0, len(truth)).equals(truth)
        and len(output.rows()) - len(truth) == has_more
    )


@pytest.mark.parametrize("damage", [flipped, cut_off])
def test_a_file_that_was_damaged_before_it_was_published_is_never_published(
    damage: Change, store: LocalStore, toy_corpus: Corpus
) -> None:
    """A run ended before it published; the next one made none of the files."""
    output = Output(store, toy_corpus)
    commit_all(store, toy_corpus.shards(store), toy_fingerprints())
    for folder in ("documents/", "labels/topic/"):
        key = output.key(folder, 3)
        data = damage(output, key, random.Random(1))
        assert data is not None
        rewrite(store, key, data)
        with pytest.raises(StorageError, match=f"{key}: .* delete this file"):
            output.run()
        assert snapshot_numbers(store) == []
        store.delete([key])
    assert output.run() == 1 and output.damages() == []


def retried(output: Output) -> str:
    """The key of a second try of a label file, which the snapshot 3 names."""
    key = output.key(f"labels/toxic/{FP['toxic']}/")
    retry = label_key("toxic", FP["toxic"], key.rpartition("/")[2][:32], 1)
    answers = read_parquet(output.store, key)
    again = to_parquet(answers, metadata_of(answers) | {"key": retry, "since": "2"})
    output.store.create(retry, again)
    assert output.run() == 3
    return retry


def test_without_its_retry_a_first_try_is_not_published_again(output: Output) -> None:
    retry = retried(output)
    data = output.store.read(retry)
    output.store.delete([retry])
    with pytest.raises(StorageError, match=f"{retry}: .* does not exist; .*run --retry-failed`"):
        output.run()
    output.store.create(retry, data)
    assert output.run() == 3 or output.damages() == []  # a copy may have another file time
    rewrite(output.store, retry, data[:-1])
    with pytest.raises(StorageError, match=f"{retry}: .* changed .*run --retry-failed`"):
        output.run()


@pytest.mark.parametrize("of_a_bucket", [True, False], ids=["of a bucket", "of a disk"])
def test_a_copy_of_an_output_is_brought_up_to_date_and_damage_in_it_is_named(
    of_a_bucket: bool, output: Output, tmp_path: Path
) -> None:
    copies: list[Store] = [MemoryStore() if of_a_bucket else LocalStore(tmp_path / "copy")]
    for each in output.store.list(""):
        copies[0].create(each.key, output.store.read(each.key))
    if not of_a_bucket:  # — the etags of another disk do not depend on the content
        assert (copied := Output(copies[0], output.corpus)).rows().equals(output.rows())
        assert copied.damages() == []
    copy = Output(Recording(copies[0]), output.corpus)
    assert copy.run() == 3, "the etags are others, and so are those of the new snapshot"
    copy.store.read_keys.clear()
    assert copy.run() == 3
    assert not any(key.startswith(("labels", "documents")) for key in copy.store.read_keys)
    key = copy.key(f"labels/topic/{FP['topic']}/")
    rewrite(copies[0], key, copies[0].read(key)[:-1])
    with pytest.raises(StorageError, match=key):
        copy.run()
