"""The log of cuts: an object is cut once, and every later run reads its cut."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data_fixtures import parquet_bytes
from memory_store import Recording
from whole_shards import all_documents

from pipeline.errors import SpecError, StorageError
from pipeline.ledger import cuts as cuts_module
from pipeline.ledger.cuts import CutLog, load_or_cut
from pipeline.ledger.keys import cuts_key
from pipeline.ledger.label_files import to_parquet
from pipeline.ledger.numbered import CHECKPOINT
from pipeline.sources.shards import Shard
from pipeline.sources.source import InputObject, cut
from pipeline.spec.schema import Columns
from pipeline.stores.local import LocalStore

Write = Callable[[str, bytes], InputObject]
LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(40))
ENTRY = "inputs/00000001.parquet"
TEXT = Columns("text", None)


@pytest.fixture
def objects(write: Write) -> list[InputObject]:
    return [write("a.jsonl", LINES), write("b.jsonl", LINES[:-200]), write("empty.jsonl", b"")]


def test_the_shards_of_all_objects_come_in_order_and_what_is_not_kept_writes_nothing(
    store: LocalStore, objects: list[InputObject]
) -> None:
    first = load_or_cut(store, objects, TEXT, 17, keep=False)
    assert list(first.shards) == [shard for each in objects for shard in cut(each, TEXT, 17)]
    assert not store.root.exists()
    kept = load_or_cut(store, objects[:2], TEXT, 3000)
    assert list(kept.shards) == [shard for each in objects[:2] for shard in cut(each, TEXT, 3000)]
    both = load_or_cut(store, objects, TEXT, 17, keep=False)
    assert both.shards[: len(kept.shards)] == kept.shards
    assert [stored.key for stored in store.list("")] == [ENTRY]


def test_what_was_cut_is_not_opened_again_even_for_another_target_or_beside_a_new_object(
    store: LocalStore, objects: list[InputObject], write: Write
) -> None:
    first = load_or_cut(store, objects, TEXT, 3000)
    for input_object in objects:
        Path(input_object.path).unlink()
    assert load_or_cut(store, objects, TEXT, 10**6) == first
    # — a new object alone is cut
    new = write("c.jsonl", LINES[:100])
    both = load_or_cut(store, [*objects, new], TEXT, 3000).shards
    assert both[: len(first.shards)] == first.shards
    assert {shard.path for shard in both[len(first.shards) :]} == {new.path}


def test_large_text_is_cut_by_the_nodes_of_a_cluster_and_tables_are_not(
    store: LocalStore, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cuts are the same, and so are a file that cannot be read and one without the columns."""
    rows = parquet_bytes(pa.table({"text": ["a", "b"], "id": [1, 2]}))
    whole = [write(f"{n}.jsonl", b'{"text": "%d", "id": 1}\n' % n * 9) for n in range(3)]
    torn = write("torn.jsonl.gz", gzip.compress(LINES)[:-9])
    objects = [*whole, torn, write("b.jsonl", LINES), write("c.parquet", rows)]
    elsewhere: list[str] = []

    def by_nodes(source: InputObject, *others: Any, **options: Any) -> list[Shard]:
        elsewhere.append(source.path)
        return cut(source, *others, **options)

    columns = Columns("text", "id")
    local = load_or_cut(store, objects, columns, 100, keep=False, by_nodes=by_nodes)
    assert not elsewhere  # — so little text
    monkeypatch.setattr(cuts_module, "MOST_TEXT_BYTES", 0)
    assert load_or_cut(store, objects, columns, 100, by_nodes=by_nodes) == local
    assert {*elsewhere} == {each.path for each in objects[:-1]} and len(local.unreadable) == 1
    elsewhere.clear()
    assert load_or_cut(store, whole, columns, 100, by_nodes=by_nodes).shards and not elsewhere


