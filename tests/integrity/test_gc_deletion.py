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
from several_specs import DAY_S, SharedOutput

from pipeline.cli import main
from pipeline.errors import RefusedError, StorageError
from pipeline.ledger import attempts
from pipeline.ledger.attempts import ENDED_AFTER_S, in_use
from pipeline.ledger.keys import spec_key
from pipeline.ledger.snapshots import contents
from pipeline.stores.local import LocalStore
from pipeline.stores.store import PROBE_KEY, Store, StoredObject, check_create_only


def test_snapshots_are_deleted_before_the_files_that_they_name(shared: SharedOutput) -> None:
    shared.store = recording = Recording(shared.store)
    for version in "123":
        shared.finish("job", version)
    assert shared.gc(1).keys == tuple(recording.deleted[:-1])
    assert recording.deleted[-1].startswith("attempts/in-use/gc-"), "its own mark"
    kinds = [key.partition("/")[0] for key in recording.deleted]
    assert kinds[:4] == ["snapshots"] * 4 and "snapshots" not in kinds[4:] and "labels" in kinds


def test_nothing_is_deleted_where_a_snapshot_is_broken(shared: SharedOutput) -> None:
    shared.finish("job", "1")
    shared.store.create("snapshots/00000002.json", b"{")
    before = shared.keys
    with pytest.raises(StorageError, match=r"00000002\.json: is not a snapshot"):
        shared.gc(1)
    assert shared.keys == before


def test_while_any_of_several_runs_is_active_nothing_is_deleted(shared: SharedOutput) -> None:
    for version in "12":
        shared.finish("job", version)
    before = shared.keys
    with ExitStack() as runs:
        runs.enter_context(in_use(shared.store))
        with in_use(shared.store):
            pass
        with pytest.raises(RefusedError, match=r"a run writes to this output .* 10 minutes"):
            shared.gc(1)
        assert before < shared.keys
        assert shared.gc(1, delete=False).keys, "a dry run only reads"
    assert shared.keys == before, "a run leaves no mark"
    # — a killed run leaves one, which ends by itself, and which gc deletes
    shared.store.create("attempts/in-use/run-killed", b"")
    shared.clock.now_s += ENDED_AFTER_S - 60
    with pytest.raises(RefusedError):
        shared.gc(1)
    shared.clock.now_s += 60
    removed = shared.gc(1).keys
    assert "attempts/in-use/run-killed" in removed and "snapshots/00000001.json" in removed


def test_a_run_of_hours_renews_its_mark(
    shared: SharedOutput, monkeypatch: pytest.MonkeyPatch
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
    with in_use(shared.store):
        shared.clock.now_s += 3 * ENDED_AFTER_S
        renewed.clear()
        marks.clear()
        assert renewed.wait(60)
        with pytest.raises(RefusedError):
            shared.gc(1)
        assert len(shared.keys) <= 2, "a mark is replaced"
    assert shared.keys == set()


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
    ends_before_gc: bool, shared: SharedOutput
) -> None:
    """The run publishes old answers again, so gc would delete the files of the new snapshot."""
    refused: set[str] = set()
    finished = shared.store
    assert isinstance(finished, MemoryStore)
    for version in "12":
        shared.finish("job", version)
    shards = shared.corpus.shards(finished)
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

            shared.store = Interrupted(store, number, run)
            try:
                shared.gc(1)
            except RefusedError:
                refused.add("gc")
        keys = {stored.key for stored in store.list("")}
        assert {*contents(store).files["key"].to_pylist()} <= keys, number
        assert not any(key.startswith("attempts/in-use/") for key in keys)
        if shared.store.operations < number:
            break
    else:
        pytest.fail("gc has more operations")
    assert number > 10
    assert refused == ({"run"} if ends_before_gc else {"run", "gc"})


