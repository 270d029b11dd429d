"""A finished output without Ray or a model: real input files, seeded answers, a snapshot."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from label_tables import label_rows

from pipeline.hashes import sealed_json, short_hash
from pipeline.ledger.cells import committed, record_specs, remaining
from pipeline.ledger.cuts import load_or_cut
from pipeline.ledger.label_files import LabelFile, commit_shard, metadata_of, to_parquet
from pipeline.ledger.snapshots import SnapshotTask, publish, snapshot_numbers
from pipeline.sources.documents import RawRow, documents_from
from pipeline.sources.shards import Shard
from pipeline.sources.source import find_objects, read_documents
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.schema import Columns
from pipeline.stores.local import LocalStore
from pipeline.stores.store import Store

ROWS, FILES, SHARD_BYTES = 30, 3, 8_000
LABELS = {"toxic": ("toxic", "clean"), "topic": ("art", "law", "sport")}
Answer = Callable[[Shard, str, Fingerprint], LabelFile]  # of a task about a shard


def toy_fingerprints(version: str = "1") -> dict[str, Fingerprint]:
    return {task: Fingerprint({"task": task, "version": version}) for task in LABELS}


@dataclass(frozen=True)
class Corpus:
    """JSONL files below a folder, and their shards in a store."""

    folder: Path
    cache_dir: Path

    def write(self, seed: int = 0) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in range(FILES):
            self.write_file(number, seed)

    def write_file(self, number: int, seed: int) -> None:
        source = random.Random(f"{seed}-{number}")
        texts = [f"{seed} {row} {source.random()} " * 3 for row in range(ROWS)]
        texts[7] = "  "  # has no answer
        rows = ({"id": f"{number}-{row}", "text": text} for row, text in enumerate(texts))
        path = self.folder / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def shards(self, store: Store) -> tuple[Shard, ...]:
        objects = find_objects(str(self.folder), self.cache_dir)
        return load_or_cut(store, objects, Columns("text", "id"), SHARD_BYTES).shards


def toy_spec(folder: Path, **changes: Any) -> dict[str, Any]:
    """The content of a spec for a corpus in `folder/in` with an output in `folder/out`."""
    return {
        "name": "job",
        "model": {"path": "none"},
        "input": {"path": str(folder / "in"), "id": "id"},
        "output": str(folder / "out"),
        "tasks": [
            {"name": task, "question": "?", "labels": list(labels)}
            for task, labels in LABELS.items()
        ],
        **changes,
    }


@pytest.fixture
def toy_corpus(tmp_path: Path) -> Corpus:
    corpus = Corpus(tmp_path / "corpus", tmp_path / "cache")
    corpus.write()
    return corpus


@pytest.fixture
def finished(store: LocalStore, toy_corpus: Corpus) -> LocalStore:
    assert finish(store, toy_corpus.shards(store), toy_fingerprints()) == 1
    return store


def documents_of(shard: Shard) -> pa.Table:
    """The shard's documents; those of JSON lines are read without `source`."""
    if shard.version.format != "jsonl":
        return pa.concat_tables(read_documents(shard)).combine_chunks()
    lines = Path(shard.path).read_text().splitlines()
    rows = map(json.loads, lines[shard.piece.start_row : shard.piece.end_row])
    return documents_from(RawRow(row["text"], row["id"]) for row in rows)


def label_file(shard: Shard, task: str, fingerprint: Fingerprint) -> LabelFile:
    """Seeded answers to one task."""
    documents = documents_of(shard)
    rows, labels = documents.num_rows, LABELS[task]
    empty = np.array([status != "ok" for status in documents.column("status").to_pylist()])
    # — by what the rows hold, not by where they lie: the same in every temporary folder
    content = int(shard.version.etag[:8], 16) + shard.piece.start_row
    source = np.random.default_rng(content + int(fingerprint.id[:8], 16))
    p = source.dirichlet(np.ones(len(labels)), rows).astype(np.float32)
    p[empty] = np.nan
    answers = label_rows(
        p=p,
        mass=np.where(empty, np.nan, source.uniform(0.1, 1, rows)).astype(np.float32),
        n_tokens=np.where(empty, 0, source.integers(1, 9, rows)),
        status=documents.column("status").to_pylist(),
        labels=labels,
    )
    metadata = {"task": task, "fp": fingerprint.id}
    return LabelFile(task, fingerprint.id, shard.id, answers, metadata)


