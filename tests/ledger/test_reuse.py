"""Answers that are reused: each row's own, and only what has use for them is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from finished import toy_spec
from hypothesis import given
from hypothesis import strategies as st
from label_tables import label_rows, toy_shard
from memory_store import MemoryStore, Recording

from pipeline.errors import StorageError
from pipeline.ledger.cells import Source, WorkItem, committed, unfinished
from pipeline.ledger.columns import STAGE, with_column
from pipeline.ledger.cuts import Cuts
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import LabelFile, commit_shard, documents_table, to_parquet
from pipeline.ledger.reuse import StoredAnswers
from pipeline.runtime.job import Job, make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import Plan, retries
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.shards import Shard
from pipeline.spec.parse import spec_of
from pipeline.stores.store import Store

LABELS = ("yes", "no")
FP = {"a": "a" * 16, "b": "b" * 16}
SOME = "9" * 16  # a version of task `a` with a condition
SIZE = 3


@pytest.fixture(scope="module")
def job(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job without stages."""
    folder = tmp_path_factory.mktemp("job")
    tasks = [{"name": task, "question": "?", "labels": list(LABELS)} for task in FP]
    model = {"path": str(model_folder), "dtype": "float32"}
    spec = spec_of(toy_spec(folder, tasks=tasks, model=model))
    return make_job(spec, place(spec.model, this_machine()), folder / "cache")


def shard_at(start: int, etag: str, rows: int = SIZE) -> Shard:
    return toy_shard(start, rows, etag=etag)


def documents(texts: Sequence[str]) -> pa.Table:
    return documents_from(RawRow(text, f"d{row}") for row, text in enumerate(texts))


def answers(status: Sequence[str], p: float = 0.75) -> pa.StructArray:
    """A label file's rows; what is not ok has no answer. `n_tokens` has the number of the row."""
    answered = np.array([each == "ok" for each in status])
    values = np.where(answered[:, None], [[p, 1 - p]], np.nan).astype(np.float32)
    return label_rows(values, LABELS, n_tokens=np.arange(len(status)), status=status)


def commit(
    store: Store, shard: Shard, texts: Sequence[str], by_task: dict[str, list[str]], retry: int = 0
) -> None:
    """Commits the shard, with these statuses by task."""
    files = [
        LabelFile(task, FP[task], shard.id, answers(status), {}, retry)
        for task, status in by_task.items()
    ]
    commit_shard(store, shard, documents(texts), files)


def commit_some(store: Store, shard: Shard, texts: Sequence[str], rows: Collection[int]) -> Source:
    """Commits another version of task `a`, which is asked about these rows of the shard."""
    status = ["ok" if row in rows else "skipped" for row in range(len(texts))]
    file = LabelFile("a", SOME, shard.id, answers(status), {})
    commit_shard(store, shard, documents(texts), [file])
    return Source("a", SOME, shard.id)


def source_of(shard: Shard, task: str = "a", retry: int = 0) -> Source:
    return Source(task, FP[task], shard.id, retry)


def answered_rows(
    store: Store, shard: Shard, texts: Sequence[str], *sources: Source, is_retry: bool = False
) -> tuple[list[str | None], int]:
    """The status of the answer of each row, None without one; and the rows of other shards."""
    rows, reused = rows_of(store, shard, texts, *sources, is_retry=is_retry)
    status = [None] * len(texts) if rows is None else pc.struct_field(rows, "status").to_pylist()
    return status, reused


def rows_of(
    store: Store, shard: Shard, texts: Sequence[str], *sources: Source, is_retry: bool = False
) -> tuple[pa.StructArray | None, int]:
    return StoredAnswers(store, shard, documents(texts), is_retry=is_retry).find(sources)


def retried(
    store: Store, job: Job, shard: Shard, texts: Sequence[str], tasks: Sequence[str]
) -> tuple[WorkItem, dict[str, list[int]]]:
    """The work of `--retry-failed`, and the rows about which it asks each task."""
    done = committed(store, {task: FP[task] for task in tasks}, [shard.id])
    (work,) = retries(job, store, Plan(Cuts((shard,), {}), done, ()))
    asked = {}
    for task in work.tasks:
        source = done.source(task, shard.id)
        assert source is not None
        status, _ = answered_rows(store, shard, texts, source, is_retry=True)
        asked[task] = [row for row, each in enumerate(status) if each is None]
    return work, asked


