"""Garbage collection: what a model of the output keeps stays and verifies; the rest is gone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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

from pipeline.audit.gc import GcResult, collect_garbage
from pipeline.audit.verify import verify
from pipeline.cli import main
from pipeline.errors import StorageError
from pipeline.gold.sample_design import SampleDesign, keep_design
from pipeline.ledger.keys import audit_key, documents_key, label_key, spec_key
from pipeline.ledger.label_files import commit_shard
from pipeline.ledger.snapshots import contents
from pipeline.runtime.job import make_job, plan
from pipeline.runtime.placement import Placement
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.parse import load_spec
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore
from pipeline.stores.store import PROBE_KEY, Store, check_create_only

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


class Everything:
    """A corpus, a spec and a store, and what a run would do to them."""

    def __init__(self, store: Store, spec: JobSpec, corpus: Corpus) -> None:
        self.store, self.spec, self.corpus = store, spec, corpus

    @property
    def keys(self) -> set[str]:
        listed = [*self.store.list(""), *self.store.list("attempts/")]
        return {stored.key for stored in listed}

    def fingerprints(self, dtype: str = "float32") -> dict[str, Fingerprint]:
        job = make_job(self.spec, Placement("cpu", dtype, 1, 1), self.corpus.cache_dir)
        return dict(job.fingerprints)

    def finish(self, name: str, version: str) -> int:
        return finish(self.store, self.corpus.shards(self.store), toy_fingerprints(version), name)

    def begin(self, dtype: str, shards: int) -> set[str]:
        """Commits some of the shards, as a run that was interrupted did; their keys."""
        fingerprints, made = self.fingerprints(dtype), set[str]()
        for shard in self.corpus.shards(self.store)[:shards]:
            files = [label_file(shard, task, f) for task, f in fingerprints.items()]
            commit_shard(self.store, shard, documents_of(shard), files)
            made |= {documents_key(shard.id)}
            made |= {label_key(task, f.id, shard.id) for task, f in fingerprints.items()}
        return made

    def try_again(self, version: str) -> tuple[str, str]:
        """Two retries of the first shard's labels, of which the second stands."""
        shard, fp = self.corpus.shards(self.store)[0], toy_fingerprints(version)["toxic"].id
        data = self.store.read(label_key("toxic", fp, shard.id))
        first, second = (label_key("toxic", fp, shard.id, number) for number in (1, 2))
        assert self.store.create(first, data) and self.store.create(second, data)
        return first, second

    def gc(self, keep: int, delete: bool = True, older_than_days: float = 0) -> GcResult:
        return collect_garbage(
            self.spec,
            cache_dir=self.corpus.cache_dir,
            keep=keep,
            delete=delete,
            older_than_days=older_than_days,
            store=self.store,
        )


@pytest.fixture
def everything(tmp_path: Path, write_spec: Callable[..., Path], model_folder: Path) -> Everything:
    corpus = Corpus(tmp_path / "corpus", tmp_path / "cache")
    corpus.write()
    wanted = {"path": str(corpus.folder), "id": "id", "shard_bytes": SHARD_BYTES}
    model = {"path": str(model_folder), "dtype": "auto"}  # what each machine makes of it is kept
    return Everything(MemoryStore(), load_spec(write_spec(input=wanted, model=model)), corpus)


def named(store: Store, keep: int) -> set[str]:
    """The model: what the last snapshots of each spec name, straight from their JSON."""
    snapshots = sorted((stored.key for stored in store.list("snapshots/0")), reverse=True)
    by_spec: dict[str, list[tuple[str, Any]]] = {}
    for key in (each for each in snapshots if each.endswith(".json")):
        content = json.loads(store.read(key))
        by_spec.setdefault(content["spec"], []).append((key, content))
    kept = set()
    for key, content in (found for of_spec in by_spec.values() for found in of_spec[:keep]):
        manifest = content.get("manifest", key)
        files = read_parquet(store, manifest).to_pylist() if manifest != key else content["files"]
        kept |= {key, manifest, *(file["key"] for file in files)}
        kept |= {f"specs/{task}/{of['fp']}.json" for task, of in content["tasks"].items()}
    return kept


