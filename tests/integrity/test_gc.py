"""Garbage collection: what a model of the output keeps stays and verifies; the rest is gone."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished import (
    FILES,
    LABELS,
    SHARD_BYTES,
    Corpus,
    commit_all,
    documents_of,
    finish,
    label_file,
    read_parquet,
    toy_fingerprints,
)
from memory_store import MemoryStore

from pipeline.cli import main
from pipeline.errors import RefusedError, StorageError
from pipeline.gold.sample_design import SampleDesign, keep_design
from pipeline.integrity.gc import GcResult, collect_garbage
from pipeline.integrity.verify import verify
from pipeline.ledger import attempts
from pipeline.ledger.attempts import ENDED_AFTER_S, in_use
from pipeline.ledger.keys import (
    audit_key,
    cell_of_part,
    documents_key,
    index_key,
    label_key,
    parse_key,
    spec_key,
)
from pipeline.ledger.label_files import commit_shard
from pipeline.ledger.snapshots import contents
from pipeline.ledger.text_index import cover
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore
from pipeline.stores.store import PROBE_KEY, Store, check_create_only

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


class Everything:
    """A corpus, a spec and a store, and what runs of any spec would do to them."""

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

    def begin_parts(self, version: str, *numbers: int) -> set[str]:
        """Commits answers about some rows of these shards; the new keys."""
        before, shards = self.keys, self.corpus.shards(self.store)
        for shard in (shards[n] for n in numbers):
            inside = np.arange(shard.rows) % 2 == 0
            cell = cell_of_part(shard.id, version.encode())
            files = [
                replace(label_file(shard, task, f), cell=cell, inside=inside)
                for task, f in toy_fingerprints(version).items()
            ]
            commit_shard(self.store, shard, documents_of(shard), files)
        return self.keys - before

    def try_again(self, version: str) -> tuple[str, str]:
        """Two retries of the first shard's labels, of which the second stands."""
        shard, fp = self.corpus.shards(self.store)[0], toy_fingerprints(version)["toxic"].id
        data = self.store.read(label_key("toxic", fp, shard.id))
        first, second = (label_key("toxic", fp, shard.id, number) for number in (1, 2))
        assert self.store.create(first, data) and self.store.create(second, data)
        return first, second

    def gc(self, keep: int, delete: bool = True, older_than_days: float = 0) -> GcResult:
        days = {"older_than_days": older_than_days}
        return collect_garbage(self.spec, keep=keep, delete=delete, store=self.store, **days)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    return clock


@pytest.fixture
def everything(tmp_path: Path, write_spec: Callable[..., Path], clock: Clock) -> Everything:
    corpus = Corpus(tmp_path / "corpus", tmp_path / "cache")
    corpus.write()
    wanted = {"path": str(corpus.folder), "id": "id", "shard_bytes": SHARD_BYTES}
    # — gc needs no model: this one does not exist
    spec = load_spec(write_spec(input=wanted, model={"path": str(tmp_path / "nowhere")}))
    return Everything(MemoryStore(), spec, corpus, clock)


def model(store: Store, keep: int, age_s: dict[str, float], days: float) -> set[str]:
    """What stays, by the documentation, straight from the snapshots' JSON and the keys.

    What the last snapshots of each spec name, what is young, unfinished work of which some is
    young, and what label files among these need.
    """
    count: dict[str, int] = defaultdict(int)
    published: dict[tuple[str, str], float] = {}
    kept = {key for key, age in age_s.items() if age < days * DAY_S}
    snapshots = sorted((stored.key for stored in store.list("snapshots/0")), reverse=True)
    for key in (each for each in snapshots if each.endswith(".json")):
        content = json.loads(store.read(key))
        count[content["spec"]] += 1
        for task, of in content["tasks"].items():
            last = published.get((task, of["fp"]), age_s[key])
            published[task, of["fp"]] = min(last, age_s[key])
        if count[content["spec"]] <= keep or key in kept:
            manifest = content.get("manifest", key)
            files = content.get("files") or read_parquet(store, manifest).to_pylist()
            kept |= {key, manifest, *(file["key"] for file in files)}
            kept |= {f"specs/{task}/{of['fp']}.json" for task, of in content["tasks"].items()}
    answers = [key for key in age_s if key.startswith(("labels/", "retries/"))]
    answers = [key for key in answers if key not in FOREIGN]
    for key in answers:
        task, fp = key.split("/")[1:3]
        for other in answers:
            unfinished = age_s[other] <= published.get((task, fp), 1e12)
            young = age_s[key] < min(days * DAY_S, published.get((task, fp), 1e12) + 1)
            if young and other.split("/")[1:3] == [task, fp] and unfinished:
                kept.add(other)
    for key in set(answers) & kept:
        parsed = parse_key(key)
        assert parsed is not None
        kept.add(label_key(parsed.task, parsed.fp, parsed.cell))
        kept |= {documents_key(parsed.sid), spec_key(parsed.task, parsed.fp)}
    return kept & age_s.keys() | {key for key in age_s if key in FOREIGN or key[:7] == "inputs/"}