OK = ["ok"] * SIZE
FAILED_FIRST = ["quarantined", "ok", "ok"]
FAILED_SECOND = ["ok", "error:out of memory, even alone", "ok"]
TEXTS = ["one", "two", "three"]


@pytest.mark.parametrize("texts", [TEXTS, ["same"] * SIZE])
@pytest.mark.parametrize("a", [OK, FAILED_FIRST, FAILED_SECOND])
@pytest.mark.parametrize("b", [FAILED_FIRST, FAILED_SECOND])
def test_a_retry_asks_each_task_about_exactly_the_rows_that_it_failed_on(
    texts: list[str], a: list[str], b: list[str], store: Store, job: Job
) -> None:
    """Not about rows that only another task failed on, or with the text of a failed row."""
    shard = shard_at(0, "x")
    commit(store, shard, texts, {"a": a, "b": b})
    work, asked = retried(store, job, shard, texts, "ab")
    failed = {task: [n for n, s in enumerate(of) if s != "ok"] for task, of in (("a", a), ("b", b))}
    assert asked == {task: rows for task, rows in failed.items() if rows}
    assert (work.tasks, work.retry, work.documents) == (tuple(asked), 1, False)


def test_a_retry_has_a_number_above_those_of_all_its_tasks(store: Store, job: Job) -> None:
    shard = shard_at(0, "x")
    commit(store, shard, TEXTS, {"a": FAILED_FIRST, "b": FAILED_SECOND})
    commit(store, shard, TEXTS, {"b": FAILED_SECOND}, retry=1)
    work, asked = retried(store, job, shard, TEXTS, "ab")
    assert (work.tasks, work.retry, asked) == (("a", "b"), 2, {"a": [0], "b": [1]})
    # — what a run that was killed did not commit is left
    commit(store, shard, TEXTS, {"a": OK}, retry=2)
    left = unfinished([work], committed(store, FP, [shard.id]))
    assert left == [replace(work, tasks=("b",))]
    commit(store, shard, TEXTS, {"b": OK}, retry=2)
    assert unfinished([work], committed(store, FP, [shard.id])) == []


def test_a_quarantine_holds_in_its_own_shard_alone_and_an_error_is_an_answer_nowhere(
    store: Store,
) -> None:
    first, other = shard_at(0, "x"), shard_at(SIZE, "y")
    commit(store, first, TEXTS, {"a": FAILED_FIRST, "b": FAILED_SECOND})
    assert answered_rows(store, first, TEXTS, source_of(first)) == (FAILED_FIRST, 0)
    assert answered_rows(store, other, TEXTS, source_of(first)) == ([None, "ok", "ok"], 2)
    for asking in (first, other):
        assert answered_rows(store, asking, TEXTS, source_of(first, "b"))[0] == ["ok", None, "ok"]


def numbers(rows: pa.StructArray | None) -> list[int | None]:
    """Which row of its label file each answer is."""
    assert rows is not None
    values: list[int | None] = rows.field("n_tokens").to_pylist()
    return [n if valid else None for n, valid in zip(values, rows.is_valid(), strict=True)]


@given(rows=st.sets(st.integers(0, 5), min_size=1), start=st.integers(0, 10**6))
def test_answers_are_found_by_row_in_their_own_shard(rows: set[int], start: int) -> None:
    """All texts are equal: a text does not identify its row."""
    store, shard, texts = MemoryStore(), shard_at(start, "x", rows=6), ["same"] * 6
    part = commit_some(store, shard, texts, rows)
    own, _ = rows_of(store, shard, texts, part)
    assert numbers(own) == [row if row in rows else None for row in range(6)]


@given(rows=st.sets(st.integers(0, 5), min_size=1), asking=st.permutations([*range(6)] * 2))
def test_answers_are_found_by_text_in_another_shard(rows: set[int], asking: list[int]) -> None:
    store, texts = MemoryStore(), [f"text {row}" for row in range(6)]
    part = commit_some(store, shard_at(600, "x", rows=6), texts, rows)
    other = shard_at(0, "y", rows=12)
    answered, reused = rows_of(store, other, [texts[row] for row in asking], part)
    assert numbers(answered) == [row if row in rows else None for row in asking]
    assert reused == 2 * len(rows)


