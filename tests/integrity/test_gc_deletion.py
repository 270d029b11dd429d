"""When gc deletes, in which order, and what it leaves alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import memory_store
import pytest
from finished import LABELS, finish, toy_fingerprints
from memory_store import MemoryStore, Recording
from several_specs import DAY_S, Everything

from pipeline.cli import main
from pipeline.errors import RefusedError, StorageError
from pipeline.ledger import attempts
from pipeline.ledger.attempts import ENDED_AFTER_S, in_use
from pipeline.ledger.keys import spec_key
from pipeline.ledger.snapshots import contents
from pipeline.stores.local import LocalStore
from pipeline.stores.store import PROBE_KEY, Store, StoredObject, check_create_only


def test_snapshots_are_deleted_before_the_files_that_they_name(everything: Everything) -> None:
    everything.store = recording = Recording(everything.store)
    for version in "123":
        everything.finish("job", version)
    assert everything.gc(1).keys == tuple(recording.deleted[:-1])
    assert recording.deleted[-1].startswith("attempts/in-use/gc-"), "its own mark"
    kinds = [key.partition("/")[0] for key in recording.deleted]
    assert kinds[:4] == ["snapshots"] * 4 and "snapshots" not in kinds[4:] and "labels" in kinds


def test_nothing_is_deleted_where_a_snapshot_is_broken(everything: Everything) -> None:
    everything.finish("job", "1")
    everything.store.create("snapshots/00000002.json", b"{")
    before = everything.keys
    with pytest.raises(StorageError, match=r"00000002\.json: is not a snapshot"):
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
    everything.store.create("attempts/in-use/run-killed", b"")
    everything.clock.now_s += ENDED_AFTER_S - 60
    with pytest.raises(RefusedError):
        everything.gc(1)
    everything.clock.now_s += 60
    removed = everything.gc(1).keys
    assert "attempts/in-use/run-killed" in removed and "snapshots/00000001.json" in removed


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


class Interrupted(Recording):
    """A store before whose operation `number` something else happens."""

    def __init__(self, store: Store, number: int, event: Callable[[], None]) -> None:
        super().__init__(store)
        self._number, self._event = number, event
        self.operations = 0

    def _count(self) -> None:
        self.operations += 1
        if self.operations == self._number:
            self._event()

    def create(self, key: str, data: bytes) -> str | None:
        self._count()
        return super().create(key, data)

    def read(self, key: str) -> bytes:
        self._count()
        return super().read(key)

    def delete(self, keys: Sequence[str]) -> None:
        self._count()
        super().delete(keys)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        self._count()
        return super().list(prefix)


@pytest.mark.parametrize("ends_before_gc", [True, False])
def test_a_run_at_any_moment_of_gc_keeps_its_files_or_one_of_the_two_is_refused(
    ends_before_gc: bool, everything: Everything
) -> None:
    """The run publishes old answers again, so gc would delete the files of the new snapshot."""
    refused: set[str] = set()
    finished = everything.store
    assert isinstance(finished, MemoryStore)
    for version in "12":
        everything.finish("job", version)
    shards = everything.corpus.shards(finished)
    for number in range(1, 40):
        store = MemoryStore(_objects=finished._objects.copy())
        with ExitStack() as active:

            def run(store: Store = store, active: ExitStack = active) -> None:
                try:
                    active.enter_context(in_use(store))
                except RefusedError as error:
                    assert "`assay gc --delete` deletes objects of this output" in str(error)
                    refused.add("run")
                    return
                assert finish(store, shards, toy_fingerprints("1"), "job") == 3
                if ends_before_gc:
                    active.close()

            everything.store = Interrupted(store, number, run)
            try:
                everything.gc(1)
            except RefusedError:
                refused.add("gc")
        keys = {stored.key for stored in store.list("")}
        assert {*contents(store).files["key"].to_pylist()} <= keys, number
        assert not any(key.startswith("attempts/in-use/") for key in keys)
        if everything.store.operations < number:
            break
    else:
        pytest.fail("gc has more operations")
    assert number > 10
    assert refused == ({"run"} if ends_before_gc else {"run", "gc"})


def test_gc_that_was_killed_is_waited_for_ten_minutes(everything: Everything) -> None:
    everything.finish("job", "1")
    everything.store.create("attempts/in-use/gc-killed", b"")
    everything.clock.now_s += ENDED_AFTER_S - 60
    with pytest.raises(RefusedError, match="or, if it was killed, for 10 minutes"):
        everything.store.create("attempts/in-use/run-other", b"")
        with in_use(everything.store):
            pass
    everything.clock.now_s += 60
    with in_use(everything.store):
        pass


def test_a_clock_that_is_an_hour_ahead_lets_gc_not_delete_under_a_run(
    everything: Everything, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in "12":
        everything.finish("job", version)
    with in_use(everything.store):
        # — of this machine alone: the store has a clock of its own
        monkeypatch.setattr(memory_store, "time", SimpleNamespace(time=everything.clock))
        monkeypatch.setattr("time.time", lambda: everything.clock() + 3_600)
        with pytest.raises(RefusedError):
            everything.gc(1)


def test_a_clock_that_is_a_week_ahead_makes_no_object_old(
    everything: Everything, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in "12":
        everything.finish("job", version)
    monkeypatch.setattr(memory_store, "time", SimpleNamespace(time=everything.clock))
    monkeypatch.setattr("time.time", lambda: everything.clock() + 8 * DAY_S)
    assert not everything.gc(1, older_than_days=7).keys
    everything.clock.now_s += 8 * DAY_S
    assert everything.gc(1, older_than_days=7).keys


def test_a_new_input_is_neither_cut_nor_written_down(everything: Everything) -> None:
    check_create_only(everything.store)
    assert everything.gc(1).keys == ()
    assert everything.keys == {PROBE_KEY}


def test_the_command_deletes_only_with_the_option_and_keeps_at_least_one(
    store: LocalStore,
    everything: Everything,
    write_spec: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything.store = store
    for version in "12":
        everything.finish("job", version)
    input_keys = {"path": str(everything.corpus.folder), "id": "id"}
    spec = str(write_spec(input=input_keys, output=str(store.root)))
    monkeypatch.setenv("ASSAY_CACHE", str(everything.corpus.cache_dir))
    before = everything.keys
    assert main(["gc", spec, "--keep", "1", "--delete"]) == 0
    assert everything.keys == before, "all of it is a second old"
    assert "there is nothing to delete" in capsys.readouterr().out
    assert main(["gc", spec, "--keep", "1", "--older-than", "0"]) == 0
    assert "nothing was deleted" in capsys.readouterr().out and everything.keys == before
    assert main(["gc", spec, "--keep", "1", "--older-than", "-1"]) == 2
    assert capsys.readouterr().err.startswith("--older-than: write 0 or more days")
    assert main(["gc", spec, "--older-than", "0"]) == 0
    assert "kept snapshots  00000002, 00000001" in capsys.readouterr().out
    assert main(["gc", spec, "--delete"]) == 2
    assert capsys.readouterr().err.startswith("--keep: missing; write how many snapshots of each")
    assert main(["gc", spec, "--keep", "0", "--delete"]) == 2
    assert capsys.readouterr().err.startswith("--keep: at least one") and everything.keys == before
    assert main(["gc", spec, "--keep", "1", "--older-than", "0", "--delete", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert before - everything.keys == set(result["keys"]) and result["deleted"] is True
    assert result["prefixes"]["specs/"] == {
        "objects": len(LABELS),
        "size_bytes": sum(len(f.json()) for f in toy_fingerprints("1").values()),
    }
    assert spec_key("toxic", toy_fingerprints("2")["toxic"].id) in everything.keys