def finish(
    store: Store,
    shards: Sequence[Shard],
    fingerprints: Mapping[str, Fingerprint],
    name: str = "job",
    *,
    labels: Mapping[str, tuple[str, ...]] = LABELS,
    answer: Answer = label_file,
    **published: Any,
) -> int:
    """Commits what is missing of the shards and publishes, as a run does; the snapshot's number."""
    commit_all(store, shards, fingerprints, answer)
    fp = {task: fingerprint.id for task, fingerprint in fingerprints.items()}
    tasks = {task: SnapshotTask(of, labels[task]) for task, of in fp.items()}
    done = committed(store, fp, [shard.id for shard in shards])
    return publish(store, name, tasks, shards, done, created_at="2026-11-01T00:00:00Z", **published)


def finish_folder(folder: Path, version: str = "1", name: str = "job", **published: Any) -> int:
    """As `finish`, of the corpus and the output of `toy_spec`; a version has answers of its own."""
    store = LocalStore(folder / "out")
    shards = Corpus(folder / "in", folder / "cache").shards(store)
    return finish(store, shards, toy_fingerprints(version), name, **published)


def commit_all(
    store: Store,
    shards: Sequence[Shard],
    fingerprints: Mapping[str, Fingerprint],
    answer: Answer = label_file,
) -> None:
    """Commits what is missing of the shards."""
    since = max(snapshot_numbers(store), default=0)
    fp = {task: fingerprint.id for task, fingerprint in fingerprints.items()}
    record_specs(store, fingerprints.items())
    done = committed(store, fp, [shard.id for shard in shards])
    for work in remaining(shards, list(fp), done):
        shard = work.shard
        files = [answer(shard, task, fingerprints[task]) for task in work.tasks]
        known = not work.documents
        commit_shard(store, shard, documents_of(shard), files, has_documents=known, since=since)


def read_parquet(store: Store, key: str) -> pa.Table:
    return pq.read_table(pa.BufferReader(store.read(key)))


@contextmanager
def small_files() -> Iterator[None]:
    """In this block a file has at most 4 kB, as on a disk that is nearly full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def rewrite(store: Store, key: str, data: bytes) -> None:
    """Puts other content under a key, as no verb of assay does."""
    store.delete([key])
    assert store.create(key, data)


def sealed_parquet(table: pa.Table) -> bytes:
    """The file as assay itself would write it, with its metadata and a hash that is right."""
    return to_parquet(table, metadata_of(table))


def exchanged(table: pa.Table) -> pa.Table:
    """The rows with the probabilities of two labels exchanged."""
    p = table.column("p").combine_chunks()
    first, second, *others = p.flatten()
    names = [field.name for field in p.type]
    at = table.column_names.index("p")
    return table.set_column(at, "p", pa.StructArray.from_arrays([second, first, *others], names))


def snapshot_json(store: Store, number: int = 1) -> dict[str, object]:
    content: dict[str, object] = json.loads(store.read(f"snapshots/{number:08d}.json"))
    return content


def write_snapshot(store: Store, content: Mapping[str, object], number: int = 1) -> None:
    """Replaces a snapshot by one with this content, whose hash is right."""
    content = {name: value for name, value in content.items() if name != "hash"}
    rewrite(store, f"snapshots/{number:08d}.json", sealed_json(content))


def write_files(store: Store, hash_of: Callable[[Mapping[str, Any]], str | None]) -> None:
    """Replaces the hashes in the table of the first snapshot, as if it had been published so."""
    content = snapshot_json(store)
    key = str(content["files"])
    rows = read_parquet(store, key)
    hashes = pa.array([hash_of(file) for file in rows.to_pylist()], pa.string())
    sink = pa.BufferOutputStream()
    pq.write_table(rows.set_column(rows.column_names.index("hash"), "hash", hashes), sink)
    data = sink.getvalue().to_pybytes()
    rewrite(store, key, data)
    write_snapshot(store, {**content, "files_hash": short_hash(data)})
