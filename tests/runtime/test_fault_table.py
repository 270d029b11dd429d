"""The fault table: after every fault rows out equal rows in, none twice, none missing.

`pytest -s tests/runtime/test_fault_table.py` prints the table. An environment variable of the
command names the place of a fault (`ledger.failpoints`). The connection's faults are drawn with the
seed that is shown. `make test` has two rows, on one server and without Ray (`toy_assay`): the laws
of the others are in the small in `test_histories`, `test_run_s3`, `test_failed_rows` and
`test_commit_faults`, and on Ray in `test_killed_runs`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import libfaketime
import psutil
import pytest
from command import ASSAY, SLOW_ON_RAY, TOY_ASSAY
from shell import BAD_CONNECTION, DOCUMENTS, TASKS, Shell

from pipeline.ledger.snapshots import read_snapshot

Row = Callable[..., None]  # of the table
SLOW = pytest.mark.slow
SERVERS = [
    pytest.param(("moto", TOY_ASSAY), id="moto-toy"),
    pytest.param(("moto", ASSAY), id="moto-ray", marks=SLOW_ON_RAY),
    pytest.param(("seaweedfs", ASSAY), id="seaweedfs-ray", marks=SLOW_ON_RAY),
]
# The command with Ray under libfaketime, whose lock a fork cannot release if another thread has it
# (wolfcw/libfaketime#331): it imports at once what it otherwise imports while Ray forks.
IMPORTED_ASSAY = (
    sys.executable,
    "-c",
    "import sys, pipeline.runtime.graph; from pipeline.cli import main; sys.exit(main())",
)
# Where the driver, or the worker that commits, can be when the driver is killed.
PLACES = [
    "probed",
    "planned",
    "specs recorded",
    "create 0",
    "create 1",
    "create 2",
    "created",
    "labelled",
    "published",
]
FEW_PLACES = ["specs recorded", "create 1", "labelled"]  # of `make test`
# The same, of new shards whose texts the output answers.
REUSING_PLACES = ["create 0", "indexed", "planned", "created"]


@pytest.fixture(params=SERVERS)
def shell(request: pytest.FixtureRequest, shell_on: Callable[..., Shell]) -> Shell:
    """A shell for the command on a server."""
    server, command = request.param
    return shell_on(server, command=command)


@pytest.fixture(scope="module")
def lines() -> Iterator[list[str]]:
    """The lines of the table, which are printed at the end."""
    lines: list[str] = []
    yield lines
    print("\n" + "\n".join(lines))


@pytest.fixture
def table(lines: list[str], request: pytest.FixtureRequest) -> Row:
    """Takes a row of the table: the fault, where it was, and counts."""

    def add(fault: str, **counts: object) -> None:
        where = request.node.callspec.id
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        lines.append(f"{fault} | {where} | documents {DOCUMENTS}, {shown}, lost 0, doubled 0")

    return add


def kill_at(shell: Shell, place: str, file: Path) -> bool:
    """Kills the driver when it, or a worker, comes to the place; False if none ever does."""
    process = shell.start(ASSAY_FAULT=f"{place}=wait:{file}")
    family = psutil.Process(process.pid)
    while not file.exists():
        if process.poll() is not None:
            process.communicate()
            return False
        time.sleep(0.02)
    workers = family.children(recursive=True)
    process.kill()
    process.communicate()
    # — Ray's own processes end by themselves, except one that sleeps at the place
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(workers, timeout=60)
    return True


def kill_at_each(shell: Shell, places: Sequence[str], folder: Path) -> None:
    """Kills a run at each of the places, one after the other."""
    killed = [place for place in places if kill_at(shell, place, folder / place)]
    assert killed == places


def test_the_driver_killed_at_every_commit_point(shell: Shell, tmp_path: Path, table: Row) -> None:
    places = PLACES if shell.command == ASSAY else FEW_PLACES
    kill_at_each(shell, places, tmp_path)
    done = {stored.key: stored.etag for stored in shell.output.list("labels/")}
    assert shell.complete()["documents_labelled"] == 0  # the last kill came with all done
    assert done == {stored.key: stored.etag for stored in shell.output.list("labels/")}
    shell.assert_every_row_once()
    table("driver killed at every commit point", kills=len(places))


@SLOW
def test_the_driver_killed_where_answers_are_reused(
    shell: Shell, tmp_path: Path, table: Row
) -> None:
    shell.write_corpus("text")
    shell.complete()
    shell.write_corpus("text", texts=DOCUMENTS // 2)
    kill_at_each(shell, REUSING_PLACES, tmp_path)
    assert shell.complete()["documents_read_by_model"] == 0
    shell.assert_every_row_in_snapshot()
    for task in TASKS:
        rows = [{**row, "doc_id": ""} for row in shell.rows(task)]
        assert rows[: DOCUMENTS // 2] == rows[DOCUMENTS // 2 :]
    table("driver killed where answers are reused", kills=len(REUSING_PLACES))


@SLOW
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("shell", SERVERS[1:], indirect=True)
@pytest.mark.parametrize("place", ["document d100", "create 1"])
def test_a_worker_of_ray_killed(place: str, shell: Shell, tmp_path: Path, table: Row) -> None:
    file = tmp_path / "died"
    shell.complete(ASSAY_FAULT=f"{place}=die:{file}")
    assert file.exists()
    shell.assert_every_row_once()
    table(f"worker killed while {'labelling' if 'document' in place else 'committing'}", kills=1)


def both(first: Shell, second: Shell) -> list[dict[str, Any]]:
    """Runs two shells at once; the result of each."""
    processes = [first.start(), second.start()]
    ended = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], [err for _, err in ended]
    return [json.loads(out) for out, _ in ended]


def test_two_runs_at_once_on_one_output(shell: Shell, table: Row) -> None:
    results = both(shell, shell)
    files = shell.label_files()
    created = sum(result["objects_created"] for result in results)
    assert created == files + len(list(shell.output.list("documents/")))
    shell.assert_every_row_once()
    assert [result["snapshot"] for result in results] == [1, 1]
    table("two runs at once", runs=2)


@SLOW
def test_two_runs_with_different_specs_at_once(shell: Shell, table: Row) -> None:
    mood = {"name": "mood", "question": "Happy?", "labels": ["glad", "sad"]}
    topic = {"name": "topic", "question": "About what?", "labels": ["art", "law", "sport"]}
    other = shell.other(name="other", tasks=[topic, mood])
    results = both(shell, other)
    assert sorted(result["snapshot"] for result in results) == [1, 2]
    for again, tasks in ((shell, ("toxic", "topic")), (other, ("topic", "mood"))):
        assert again.complete()["documents_labelled"] == 0  # each finds its own snapshot
        again.assert_every_row_once(*tasks)
    table("two runs with different specs", runs=2)


@SLOW
def test_a_bad_connection_and_a_killed_driver(shell: Shell, tmp_path: Path, table: Row) -> None:
    shell.faults.shares = BAD_CONNECTION
    assert kill_at(shell, "create 1", tmp_path / "waited")
    shell.complete()
    shell.assert_every_row_once()
    injected = " + ".join(f"{shell.faults.counted[kind]} {kind}" for kind in BAD_CONNECTION)
    assert min(shell.faults.counted[kind] for kind in BAD_CONNECTION) > 0
    table("bad connection, driver killed", seed=shell.faults.seed, kills=1, injected=injected)


@SLOW
@pytest.mark.parametrize("shell", SERVERS[:2], indirect=True)
@pytest.mark.parametrize("hours", ["+1h", "-1h"])
def test_a_clock_that_is_an_hour_off(hours: str, shell: Shell, tmp_path: Path, table: Row) -> None:
    assert kill_at(shell, "create 1", tmp_path / "waited")
    library = Path(libfaketime.__file__).parent / "vendor/libfaketime/src/libfaketime.so.1"
    clock = {"LD_PRELOAD": str(library), "FAKETIME": hours, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    clocked = replace(shell, command=IMPORTED_ASSAY) if shell.command == ASSAY else shell
    number = clocked.complete(**clock)["snapshot"]
    shell.assert_every_row_once()
    created_at = datetime.fromisoformat(read_snapshot(shell.output, number)["created_at"])
    off_s = (created_at - datetime.now(UTC)).total_seconds()
    assert abs(abs(off_s) - 3600) < 600, "the clock was not off"
    assert shell.complete()["snapshot"] == number  # with the clock set right again
    table(f"clock {hours} in the second run, driver killed in the first", kills=1)
