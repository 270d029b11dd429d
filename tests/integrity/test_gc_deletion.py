"""When gc deletes, in which order, and what it leaves alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from finished import LABELS, finish, toy_fingerprints
from memory_store import MemoryStore, Recording
from several_specs import Everything

from pipeline.cli import main
from pipeline.errors import RefusedError, StorageError
from pipeline.gold.sample_design import SampleDesign, keep_design
from pipeline.ledger import attempts
from pipeline.ledger.attempts import ENDED_AFTER_S, in_use
from pipeline.ledger.keys import audit_key, spec_key
from pipeline.stores.local import LocalStore
from pipeline.stores.store import PROBE_KEY, check_create_only


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