@pytest.mark.parametrize(("keep", "days"), [(1, 0), (2, 0), (1, 7), (2, 7), (1, 20)])
@pytest.mark.parametrize("seed", range(3))
def test_of_any_history_of_three_specs_what_is_named_or_young_stays_and_nothing_else(
    everything: Everything, seed: int, keep: int, days: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store = random.Random(seed), everything.store
    if seed == 2:
        monkeypatch.setattr("pipeline.ledger.snapshots.TABLE_SHARDS", 2)
        # — its run was killed before it wrote the snapshot
        store.create("snapshots/00000099.parquet", b"PAR1")
    for step in range(12):
        everything.clock.now_s += source.uniform(0, 6) * DAY_S
        match source.choice(["edit", "finish", "finish", "begin", "begin", "parts"]):
            case "edit":
                everything.corpus.write_file(source.randrange(FILES), seed=step)
            case "finish":
                everything.finish(source.choice("abc"), version=source.choice("123"))
            case "begin":
                everything.begin(source.choice("1234"), source.randrange(2), 2)
            case "parts":
                everything.begin_parts(source.choice("1234"), source.randrange(4))
    store.create("attempts/x/0-3-abc", b"")
    for key in FOREIGN:
        store.create(key, b"mine")
    everything.clock.now_s += source.uniform(0, 6) * DAY_S
    before = everything.keys
    ages = {key: everything.clock.now_s - made for key, made in everything.made_s.items()}
    expected = model(store, keep, ages, days)
    dry = everything.gc(keep, delete=False, older_than_days=days)
    assert everything.keys == before and not dry.deleted
    assert set(dry.keys) == before - expected
    done = everything.gc(keep, older_than_days=days)
    assert everything.keys == expected and done.keys == dry.keys
    assert everything.gc(keep, older_than_days=days).keys == ()
    for number in done.snapshots:
        snapshot = contents(store, number)
        assert verify(store, snapshot, everything.corpus.cache_dir, {}).intact


def test_gc_of_one_spec_keeps_the_unfinished_and_the_unpublished_work_of_the_other(
    everything: Everything,
) -> None:
    """B takes four weeks, a shard on some evenings, and A cleans up each week."""
    everything.finish("a", "1")
    shards = everything.corpus.shards(everything.store)
    cover(everything.store, [shard.id for shard in shards])
    begun: set[str] = set()
    for number in range(len(shards)):
        everything.clock.now_s += 28 / len(shards) * DAY_S
        begun |= everything.begin("of b", number)
        everything.finish("a", str(number))
        everything.gc(1, older_than_days=7)
        assert begun <= everything.keys
    assert len(begun) == len(LABELS) * (1 + len(shards))
    everything.clock.now_s += 8 * DAY_S
    assert begun & {*everything.gc(1, delete=False, older_than_days=7).keys}, "it is given up"
    everything.finish("b", "of b")
    everything.gc(1, older_than_days=7)
    assert begun <= everything.keys and index_key(1) in everything.keys


def test_the_retry_that_stands_is_kept_and_so_is_what_it_stands_behind(
    everything: Everything,
) -> None:
    everything.finish("job", "1")
    first, second = everything.try_again("1")
    assert everything.finish("job", "1") == 2
    assert second in {file.key for file in contents(everything.store).files}
    removed = everything.gc(1).keys
    assert removed == ("snapshots/00000001.json", first)
    assert everything.finish("job", "1") == 2


def test_answers_that_published_ones_are_made_of_stay_until_their_shard_is_gone(
    everything: Everything,
) -> None:
    """The stages of a cascade, answers without calibration, and continuations."""
    store, shards = everything.store, everything.corpus.shards(everything.store)
    stages = [Fingerprint({"task": "toxic", "stage": number}) for number in range(2)]
    cascade = {"task": "toxic", "cascade": {"stages": [stage.id for stage in stages]}}
    topic = {"task": "topic", "calibration": {"method": "batch"}, "explain": {"tokens": 4}}
    versions = {"toxic": Fingerprint(cascade), "topic": Fingerprint(topic)}
    raw = versions["topic"].raw
    for stage, source in zip(stages, (raw, versions["topic"].continued(4)), strict=True):
        commit_all(store, shards, {"toxic": stage, "topic": source})
    other = toy_fingerprints("of no snapshot")
    commit_all(store, shards, other)
    finish(store, shards, versions, "job")
    unneeded = everything.gc(1).keys
    assert unneeded and {key.split("/")[2] for key in unneeded} == {
        name for each in other.values() for name in (each.id, f"{each.id}.json")
    }
    gone = {shard.id for shard in shards if shard.path.endswith("1.jsonl")}
    (everything.corpus.folder / "1.jsonl").unlink()
    finish(store, everything.corpus.shards(store), versions, "job")
    removed = [parse_key(key) for key in everything.gc(1).keys]
    labels = [key for key in removed if key is not None and key.folder == "labels/"]
    assert len(labels) == 6 * len(gone) and {key.sid for key in labels} == gone


def test_a_stages_answers_about_some_rows_stay_until_their_shard_is_gone(
    everything: Everything,
) -> None:
    store, shards = everything.store, everything.corpus.shards(everything.store)
    stage = toy_fingerprints("1")["toxic"]
    cascade = Fingerprint({"task": "toxic", "cascade": {"stages": [stage.id]}})
    parts = everything.begin_parts("1", *range(len(shards)))
    unneeded = {key for key in parts if key.startswith("labels/topic/")}
    of_stage = {key for key in parts if key.startswith("labels/toxic/")}
    finish(store, shards, {"toxic": cascade}, "job")
    removed = {key for key in everything.gc(1).keys if key.startswith("labels/")}
    assert len(of_stage) == len(shards) and removed == unneeded
    gone = {shard.id for shard in shards if shard.path.endswith("1.jsonl")}
    (everything.corpus.folder / "1.jsonl").unlink()
    finish(store, everything.corpus.shards(store), {"toxic": cascade}, "job")
    removed = {key for key in everything.gc(1).keys if key.startswith("labels/")}
    assert removed & of_stage == {key for key in of_stage if key.split("/")[-1][:32] in gone}


def test_the_retry_of_some_rows_is_kept_with_what_it_stands_behind(everything: Everything) -> None:
    (shard, *_), fp = everything.corpus.shards(everything.store), toy_fingerprints("1")["toxic"]
    everything.begin_parts("1", 0)
    first = label_key("toxic", fp.id, cell_of_part(shard.id, b"1"))
    retry = label_key("toxic", fp.id, cell_of_part(shard.id, b"1"), 1)
    everything.clock.now_s += 30 * DAY_S
    assert everything.store.create(retry, everything.store.read(first))
    everything.finish("job", "1")  # it names neither, so only the retry's age keeps both
    everything.gc(1, older_than_days=7)
    assert {first, retry} <= everything.keys
    everything.clock.now_s += 8 * DAY_S
    everything.gc(1, older_than_days=7)
    assert not {first, retry} & everything.keys


class Recording:
    """A store that writes down what is deleted, in order."""

    def __init__(self, store: Store) -> None:
        self.url, self.create, self.read, self.list = (
            store.url,
            store.create,
            store.read,
            store.list,
        )
        self.deleted: list[str] = []

    def delete(self, keys: Sequence[str]) -> None:
        self.deleted.extend(keys)


def test_snapshots_are_deleted_before_the_files_that_they_name(everything: Everything) -> None:
    everything.store = recording = Recording(everything.store)
    for version in "123":
        everything.finish("job", version)
    assert everything.gc(1).keys == tuple(recording.deleted)
    kinds = [key.partition("/")[0] for key in recording.deleted]
    assert kinds[:2] == ["snapshots"] * 2 and "snapshots" not in kinds[2:] and "labels" in kinds


def test_nothing_is_deleted_where_a_snapshot_is_broken(everything: Everything) -> None:
    everything.finish("job", "1")
    everything.store.create("snapshots/00000002.json", b"{")
    before = everything.keys
    with pytest.raises(StorageError, match=r"00000002\.json: is not JSON"):
        everything.gc(1)
    assert everything.keys == before


def test_while_any_of_several_runs_is_active_nothing_is_deleted(everything: Everything) -> None:
    for version in "12":
        everything.finish("job", version)
    before = everything.keys
    with ExitStack() as runs:
        runs.enter_context(in_use(everything.store))
        with in_use(everything.store):
            pass
        with pytest.raises(RefusedError, match=r"a run writes to this output .* 10 minutes"):
            everything.gc(1)
        assert before < everything.keys
        assert everything.gc(1, delete=False).keys, "a dry run only reads"
    assert everything.keys == before, "a run leaves no mark"
    # — a killed run leaves one, which ends by itself, and which gc deletes
    everything.store.create("attempts/in-use/killed", b"")
    everything.clock.now_s += ENDED_AFTER_S - 60
    with pytest.raises(RefusedError):
        everything.gc(1)
    everything.clock.now_s += 60
    removed = everything.gc(1).keys
    assert "attempts/in-use/killed" in removed and "snapshots/00000001.json" in removed


def test_a_run_of_hours_renews_its_mark(
    everything: Everything, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "RENEWED_AFTER_S", 0.001)
    marks: set[str] = set()
    renewed = threading.Event()
    create = MemoryStore.create

    def spy(self: MemoryStore, key: str, data: bytes) -> bool:
        marks.add(key)
        if len(marks) == 5:
            renewed.set()
        return create(self, key, data)

    monkeypatch.setattr(MemoryStore, "create", spy)
    with in_use(everything.store):
        everything.clock.now_s += 3 * ENDED_AFTER_S
        renewed.clear()
        marks.clear()
        assert renewed.wait(60)
        with pytest.raises(RefusedError):
            everything.gc(1)
        assert len(everything.keys) <= 2, "a mark is replaced"
    assert everything.keys == set()


def test_a_snapshot_that_a_run_publishes_during_gc_keeps_its_files(
    everything: Everything,
) -> None:
    """The run finds all answers in the output, so it is over before gc looks a second time."""
    everything.finish("job", "1")
    everything.finish("job", "2")

    store, shards = everything.store, everything.corpus.shards(everything.store)
    everything.store = racing = Recording(store)
    looks = iter(range(2))

    def list_(prefix: str) -> Any:
        if prefix == "attempts/in-use/" and next(looks) == 1:
            assert finish(store, shards, toy_fingerprints("1"), "job") == 3
        return store.list(prefix)

    racing.list = list_
    with pytest.raises(RefusedError, match="has just published a snapshot; run gc again"):
        everything.gc(1)
    assert racing.deleted == []


def test_a_new_input_is_neither_cut_nor_written_down(everything: Everything) -> None:
    check_create_only(everything.store)
    assert everything.gc(1).keys == ()
    assert everything.keys == {PROBE_KEY}


def test_the_design_of_a_sample_that_people_label_is_kept(everything: Everything) -> None:
    for version in "12":
        everything.finish("job", version)
    name = keep_design(everything.store, SampleDesign(1, {"ab": 0}, {0: 7}))
    collected = everything.gc(1)
    assert collected.keys and not collected.unknown
    assert audit_key(name) in everything.keys


def test_the_command_deletes_only_when_told_and_keeps_at_least_one(
    store: LocalStore,
    everything: Everything,
    write_spec: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything.store = store
    for version in "12":
        everything.finish("job", version)
    wanted = {"path": str(everything.corpus.folder), "id": "id"}
    spec = str(write_spec(input=wanted, output=str(store.root)))
    monkeypatch.setenv("ASSAY_CACHE", str(everything.corpus.cache_dir))
    before = everything.keys
    assert main(["gc", spec, "--keep", "1", "--delete"]) == 0
    assert everything.keys == before, "all of it is a second old"
    assert "there is nothing to delete" in capsys.readouterr().out
    assert main(["gc", spec, "--keep", "1", "--older-than", "0"]) == 0
    assert "nothing was deleted" in capsys.readouterr().out and everything.keys == before
    assert main(["gc", spec, "--keep", "1", "--older-than", "-1"]) == 2
    assert capsys.readouterr().err.startswith("--older-than: write 0 or more days")
    assert main(["gc", spec, "--keep", "0", "--delete"]) == 2
    assert capsys.readouterr().err.startswith("--keep: at least one") and everything.keys == before
    assert main(["gc", spec, "--keep", "1", "--older-than", "0", "--delete", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert before - everything.keys == set(found["keys"]) and found["deleted"] is True
    assert found["prefixes"]["specs/"] == {
        "objects": len(LABELS),
        "size_bytes": sum(len(f.json()) for f in toy_fingerprints("1").values()),
    }
    assert spec_key("toxic", toy_fingerprints("2")["toxic"].id) in everything.keys