def test_of_several_sources_the_first_with_an_answer_counts(store: Store) -> None:
    texts = ["one", "two", "three", "four"]
    first, second = shard_at(0, "x", rows=4), shard_at(4, "x", rows=4)
    commit(store, first, texts, {"a": ["error:x", "ok", "error:x", "error:x"]})
    by_other_rows = ["two", "one", "new", "three"]
    commit(store, second, by_other_rows, {"a": ["ok", "ok", "ok", "ok"]})
    asking = shard_at(8, "x", rows=4)
    rows, reused = rows_of(store, asking, texts, source_of(first), source_of(second))
    assert numbers(rows) == [1, 1, 3, None] and reused == 1 + 2
    own = commit_some(store, asking, texts, [1, 3])
    rows, reused = rows_of(store, asking, texts, own, source_of(first), source_of(second))
    assert numbers(rows) == [1, 1, 3, 3] and reused == 2


def test_what_was_added_to_answers_is_not_reused(store: Store) -> None:
    """Such as the stage that decided: it depends on the version that asks."""
    shard = shard_at(0, "x")
    staged = with_column(answers(OK), STAGE, pa.array([1, 2, 1], pa.int8()))
    commit_shard(store, shard, documents(TEXTS), [LabelFile("a", FP["a"], shard.id, staged, {})])
    rows, _ = rows_of(store, shard, TEXTS, source_of(shard))
    assert rows is not None
    assert {STAGE, "doc_id"}.isdisjoint(field.name for field in rows.type)


def rewritten(
    store: Store, count: int, changed: Callable[[str], str]
) -> tuple[Counter[str], list[str | None], int]:
    """What is read to look for a file's changed texts in its `count` earlier shards.

    With the status of each row that is reused, and their number. The old texts are `0`, `1` and so
    on.
    """
    texts = [str(row) for row in range(count * SIZE)]
    old = [shard_at(start, "old") for start in range(0, len(texts), SIZE)]
    for shard in old:
        start = shard.piece.start_row
        commit(store, shard, texts[start : start + SIZE], {"a": OK})
    recording, new = Recording(store), shard_at(0, "new", rows=len(texts))
    status, reused = answered_rows(
        recording, new, [changed(text) for text in texts], *map(source_of, old)
    )
    reads = Counter(key.partition("/")[0] for key in recording.read_keys)
    return reads, status, reused


@pytest.mark.parametrize("count", [3, 20])
def test_a_file_with_one_new_text_has_each_earlier_file_read_once(store: Store, count: int) -> None:
    reads, status, reused = rewritten(store, count, lambda text: "new" if text == "4" else text)
    assert [row for row, answered in enumerate(status) if answered is None] == [4]
    assert reads == {"documents": count, "labels": count}
    assert reused == count * SIZE - 1


def test_rows_without_text_have_no_answers_and_where_no_row_has_text_no_source_is_read(
    store: Store,
) -> None:
    reads, status, _ = rewritten(store, 2, lambda text: " " * int(text))
    assert set(status) == {None} and reads == {}
    store = MemoryStore()
    old = shard_at(0, "old")
    commit(store, old, [" ", "one", ""], {"a": ["ok", "ok", "ok"]})  # as no run does
    answered = answered_rows(store, shard_at(0, "new"), ["", "one", " "], source_of(old))
    assert answered == ([None, "ok", None], 1)


@pytest.mark.parametrize("own", [True, False])
def test_a_damaged_documents_file_is_named(store: Store, own: bool) -> None:
    shard = shard_at(0, "x")
    commit(store, shard, TEXTS, {"a": FAILED_FIRST})
    store.delete([documents_key(shard.id)])
    longer = [*TEXTS, "four"]
    store.create(documents_key(shard.id), to_parquet(documents_table(documents(longer)), {}))
    asking = shard if own else shard_at(9, "y", rows=4)
    with pytest.raises(
        StorageError, match="has other rows than the 4 of its documents file; `assay verify`"
    ):
        answered_rows(store, asking, longer, source_of(shard))
