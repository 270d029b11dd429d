"""What a worker reads of a shard, whatever its file holds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from changing_corpus import QUESTIONS, TOPIC, Corpus
from memory_store import Recording
from stages import label_and_commit, read
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ModelError, StorageError
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_model
from pipeline.inference.model.loaded import LoadedModel
from pipeline.ledger.attempts import DEATHS_OF_A_STEP, in_use
from pipeline.ledger.counts import ShardCounts
from pipeline.runtime.job import Job, Run, make_job
from pipeline.runtime.placement import Placement, place, this_machine
from pipeline.runtime.plan import plan
from pipeline.runtime.progress import ignore
from pipeline.runtime.readers import LoadedReader
from pipeline.runtime.reading import ReadShard, commit_documents, output_of, readable
from pipeline.runtime.worker import load_readers
from pipeline.sources import documents, source
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore

LONG = "0123456789" * 2_000
LINES = [
    b'{"id": "a", "text": "one"}',
    b'{"id": "b", "text": null}',
    b'{"id": "c", "text": "\xff"}',
    b"{broken",
    b'{"id": "e", "text": "' + LONG.encode() + b'"}',
    b'{"id": "f", "text": "  "}',
]


def job_of(file: Path) -> Job:
    """The job of a spec on this machine."""
    spec = load_spec(file)
    return make_job(spec, place(spec.model, this_machine()), file.parent / "cache")


def shards_of(
    write_spec: Callable[..., Path], tmp_path: Path, *, break_it: Callable[[], None], **rules: Any
) -> tuple[Job, list[ReadShard]]:
    """The job, and each shard of `corpus` as it is read, which is broken after it is cut."""
    input_spec = {"path": str(tmp_path / "corpus"), "id": "id"}
    job = job_of(write_spec(input=input_spec, documents={"max_tokens": 16, **rules}))
    work_items = plan(job, LocalStore(tmp_path / "out")).work_items
    break_it()
    return job, list(read(job, work_items))


@pytest.mark.parametrize("slice_rows", [1, 2, 10_000])
def test_each_shard_has_a_status_and_chunks_for_every_row(
    slice_rows: int,
    write_spec: Callable[..., Path],
    tmp_path: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents, "SLICE_ROWS", slice_rows)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(LINES))
    rows = pa.table({"id": ["g", "h"], "text": ["two", "three"]})
    pq.write_table(rows, folder / "b.parquet", compression="none", use_dictionary=False)
    holed = (folder / "b.parquet").read_bytes()

    def break_it() -> None:
        (folder / "b.parquet").write_bytes(holed[:4] + b"\xff" * 100 + holed[104:])
        os.utime(
            folder / "b.parquet", (0, 0)
        )  # as after decay of the disk: the file was not written

    job, (lines, parquet) = shards_of(write_spec, tmp_path, break_it=break_it, too_long="tail")
    encode = DocumentTokenizer(byte_tokenizer).encode
    asked = readable(lines.documents, lines.inside)
    chunks, statuses = LoadedReader(job.readers[0], ignore).tokenise(lines.documents, asked)
    assert [[chunk.tolist() for chunk in of_row] for of_row in chunks] == [
        [encode("one")], [], [], [], [encode(LONG)[-16:]], []
    ]  # fmt: skip
    assert statuses == [
        "ok",
        "error:no text",
        "error:invalid UTF-8",
        "error:not JSON",
        "truncated",
        "empty",
    ]
    assert lines.documents.column("n_chars").to_pylist() == [3, 0, 0, 0, len(LONG), 2]
    assert parquet.documents.column("doc_id").to_pylist() == ["b.parquet:0", "b.parquet:1"]
    statuses = parquet.documents.column("status").to_pylist()
    assert all(status.startswith("error:cannot be read: ") for status in statuses)
    for shard in (lines, parquet):
        assert shard.documents.num_rows == len(shard.inside) == shard.work.shard.rows


@pytest.mark.parametrize("age_s", [0, 30])
def test_a_file_rewritten_at_the_same_length_is_not_read_under_its_old_name(
    age_s: int, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where the clock of the machine that wrote it is behind."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    file = folder / "a.jsonl"
    file.write_bytes(b'{"id": "a", "text": "good"}')
    written = time.time() - 1_000
    os.utime(file, (written, written))

    def rewrite() -> None:
        file.write_bytes(b'{"id": "a", "text": "evil"}')
        os.utime(file, (time.time() - age_s,) * 2)

    with pytest.raises(StorageError, match=r"a\.jsonl: changed .* with the same size"):
        shards_of(write_spec, tmp_path, break_it=rewrite)


def test_a_file_that_is_older_than_the_job_is_not_hashed_again(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES[0])
    os.utime(folder / "a.jsonl", (0, 0))

    def forget() -> None:
        monkeypatch.setattr(source, "content_hash", lambda *_: pytest.fail("hashed again"))

    _, (shard,) = shards_of(write_spec, tmp_path, break_it=forget)
    assert shard.documents.num_rows == 1


def test_documents_that_cannot_be_tokenised_have_their_reason_and_load_no_model(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "a", "text": "ab" * 32_768}))
    rules = {"max_tokens": 2, "too_long": "chunk", "overlap_tokens": 0}
    input_spec = {"path": str(tmp_path / "in.jsonl"), "id": "id"}
    job = job_of(write_spec(input=input_spec, documents=rules))
    readers = load_readers(job, asks=False)
    (counts,) = label_and_commit(
        plan(job, LocalStore(tmp_path / "out")).work_items, job, readers=readers
    )
    assert counts.n.by("rows") == {"error:more than 32,767 chunks": 1}
    assert "_engine" not in vars(readers[0])


def test_a_shard_whose_reading_was_deadly_too_often_ends_with_its_file_and_rows(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, store = job_of(write_spec()), LocalStore(tmp_path / "out")
    (work,) = plan(job, store).work_items
    [shard] = read(job, [work])
    assert shard.documents.num_rows == 1
    assert not list(store.list("attempts/"))
    with monkeypatch.context() as dying:
        dying.setattr(LocalStore, "delete", lambda _self, _keys: None)  # the process is gone
        for _ in range(DEATHS_OF_A_STEP):
            list(read(job, [work]))
    with pytest.raises(StorageError) as raised:
        list(read(job, [work]))
    named = ShardCounts.of_failed(work, raised.value).error or ""
    died = "corpus.jsonl: rows 0 to 1: the worker died 5 times while reading this shard; the file"
    assert died in named
    [shard] = read(replace(job, run=Run("another")), [work])
    assert shard.documents.num_rows == 1


def test_a_new_shard_takes_eight_requests_and_one_for_each_task(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three markers are made and deleted, a LIST looks for earlier ones, and the files are made."""
    plain.others = [TOPIC]
    plain.write("a", ["One text.", "Another."])
    (work,) = plain.plan().work_items
    store = Recording(plain.store)
    monkeypatch.setattr("stages.open_store", lambda *_: store)
    monkeypatch.setattr("pipeline.runtime.reading.open_store", lambda *_: store)
    (counts,) = label_and_commit([work], job_of(plain.spec_file))
    assert counts.error is None and len(counts.files) == 1 + 2
    assert len(store.created) == 3 + 1 + 2 and len(store.listed) == 1
    assert len(store.deleted) == 3 and not store.read_keys