def inputs(keys: set[str]) -> set[str]:
    return {key for key in keys if key.startswith("inputs/")}


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_of_any_history_the_kept_snapshots_verify_and_nothing_else_is_left(
    everything: Everything, seed: int, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed == 2:
        monkeypatch.setattr("pipeline.ledger.snapshots.TABLE_SHARDS", 2)
        # — its run was killed before it wrote the snapshot
        everything.store.create("snapshots/00000099.parquet", b"PAR1")
    source, store = random.Random(seed), everything.store
    for step in range(6):
        everything.corpus.write_file(source.randrange(FILES), seed=step)
        everything.finish(source.choice("ab"), version=source.choice("123"))
    # — as they are now: what an interrupted run of the spec itself left behind
    begun = everything.begin("float32", 3) | everything.begin("bfloat16", 2)
    store.create("attempts/x/0-3-abc", b"")
    for key in FOREIGN:
        store.create(key, b"mine")
    before = everything.keys
    expected = named(store, keep) | inputs(before) | set(FOREIGN) | begun
    # — documents files are model-free: any run over the input as it is now has use for them
    expected |= before & {documents_key(shard.id) for shard in everything.corpus.shards(store)}
    dry = everything.gc(keep, delete=False)
    assert everything.keys == before and not dry.deleted
    assert set(dry.keys) == before - expected
    done = everything.gc(keep)
    assert everything.keys == expected and done.keys == dry.keys
    assert everything.gc(keep).keys == ()
    for number in done.snapshots:
        snapshot = contents(store, number)
        assert verify(store, snapshot, everything.corpus.cache_dir, {}).intact
    headers = [key for key in expected if key.startswith("snapshots/0") and key.endswith(".json")]
    assert len(done.snapshots) == len(headers)


def test_documents_of_a_file_that_left_the_input_go_with_its_last_snapshot(
    everything: Everything,
) -> None:
    everything.finish("job", "1")
    gone = [s for s in everything.corpus.shards(everything.store) if s.path.endswith("1.jsonl")]
    (everything.corpus.folder / "1.jsonl").unlink()
    assert everything.gc(1).keys == ()
    everything.finish("job", "1")
    assert everything.gc(2).keys == ()
    removed = everything.gc(1).keys
    fps = {task: fingerprint.id for task, fingerprint in toy_fingerprints().items()}
    labels = {label_key(task, fp, shard.id) for task, fp in fps.items() for shard in gone}
    documents = {documents_key(shard.id) for shard in gone}
    assert gone and set(removed) == {"snapshots/00000001.json"} | labels | documents


def test_answers_that_the_next_run_takes_over_from_an_earlier_version_are_kept(
    everything: Everything,
) -> None:
    earlier = everything.begin("float32", 1)
    everything.corpus.write_file(0, seed=5)
    everything.corpus.shards(everything.store)
    assert everything.gc(1).keys == () and earlier <= everything.keys


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


def test_a_retry_of_an_interrupted_run_is_kept(everything: Everything) -> None:
    begun = everything.begin("float32", 1)
    (label,) = (key for key in begun if key.startswith("labels/toxic/"))
    task, fp, _, name = label.split("/")[1:]
    retries = [label_key(task, fp, name.removesuffix(".parquet"), number) for number in (1, 2)]
    for key in retries:
        everything.store.create(key, bytes(12))
    assert everything.gc(1).keys == (retries[0],)


@pytest.mark.parametrize("recalibrated", [False, True])
def test_answers_of_another_calibration_are_kept_where_the_next_run_has_no_others(
    everything: Everything, recalibrated: bool
) -> None:
    job = make_job(everything.spec, Placement("cpu", "float32", 1, 1), everything.corpus.cache_dir)
    store, shards = everything.store, everything.corpus.shards(everything.store)
    contents = {task: {**own.content, "calibration": 1} for task, own in job.fingerprints.items()}
    commit_all(store, shards[:2], {task: Fingerprint(c) for task, c in contents.items()})
    before = everything.keys
    if recalibrated:
        everything.begin("float32", 1)
    unused = {key for key in before if key.startswith("labels/") and shards[0].id in key}
    assert set(everything.gc(1).keys) == (unused if recalibrated else set())
    work_items = plan(job, store).work_items
    assert not any(work.asks for work in work_items if work.shard in shards[:2])


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


def test_the_young_work_of_another_spec_stays_with_all_that_it_needs(
    everything: Everything, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything.finish("job", "1")
    everything.finish("job", "2")
    shards = everything.corpus.shards(everything.store)
    others = toy_fingerprints("of another spec, without a snapshot")
    for task, fingerprint in others.items():
        everything.store.create(spec_key(task, fingerprint.id), fingerprint.json())
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 8 * 86_400)  # a week later
    begun = {label_key(task, fingerprint.id, shards[0].id) for task, fingerprint in others.items()}
    for key in begun:
        everything.store.create(key, b"an answer")
    deleted = everything.gc(1, older_than_days=7).keys
    kept = begun | {spec_key(task, fingerprint.id) for task, fingerprint in others.items()}
    assert kept <= everything.keys and documents_key(shards[0].id) in everything.keys
    old = toy_fingerprints("1")
    assert label_key("toxic", old["toxic"].id, shards[0].id) in deleted
    assert kept.issubset(everything.gc(1, older_than_days=0).keys)


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
