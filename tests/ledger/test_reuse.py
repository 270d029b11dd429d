"""Answers that are taken over: each row's own, and only what has use for them is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pytest
from label_tables import label_table

from pipeline.errors import StorageError
from pipeline.ledger.cells import ReusableShard, WorkItem, committed
from pipeline.ledger.keys import documents_key, label_key
from pipeline.ledger.label_files import LabelFile, commit_shard, documents_table, to_parquet
from pipeline.ledger.reuse import AnswerCache, known_status, overlaid
from pipeline.runtime.retries import retry_items
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.shards import ObjectVersion, Piece, Shard
from pipeline.stores.store import Store

LABELS = ("yes", "no")
FP = {"a": "a" * 16, "b": "b" * 16}
SIZE = 3


def shard_at(start: int, etag: str) -> Shard:
    version = ObjectVersion("/a.jsonl", 9, etag, "jsonl", "text", None)
    return Shard(version, Piece(start, start + SIZE, 8, 0, 9))


def documents(texts: Sequence[str]) -> pa.Table:
    return documents_from(RawRow(text, f"d{row}") for row, text in enumerate(texts))


def answers(status: Sequence[str], p: float = 0.75) -> pa.Table:
    """A label file's rows; what is not ok has no answer."""
    answered = np.array([each == "ok" for each in status])
    values = np.where(answered[:, None], [[p, 1 - p]], np.nan).astype(np.float32)
    mass = np.where(answered, 0.5, np.nan).astype(np.float32)
    ids = [f"d{row}" for row in range(len(status))]
    return label_table(ids, values, mass, answered * 4, answered * 1, status, LABELS)


def commit(
    store: Store, shard: Shard, texts: Sequence[str], by_task: dict[str, list[str]], retry: int = 0
) -> None:
    """Commits the shard, with these statuses by task."""
    files = [LabelFile(task, FP[task], answers(s), {}, retry) for task, s in by_task.items()]
    commit_shard(store, shard, documents(texts), files)


def tried_again(
    store: Store, shard: Shard, texts: Sequence[str], tasks: Sequence[str]
) -> list[tuple[WorkItem, dict[str, list[str]]]]:
    """Every work of `--retry-failed`, and each task's statuses if all asked rows fail again."""
    done = committed(store, {task: FP[task] for task in tasks}, [shard.id])
    tried = []
    for work in retry_items(store, [shard], done):
        known = AnswerCache(store).find(work, documents(texts), 0).answers
        status = [answered or "quarantined" for answered in known_status(known, len(texts))]
        rows = {task: overlaid(answers(status), of_task) for task, of_task in known.items()}
        tried.append((work, {t: table.column("status").to_pylist() for t, table in rows.items()}))
    return tried


FAILED_FIRST = ["quarantined", "ok", "ok"]
FAILED_SECOND = ["ok", "error:out of memory, even alone", "ok"]


def test_a_retry_of_one_task_asks_about_no_row_that_only_another_failed_on(store: Store) -> None:
    shard, texts = shard_at(0, "x"), ["one", "two", "three"]
    commit(store, shard, texts, {"a": FAILED_FIRST, "b": FAILED_SECOND})
    first, second = tried_again(store, shard, texts, "ab")
    assert (first[0].tasks, first[1]) == (("a",), {"a": ["quarantined", "ok", "ok"]})
    assert (second[0].tasks, second[1]) == (("b",), {"b": ["ok", "quarantined", "ok"]})


def test_tasks_that_failed_on_the_same_readable_rows_are_tried_again_together(
    store: Store,
) -> None:
    shard, texts = shard_at(0, "x"), ["one", "two", "three"]
    commit(store, shard, texts, {"a": FAILED_SECOND, "b": ["ok", "quarantined", "ok"]})
    ((work, _),) = tried_again(store, shard, texts, "ab")
    assert work.tasks == ("a", "b") and work.retry == 1


def test_a_task_is_numbered_by_its_own_retries(store: Store) -> None:
    shard, texts = shard_at(0, "x"), ["one", "two", "three"]
    commit(store, shard, texts, {"a": FAILED_FIRST, "b": FAILED_SECOND})
    commit(store, shard, texts, {"b": FAILED_SECOND}, retry=1)
    work_items = [work for work, _ in tried_again(store, shard, texts, "ab")]
    assert [(work.tasks, work.retry) for work in work_items] == [(("a",), 1), (("b",), 2)]


@pytest.mark.parametrize("status", [FAILED_FIRST, FAILED_SECOND])
def test_of_equal_texts_that_one_failed_on_is_tried_again_alone(
    store: Store, status: list[str]
) -> None:
    shard, texts = shard_at(0, "x"), ["same", "same", "same"]
    commit(store, shard, texts, {"a": status})
    ((_, statuses),) = tried_again(store, shard, texts, "a")
    assert statuses == {"a": [each if each == "ok" else "quarantined" for each in status]}