def test_gc_that_was_killed_is_waited_for_ten_minutes(shared: SharedOutput) -> None:
    shared.finish("job", "1")
    shared.store.create("attempts/in-use/gc-killed", b"")
    shared.clock.now_s += ENDED_AFTER_S - 60
    with pytest.raises(RefusedError, match="or, if it was killed, for 10 minutes"):
        shared.store.create("attempts/in-use/run-other", b"")
        with in_use(shared.store):
            pass
    shared.clock.now_s += 60
    with in_use(shared.store):
        pass


def test_a_clock_that_is_a_week_ahead_ends_no_run_and_makes_no_object_old(
    shared: SharedOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in "12":
        shared.finish("job", version)
    # — of this machine alone: the store has a clock of its own
    monkeypatch.setattr(memory_store, "time", SimpleNamespace(time=shared.clock))
    monkeypatch.setattr("time.time", lambda: shared.clock() + 8 * DAY_S)
    with in_use(shared.store), pytest.raises(RefusedError):
        shared.gc(1)
    assert not shared.gc(1, older_than_days=7).keys
    shared.clock.now_s += 8 * DAY_S
    assert shared.gc(1, older_than_days=7).keys


@pytest.mark.parametrize("killed", ["run", "gc"])
def test_a_mark_from_before_the_clock_was_set_back_stops_nothing_and_makes_no_object_old(
    killed: str, shared: SharedOutput
) -> None:
    for version in "12":
        shared.finish("job", version)
    shared.clock.now_s += 8 * DAY_S
    shared.store.create(f"attempts/in-use/{killed}-killed", b"")
    shared.clock.now_s -= 8 * DAY_S
    with in_use(shared.store), pytest.raises(RefusedError, match=r"was \d s ago"):
        shared.gc(1)
    assert not shared.gc(1, older_than_days=7).keys


def test_a_new_input_is_neither_cut_nor_written_down(shared: SharedOutput) -> None:
    check_create_only(shared.store)
    assert shared.gc(1).keys == ()
    assert shared.keys == {PROBE_KEY}


def test_the_command_deletes_only_with_the_option_and_keeps_at_least_one(
    store: LocalStore,
    shared: SharedOutput,
    write_spec: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared.store = store
    for version in "12":
        shared.finish("job", version)
    input_keys = {"path": str(shared.corpus.folder), "id": "id"}
    spec = str(write_spec(input=input_keys, output=str(store.root)))
    monkeypatch.setenv("ASSAY_CACHE", str(shared.corpus.cache_dir))
    before = shared.keys
    assert main(["gc", spec, "--keep", "1", "--delete"]) == 0
    assert shared.keys == before, "all of it is a second old"
    assert "there is nothing to delete" in capsys.readouterr().out
    assert main(["gc", spec, "--keep", "1", "--older-than", "0"]) == 0
    assert "nothing was deleted" in capsys.readouterr().out and shared.keys == before
    assert main(["gc", spec, "--keep", "1", "--older-than", "-1"]) == 2
    assert capsys.readouterr().err.startswith("--older-than: write 0 or more days")
    assert main(["gc", spec, "--older-than", "0"]) == 0
    assert "kept snapshots  00000002, 00000001" in capsys.readouterr().out
    assert main(["gc", spec, "--delete"]) == 2
    assert capsys.readouterr().err.startswith("--keep: missing; write how many snapshots of each")
    assert main(["gc", spec, "--keep", "0", "--delete"]) == 2
    assert capsys.readouterr().err.startswith("--keep: at least one") and shared.keys == before
    assert main(["gc", spec, "--keep", "1", "--older-than", "0", "--delete", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert before - shared.keys == set(result["keys"]) and result["deleted"] is True
    assert result["prefixes"]["specs/"] == {
        "objects": len(LABELS),
        "size_bytes": sum(len(f.json()) for f in toy_fingerprints("1").values()),
    }
    assert spec_key("toxic", toy_fingerprints("2")["toxic"].id) in shared.keys