WITHOUT = {
    "b.jsonl": b'{"text": "no id"}\n',
    "b.json.gz": gzip.compress(b'{"id": 1}\n'),
    "b.csv": b"id\n1\n",
    "b.tsv": b"text\nno id\n",
    "b.ndjson": b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_file_may_lack_columns_that_another_has_and_one_line_says_so(
    store: LocalStore, write: Write, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    columns = Columns("text", "id")
    lacks, has = write(name, WITHOUT[name]), write("c.jsonl", b'{"text": "t", "id": 7}\n')
    cuts = load_or_cut(store, [lacks, has], columns, 3000)
    rows = [row for shard in cuts.shards for row in all_documents(shard).to_pylist()]
    of_has = [row for row in rows if row["doc_id"] == "7"]
    assert [row["status"] for row in of_has] == ["ok"] and len(rows) == 2
    [record] = caplog.records
    assert "1 files are read without columns that others have: input." in record.getMessage()
    # — a later run has one that has them
    more = write("d.jsonl", b'{"text": "more"}\n')
    assert len(load_or_cut(store, [lacks, has, more], columns, 3000).shards) == 3


@pytest.mark.parametrize("others", [[], ["empty.jsonl"], ["broken.jsonl.gz"]])
@pytest.mark.parametrize("name", WITHOUT)
def test_columns_that_no_file_has_are_a_problem_of_the_spec_and_nothing_is_cut(
    store: LocalStore, write: Write, name: str, others: list[str]
) -> None:
    objects = [write(name, WITHOUT[name]), *(write(other, b"") for other in others)]
    for _ in range(2):
        with pytest.raises(SpecError, match=r"^input\.(text|id|path): "):
            load_or_cut(store, objects, Columns("text", "id"), 3000)
    assert not store.root.exists()


def test_of_two_that_cut_at_once_the_first_stands_and_the_rest_is_added(
    store: LocalStore, objects: list[InputObject]
) -> None:
    first = load_or_cut(store, objects[:1], TEXT, 3000)
    blind = Recording(store)
    blind.list = lambda _prefix: iter(())  # does not show yet what another run has created
    late = load_or_cut(blind, objects, TEXT, 10**6)
    assert late.shards[: len(first.shards)] == first.shards
    assert load_or_cut(store, objects, TEXT, 17) == late


@pytest.mark.parametrize(
    ("changed", "id"), [({"etag": "x"}, None), ({"size_bytes": 1}, None), ({}, "id")]
)
def test_another_version_or_column_is_cut_again_and_the_earlier_keeps_its_shards(
    store: LocalStore, objects: list[InputObject], changed: dict[str, Any], id: str | None
) -> None:
    Path(objects[0].path).write_bytes(b'{"text": "t", "id": 1}\n')
    first = load_or_cut(store, objects, TEXT, 3000)
    other = replace(objects[0], **changed)
    second = load_or_cut(store, [other], Columns("text", id), 3000)
    assert not {shard.id for shard in second.shards} & {shard.id for shard in first.shards}
    assert load_or_cut(store, objects, TEXT, 3000).shards == first.shards
    # — in another format, the file is read again
    with pytest.raises(StorageError, match="cannot be read"):
        load_or_cut(store, [replace(objects[0], format="jsonl.gz")], TEXT, 3000)


def test_a_log_of_many_runs_is_read_from_its_last_checkpoint(
    store: LocalStore, write: Write
) -> None:
    objects = [write(f"{n:02d}.jsonl", LINES[: 15 * (1 + n)]) for n in range(CHECKPOINT + 4)]
    for known in range(1, len(objects) + 1):  # one run a night, each with one more file
        cuts = load_or_cut(store, objects[:known], TEXT, 200)
    reading = Recording(store)
    assert load_or_cut(reading, objects, TEXT, 1) == cuts
    assert sorted(reading.read_keys) == [f"inputs/{n:08d}.parquet" for n in range(32, 37)]
    # — two that append at once: the one that comes late takes in what the other wrote
    first, late = CutLog(store), CutLog(store)
    new = [write(f"x{n}.jsonl", LINES) for n in range(2)]
    for log, item in zip((first, late), new, strict=True):
        log.append({item.version(TEXT): cut(item, TEXT, 3000)})
    assert late.cuts == CutLog(store).cuts and first.cuts.items() < late.cuts.items()
    # — without the checkpoint only what its own run cut is lost
    store.delete([cuts_key(CHECKPOINT)])
    assert late.cuts.keys() - CutLog(store).cuts.keys() == {objects[CHECKPOINT - 1].version(TEXT)}


def test_no_rows_at_all_is_an_error_of_the_spec(store: LocalStore, write: Write) -> None:
    with pytest.raises(SpecError, match="the file has no row"):
        load_or_cut(store, [write("empty.jsonl", b"\n")], TEXT, 3000)


@pytest.mark.parametrize("broken", [b"{", to_parquet(pa.table({"path": ["a"]}), {})])
def test_a_broken_entry_is_named(
    store: LocalStore, objects: list[InputObject], broken: bytes
) -> None:
    store.create(ENTRY, broken)
    with pytest.raises(StorageError, match=f"{ENTRY}: is not a list of shards"):
        load_or_cut(store, objects, TEXT, 3000)


def test_an_object_that_cannot_be_read_is_left_out_and_tried_again(
    store: LocalStore, objects: list[InputObject], write: Write
) -> None:
    whole = gzip.compress(LINES)
    broken = write("broken.jsonl.gz", whole[:-30])
    cuts = load_or_cut(store, [*objects, broken], TEXT, 3000)
    assert {shard.path for shard in cuts.shards} == {each.path for each in objects[:2]}
    (reason,) = cuts.unreadable
    assert reason.startswith(f"{broken.path}: cannot be read: ")
    assert load_or_cut(store, [*objects, broken], TEXT, 3000) == cuts
    mended = write("broken.jsonl.gz", whole)
    again = load_or_cut(store, [*objects, mended], TEXT, 3000)
    assert not again.unreadable
    assert sum(shard.rows for shard in again.shards if shard.path == mended.path) == 40
    # — a file that was deleted after it was listed, too
    deleted = write("gone.jsonl", LINES)
    Path(deleted.path).unlink()
    lacking = load_or_cut(store, [*objects, deleted], TEXT, 3000)
    assert lacking.shards == load_or_cut(store, objects, TEXT, 3000).shards
    assert [reason.split(":")[0] for reason in lacking.unreadable] == [deleted.path]
    # — where nothing can be read, that is the error
    broken = write("broken.jsonl.gz", whole[:-31])
    with pytest.raises(StorageError, match="cannot be read"):
        load_or_cut(store, [broken], TEXT, 3000)
    pointer = write("p.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    for named, code in (([pointer], 2), ([pointer, broken], 1)):
        with pytest.raises(StorageError, match=f"{pointer.path}: .* `git lfs pull`") as raised:
            load_or_cut(store, named, TEXT, 3000)
        assert raised.value.exit_code == code
