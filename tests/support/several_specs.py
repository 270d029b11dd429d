"""An output of several specs, with a clock of its own. Fixtures: `shared` and `clock`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from finished import (
    SHARD_BYTES,
    Corpus,
    commit_all,
    finish,
    read_parquet,
    toy_fingerprints,
)
from memory_store import MemoryStore

from pipeline.integrity.gc import GcResult, collect_garbage
from pipeline.ledger.keys import LABELS, label_key, parse_key
from pipeline.ledger.label_files import KEY, metadata_of, to_parquet
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store

DAY_S = 86_400.0
# What people and other programs may have put beside assay's keys, or among them.
FOREIGN = (
    "README.md",
    "labels/README.md",
    "labels/toxic/notes.parquet",
    "documents/copy of 00.parquet",
    f"labels/toxic/{'a' * 16}/cc/{'b' * 32}.parquet",
    "snapshots/latest.json",
    "specs/toxic/mine.json",
    "exports/labels/toxic.parquet",
)


class Clock:
    """The time of the store and of gc. Each look at it takes a second."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


class SharedOutput:
    """An input and an output that several specs share; its methods do what their runs do."""

    def __init__(self, store: Store, spec: JobSpec, corpus: Corpus, clock: Clock) -> None:
        self.store, self.spec, self.corpus, self.clock = store, spec, corpus, clock

    @property
    def keys(self) -> set[str]:
        return {*self.made_s}

    @property
    def made_s(self) -> dict[str, float]:
        listed = [*self.store.list(""), *self.store.list("attempts/")]
        return {stored.key: stored.modified_s for stored in listed}

    def finish(self, name: str, version: str) -> int:
        return finish(self.store, self.corpus.shards(self.store), toy_fingerprints(version), name)

    def begin(self, version: str, *numbers: int) -> set[str]:
        """Commits some of the shards, as a run that was interrupted did; the new keys."""
        before, shards = self.keys, self.corpus.shards(self.store)
        commit_all(self.store, [shards[n] for n in numbers], toy_fingerprints(version))
        return self.keys - before

    def try_again(self, version: str) -> None:
        """Two retries of all label files of the first shard."""
        sid = self.corpus.shards(self.store)[0].id
        fps = [fingerprint.id for fingerprint in toy_fingerprints(version).values()]
        for key, parsed in [(key, parse_key(key)) for key in self.keys]:
            if parsed and parsed.folder == LABELS and parsed.sid == sid and parsed.fp in fps:
                for number in (1, 2):
                    retry = label_key(parsed.task, parsed.fp, parsed.sid, number)
                    again = read_parquet(self.store, key)
                    self.store.create(retry, to_parquet(again, metadata_of(again) | {KEY: retry}))

    def gc(self, keep: int, delete: bool = True, older_than_days: float = 0) -> GcResult:
        days = {"older_than_days": older_than_days}
        return collect_garbage(self.spec, keep=keep, delete=delete, store=self.store, **days)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    return clock


@pytest.fixture
def shared(tmp_path: Path, write_spec: Callable[..., Path], clock: Clock) -> SharedOutput:
    corpus = Corpus(tmp_path / "corpus", tmp_path / "cache")
    corpus.write()
    input_keys = {"path": str(corpus.folder), "id": "id", "shard_bytes": SHARD_BYTES}
    # — gc needs no model: this one does not exist
    spec = load_spec(write_spec(input=input_keys, model={"path": str(tmp_path / "nowhere")}))
    return SharedOutput(MemoryStore(), spec, corpus, clock)