def test_a_verdict_on_a_text_holds_in_its_own_shard_alone(store: Store) -> None:
    first, texts = shard_at(0, "x"), ["one", "two", "three"]
    commit(store, first, texts, {"a": FAILED_FIRST})
    reuse = (ReusableShard(first.id, {"a": label_key("a", FP["a"], first.id)}),)
    cache = AnswerCache(store)
    again = WorkItem(first, ("a",), False, reuse=reuse)
    assert known_status(cache.find(again, documents(texts), 0).answers, SIZE) == FAILED_FIRST
    for number in range(1, 30):  # the text is asked about in every other shard
        other = WorkItem(shard_at(number * SIZE, "y"), ("a",), True, reuse=reuse)
        known = known_status(cache.find(other, documents(texts), 0).answers, SIZE)
        assert known == [None, "ok", "ok"]


def test_a_slice_of_a_shard_takes_over_its_own_rows(store: Store) -> None:
    shard, texts = shard_at(0, "x"), ["same", "same", "same"]
    commit(store, shard, texts, {"a": FAILED_SECOND})
    (work,) = retry_items(store, [shard], committed(store, {"a": FP["a"]}, [shard.id]))
    known = AnswerCache(store).find(work, documents(texts[1:]), 1).answers
    assert known_status(known, 2) == [None, "ok"]


class Counting:
    """A store that counts what is read below each top folder."""

    def __init__(self, store: Store) -> None:
        self.url, self.list, self._store = store.url, store.list, store
        self.reads: Counter[str] = Counter()

    def read(self, key: str) -> bytes:
        self.reads[key.partition("/")[0]] += 1
        return self._store.read(key)


def rewritten(
    store: Store, count: int, changed: Callable[[str], str], slice_rows: int = SIZE
) -> tuple[Counter[str], list[str | None]]:
    """What is read to look for a file's changed texts in its `count` earlier shards.

    With the status of each row that is taken over. The old texts are `0`, `1` and so on.
    """
    texts = [str(row) for row in range(count * SIZE)]
    old = [shard_at(start, "old") for start in range(0, len(texts), SIZE)]
    for shard in old:
        start = shard.piece.start_row
        commit(store, shard, texts[start : start + SIZE], dict.fromkeys("ab", ["ok"] * SIZE))
    counting, status = Counting(store), list[str | None]()
    labels = [{t: label_key(t, FP[t], shard.id) for t in "ab"} for shard in old]
    earlier = tuple(ReusableShard(shard.id, keys) for shard, keys in zip(old, labels, strict=True))
    answers = AnswerCache(counting)  # type: ignore[arg-type]  # reads alone
    new = [changed(text) for text in texts]
    for start in range(0, len(new), SIZE):
        work = WorkItem(shard_at(start, "new"), ("a", "b"), documents=True, reuse=earlier)
        for row in range(0, SIZE, slice_rows):
            slice = documents(new[start + row : start + row + slice_rows])
            status += known_status(answers.find(work, slice, row).answers, slice.num_rows)
    return counting.reads, status


@pytest.mark.parametrize("count", [3, 20])
def test_a_file_with_one_new_text_has_each_earlier_file_read_once(store: Store, count: int) -> None:
    reads, status = rewritten(store, count, lambda text: "new" if text == "4" else text)
    assert [row for row, answered in enumerate(status) if answered is None] == [4]
    assert reads == {"documents": count, "labels": 2 * count}


def test_of_a_file_with_new_texts_alone_no_answers_are_read(store: Store) -> None:
    reads, status = rewritten(store, 3, lambda text: f"new {text}")
    assert set(status) == {None} and reads == {"documents": 3}


def test_rows_without_text_have_no_answers_looked_up(store: Store) -> None:
    old, texts = shard_at(0, "old"), [" ", "one", ""]
    commit(store, old, texts, {"a": ["empty", "ok", "empty"]})
    labels = {"a": label_key("a", FP["a"], old.id)}
    work = WorkItem(
        shard_at(0, "new"), ("a",), documents=True, reuse=(ReusableShard(old.id, labels),)
    )
    counting = Counting(store)
    answers = AnswerCache(counting)  # type: ignore[arg-type]  # reads alone
    assert answers.find(work, documents(["", "two", " "]), 0).answers == {}
    assert counting.reads == {"documents": 1}


def test_the_slices_of_a_shard_share_what_is_read(store: Store) -> None:
    reads, status = rewritten(store, 2, str, slice_rows=1)
    assert set(status) == {"ok"} and reads["labels"] == 2 * 2


def test_a_damaged_documents_file_of_the_shard_itself_is_named(store: Store) -> None:
    shard = shard_at(0, "x")
    commit(store, shard, ["one", "two", "three"], {"a": FAILED_FIRST})
    (work,) = retry_items(store, [shard], committed(store, {"a": FP["a"]}, [shard.id]))
    store.delete([documents_key(shard.id)])
    longer = to_parquet(documents_table(documents(["one", "two", "three", "four"])), {})
    store.create(documents_key(shard.id), longer)
    with pytest.raises(StorageError, match=r"has 4 rows of a shard of 3; `assay verify`"):
        AnswerCache(store).find(work, documents(["one", "two", "three"]), 0)