@pytest.mark.parametrize("stage", [output_of, commit_documents])
def test_a_worker_whose_output_is_another_folder_names_it_and_writes_nothing(
    stage: Callable[..., Any], write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    job, store = job_of(write_spec()), LocalStore(tmp_path / "out")
    (work,) = plan(job, store).work_items
    arguments = (work,) if stage is commit_documents else ()
    with in_use(store) as shown:
        stage(replace(job, run=replace(job.run, shown=shown)), *arguments)
        (tmp_path / "out").rename(tmp_path / "of the driver")
        text = f"{tmp_path}/out: the output on this machine is not that of the driver .*; mount"
        with pytest.raises(StorageError, match=text):
            stage(replace(job, run=replace(job.run, shown=shown)), *arguments)
        assert not (tmp_path / "out").exists()
        (tmp_path / "of the driver").rename(tmp_path / "out")
    assert not list(store.list("attempts/"))


def test_a_shard_is_tokenised_while_another_is_labelled(write_spec: Callable[..., Path]) -> None:
    job = job_of(write_spec())
    documents, asked = pa.table({"status": ["ok"], "text": ["One text."]}), np.array([True])
    working = Lock()
    reader = LoadedReader(job.readers[0], ignore, working)
    reader.load_tokenizer()
    with working, ThreadPoolExecutor(1) as threads:  # — as while a model labels

        def tokenise() -> Any:
            reader.load_tokenizer()
            return reader.tokenise(documents, asked)

        chunks, status = threads.submit(tokenise).result(timeout=60)
    assert len(chunks[0]) == 1 and status == ["ok"]


@pytest.mark.parametrize("dtype, refused", [("auto", True), ("bfloat16", False)])
def test_a_machine_without_the_format_that_was_chosen_for_the_others_is_refused_by_name(
    dtype: str,
    refused: bool,
    write_spec: Callable[..., Path],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = load_spec(write_spec(model={"path": str(model_folder), "dtype": dtype}))
    job = make_job(spec, Placement("cpu", "bfloat16", actors=2, threads=1), tmp_path / "cache")
    monkeypatch.setattr("pipeline.runtime.worker.processor_formats", lambda: {"float32"})
    with (
        pytest.raises(ModelError, match=r"do not multiply bfloat16 .*write dtype: float32")
        if refused
        else nullcontext()
    ):
        load_readers(job, asks=False)


@pytest.mark.parametrize(("changes", "models"), [({}, 1), ({"kv": "int8"}, 2)])
def test_stages_with_the_same_model_share_its_weights(
    changes: dict[str, str], models: int, modelled: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def counted(*args: Any, **options: Any) -> LoadedModel:
        loaded.append(load_model(*args, **options))
        return loaded[-1]

    monkeypatch.setattr("pipeline.runtime.assembly.load_model", counted)
    modelled.write("one", ["A text.", "Another one."])
    modelled.stages = [{"question": q} for q in QUESTIONS[:2]]
    modelled.stages[0] |= {"documents": {"max_tokens": 4}, "model": {**modelled.model, **changes}}
    modelled.decide(0.0, 1.0)  # — the last stage answers about each document
    modelled.run()
    assert {row["stage"] for row in modelled.rows().values()} == {2}
    assert len(loaded) == models
