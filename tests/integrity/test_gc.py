"""Garbage collection: what a model of the output keeps stays and verifies; the rest is gone."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable

import pytest
from finished import FILES, LABELS, commit_all, finish, read_parquet, toy_fingerprints
from memory_store import Recording
from several_specs import DAY_S, FOREIGN, SharedOutput

from pipeline.integrity.gc import collect_garbage
from pipeline.integrity.verify import verify
from pipeline.ledger.counts_log import log_counts, logged_counts
from pipeline.ledger.keys import (
    counts_key,
    documents_key,
    index_key,
    label_key,
    manifest_key,
    parse_key,
    spec_key,
)
from pipeline.ledger.label_files import FileCounts
from pipeline.ledger.numbered import CHECKPOINT
from pipeline.ledger.numbered import numbers as object_numbers
from pipeline.ledger.snapshots import contents
from pipeline.spec.fingerprint import Fingerprint
from pipeline.stores.store import Store


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
            files = read_parquet(store, content["files"]).to_pylist()
            kept |= {key, content["files"], *(file["key"] for file in files)}
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
        kept.add(label_key(parsed.task, parsed.fp, parsed.sid))
        kept |= {documents_key(parsed.sid), spec_key(parsed.task, parsed.fp)}
    return kept & age_s.keys() | {key for key in age_s if key in FOREIGN or key[:7] == "inputs/"}


def no_counts(keys: Iterable[str]) -> set[str]:
    return {key for key in keys if not key.startswith("counts/")}


@pytest.mark.parametrize(
    ("seed", "keep", "days"),
    [(0, 1, 7), (0, 2, 0), (1, 1, 20), (1, 2, 7), (2, 1, 0), (2, 1, 7), (2, 2, 0)],
)
def test_of_any_history_of_three_specs_what_is_named_or_young_stays_and_nothing_else(
    shared: SharedOutput, seed: int, keep: int, days: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store = random.Random(seed), shared.store
    if seed == 2:
        monkeypatch.setattr("pipeline.ledger.snapshots.GROUP_SHARDS", 2)
        # — its run was killed before it wrote the snapshot
        store.create("snapshots/00000099.parquet", b"PAR1")
    for step in range(12):
        shared.clock.now_s += source.uniform(0, 6) * DAY_S
        match source.choice(["edit", "finish", "finish", "begin", "begin", "parts", "retry"]):
            case "edit":
                shared.corpus.write_file(source.randrange(FILES), seed=step)
            case "finish":
                shared.finish(source.choice("abc"), version=source.choice("123"))
            case "begin":
                shared.begin(source.choice("1234"), source.randrange(2), 2)
            case "parts":
                shared.begin(source.choice("1234"), source.randrange(4))
            case "retry":
                shared.try_again(source.choice("1234"))
    store.create("attempts/x/0-3-abc", b"")
    for key in FOREIGN:
        store.create(key, b"mine")
    shared.clock.now_s += source.uniform(0, 6) * DAY_S
    before = shared.keys
    ages = {key: shared.clock.now_s - made for key, made in shared.made_s.items()}
    expected = no_counts(model(store, keep, ages, days))
    dry = shared.gc(keep, delete=False, older_than_days=days)
    assert shared.keys == before and not dry.deleted
    assert no_counts(dry.keys) == no_counts(before) - expected
    done = shared.gc(keep, older_than_days=days)
    assert no_counts(shared.keys) == expected and done.keys == dry.keys
    assert shared.gc(keep, older_than_days=days).keys == ()
    for number in done.kept_snapshots:
        snapshot = contents(store, number)
        assert verify(store, snapshot, shared.corpus.cache_dir, {}).intact


def test_of_snapshots_that_are_not_kept_only_the_headers_are_read(shared: SharedOutput) -> None:
    numbers = [shared.finish("a", version) for version in "123"]
    reading = Recording(shared.store)
    result = collect_garbage(shared.spec, keep=1, delete=False, older_than_days=0, store=reading)
    assert result.kept_snapshots == (numbers[-1],)
    tables = [key for key in reading.read_keys if key.endswith(".parquet")]
    assert [key for key in tables if key.startswith("snapshots/")] == [manifest_key(numbers[-1])]
    assert {key.partition("/")[0] for key in tables} == {"snapshots", "counts"}


def test_gc_of_one_spec_keeps_the_unfinished_and_the_unpublished_work_of_the_other(
    shared: SharedOutput,
) -> None:
    """B takes four weeks, a shard on some evenings, and A cleans up each week."""
    shared.finish("a", "1")
    shards = shared.corpus.shards(shared.store)
    shared.store.create(index_key(1), b"whatever shards it has")
    begun: set[str] = set()
    for number in range(len(shards)):
        shared.clock.now_s += 28 / len(shards) * DAY_S
        begun |= shared.begin("of b", number)
        shared.finish("a", str(number))
        shared.gc(1, older_than_days=7)
        assert begun <= shared.keys
    assert len(begun) == len(LABELS) * (1 + len(shards))
    shared.clock.now_s += 8 * DAY_S
    assert begun & {*shared.gc(1, delete=False, older_than_days=7).keys}, "it is too old"
    shared.finish("b", "of b")
    shared.gc(1, older_than_days=7)
    assert begun <= shared.keys and index_key(1) in shared.keys


def test_answers_that_published_ones_are_made_of_stay_until_their_shard_is_gone(
    shared: SharedOutput,
) -> None:
    """The stages of a cascade, also for other thresholds, and answers without a condition."""
    store, shards = shared.store, shared.corpus.shards(shared.store)
    stages = [Fingerprint({"task": "toxic", "stage": number}) for number in range(2)]
    cascade = {"task": "toxic", "cascade": {"stages": [stage.id for stage in stages]}}
    topic = {"task": "topic", "when": {"sql": "n_chars > 3", "tasks": {}}}
    versions = {"toxic": Fingerprint(cascade), "topic": Fingerprint(topic)}
    commit_all(store, shards, {"toxic": stages[0], "topic": versions["topic"].raw})
    for low in (0.1, 0.3):
        after = {"stage": "f" * 16, "thresholds": ["toxic", low, 0.9]}
        commit_all(store, shards, {"toxic": stages[1].under(after=after)})
    other = toy_fingerprints("of no snapshot")
    commit_all(store, shards, other)
    finish(store, shards, versions, "job")
    unneeded = shared.gc(1).keys
    assert unneeded and {key.split("/")[2] for key in unneeded} == {
        name for each in other.values() for name in (each.id, f"{each.id}.json")
    }
    removed_sids = {shard.id for shard in shards if shard.path.endswith("1.jsonl")}
    (shared.corpus.folder / "1.jsonl").unlink()
    finish(store, shared.corpus.shards(store), versions, "job")
    removed = [parse_key(key) for key in shared.gc(1).keys]
    labels = [key for key in removed if key is not None and key.folder == "labels/"]
    assert len(labels) == 6 * len(removed_sids) and {key.sid for key in labels} == removed_sids


def test_counts_before_the_last_checkpoint_go(shared: SharedOutput) -> None:
    shared.finish("a", "1")
    file = next(shared.store.list("labels/"))
    for _ in range(CHECKPOINT + 2):
        log_counts(shared.store, [FileCounts(file.key, file.etag, "hash", 0)])
    numbers = object_numbers(shared.store, counts_key)
    checkpoint = max(number for number in numbers if number % CHECKPOINT == 0)
    shared.clock.now_s += DAY_S
    before = logged_counts(shared.store)
    shared.gc(1, older_than_days=0)
    left = object_numbers(shared.store, counts_key)
    assert left == [number for number in numbers if number >= checkpoint]
    assert logged_counts(shared.store).equals(before)


def test_the_log_of_counts_begins_again_without_those_of_deleted_files(
    shared: SharedOutput,
) -> None:
    for version in "123":
        shared.finish("a", version)
    shown, logged = contents(shared.store).files, logged_counts(shared.store)
    dry = shared.gc(1, delete=False)
    assert shared.gc(1).keys == dry.keys and counts_key(1) in dry.keys
    assert logged.num_rows > 2 * shown.num_rows
    assert object_numbers(shared.store, counts_key) == [CHECKPOINT]
    assert logged_counts(shared.store).num_rows == shown.num_rows
    assert shared.gc(1).keys == ()
    shared.finish("a", "4")  # — each later entry follows the checkpoint
    assert object_numbers(shared.store, counts_key) == [CHECKPOINT, CHECKPOINT + 1]
