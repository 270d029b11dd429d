"""`assay status` counts what the store holds, while a run goes on or after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from command import COMMANDS
from finished import Corpus, finish, toy_fingerprints
from hypothesis import given
from hypothesis import strategies as st
from s3fs import S3FileSystem
from servers import Server
from shell import DOCUMENTS, TASKS, Shell
from toy_assay import main_of_toy

from pipeline.cli import main
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore
from pipeline.stores.s3 import _SingleTry
from pipeline.verbs.status import (
    SHORTEST_S,
    WINDOW_S,
    Status,
    TaskStatus,
    docs_per_s,
    pace_of_last_run,
    status,
)

ROWS = [*(json.dumps({"id": f"d{i}", "text": f"Text {i}."}) for i in range(30)), "{broken"]
DOCS = len(ROWS) + 1  # the last is empty


@pytest.fixture
def spec_file(write_spec: Callable[..., Path], tmp_path: Path) -> Path:
    corpus = tmp_path / "corpus.jsonl"
    file = write_spec(input={"path": str(corpus), "id": "id", "shard_bytes": 2_600})
    corpus.write_text("\n".join([*ROWS, json.dumps({"id": "empty", "text": ""})]))
    return file


def status_of(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert main(["status", str(spec_file), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_before_the_first_run_every_document_is_missing_and_nothing_is_written(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"done": 0, "missing": DOCS, "failed": 0, "skipped": 0}
    assert status_of(spec_file, capsys) == {
        "documents": DOCS,
        "to_read": len(ROWS) - 1,
        "snapshot": None,
        "tasks": {"toxic": counts, "topic": counts},
        "reused": {"toxic": 0, "topic": 0},
        "docs_per_s": None,
        "eta_s": None,
    }
    assert not (tmp_path / "out").exists()


def test_after_a_run_each_document_is_done_or_failed(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_of_toy(["run", str(spec_file)]) == 0
    found = status_of(spec_file, capsys)
    counts = {"done": DOCS - 1, "missing": 0, "failed": 1, "skipped": 0}
    assert found["tasks"] == {"toxic": counts, "topic": counts}
    assert (found["documents"], found["snapshot"], found["eta_s"]) == (DOCS, 1, 0.0)
    corpus = tmp_path / "corpus.jsonl"
    new = [json.dumps({"id": f"n{i}", "text": f"New {i}."}) for i in range(5)]
    corpus.write_text("\n".join([corpus.read_text().replace("Text 3.", "Edited."), *new]))
    grown = status_of(spec_file, capsys)
    assert grown["documents"] == DOCS + 5 and grown["to_read"] == 6
    for words in (["status"], ["run", "--dry-run"]):
        assert main([words[0], str(spec_file), *words[1:]]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "to read at most 6;" in shown or "read by the model at most 6 documents;" in shown


def test_each_snapshot_is_listed_with_what_changed(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = load_spec(str(spec_file))
    store, corpus = LocalStore(Path(spec.output)), Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    first, second = toy_fingerprints("1"), toy_fingerprints("2")
    finish(store, corpus.shards(store), first, name=spec.name)
    corpus.write_file(1, seed=5)
    finish(store, corpus.shards(store), {**first, "topic": second["topic"]}, name=spec.name)
    capsys.readouterr()
    assert main(["status", str(spec_file), "--snapshots", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["snapshots"]
    assert one["changed"] == {"toxic": ["new"], "topic": ["new"]} and one["new_shards"] > 1
    assert [*two["changed"]] == ["topic"] and two["new_shards"] == two["removed_shards"] > 0
    assert main(["status", str(spec_file), "--snapshots"]) == 0
    assert "topic: new; toxic: new; input: " in " ".join(capsys.readouterr().out.split())


def test_what_is_deleted_of_one_task_is_missing_in_that_task(
    spec_file: Path, tmp_path: Path
) -> None:
    assert main_of_toy(["run", str(spec_file)]) == 0
    labels = tmp_path / "out" / "labels"
    now = time.time()
    for task in TASKS:
        for number, file in enumerate(sorted((labels / task).rglob("*.parquet"))):
            os.utime(file, (now - 100 + number, now - 100 + number))
    next((labels / "topic").rglob("*.parquet")).unlink()
    found = status(load_spec(str(spec_file)), cache_dir=tmp_path)
    assert found.tasks["toxic"] == TaskStatus(done=DOCS - 1, missing=0, failed=1)
    missing = found.tasks["topic"].missing
    assert 0 < missing < DOCS
    assert found.tasks["topic"].done + found.tasks["topic"].failed == DOCS - missing
    assert found.docs_per_s is not None
    assert found.eta_s == pytest.approx(missing / found.docs_per_s)


@given(
    gaps=st.lists(st.floats(0.5, 60), min_size=2, max_size=10),
    documents=st.integers(1, 50),
    wait=st.floats(0, 60),
)
def test_the_rate_is_what_was_committed_after_the_first_commit_over_the_time_since(
    gaps: list[float], documents: int, wait: float
) -> None:
    times = [1e9 + sum(gaps[: i + 1]) for i in range(len(gaps))]
    now = times[-1] + wait
    rate = docs_per_s([(at, documents) for at in reversed(times)], now)
    if now - times[0] < SHORTEST_S:
        assert rate is None
    else:
        assert rate == pytest.approx(documents * (len(times) - 1) / (now - times[0]))
    later = now + WINDOW_S + 1
    assert docs_per_s([(at, documents) for at in times], later) is None


NIGHT_S = 86_400.0


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], None),
        ([0], None),
        ([0, 4], None),
        ([0, 10, 20], (20, 1)),
        ([0, 10, NIGHT_S, NIGHT_S + 20], (20, 0.5)),
        ([0, 10, NIGHT_S], None),
        ([n * NIGHT_S + at for n in range(9) for at in (0, 40)], (40, 0.25)),
        ([0, 3_600, 7_201, 8_201], (1_000, 0.01)),
    ],
)
def test_the_pace_is_that_of_the_last_run(
    times: list[float], expected: tuple[float, float] | None
) -> None:
    pace = pace_of_last_run([(at, 10) for at in reversed(times)])
    assert pace == (None if expected is None else pytest.approx(expected))


def test_status_loads_neither_ray_nor_torch(spec_file: Path) -> None:
    program = (
        "import sys; from pipeline.cli import main; code = main(sys.argv[1:]); "
        "print({'ray', 'torch', 'transformers'} & set(sys.modules)); sys.exit(code)"
    )
    words = [sys.executable, "-c", program, "status", str(spec_file), "--json"]
    environment = {**os.environ, "ASSAY_CACHE": str(spec_file.parent / "cache")}
    out = subprocess.check_output(words, text=True, env=environment)
    assert out.splitlines()[-1] == "set()"


@pytest.fixture
def own_clients() -> Iterator[None]:
    """Clients of this test's server alone: fsspec keeps them by their options, not by AWS_*."""
    for is_over in (False, True):
        for client in (S3FileSystem, _SingleTry):
            client.clear_instance_cache()
        if not is_over:
            yield


@pytest.mark.usefixtures("own_clients")
@pytest.mark.parametrize("command", COMMANDS)
def test_it_follows_a_run_in_another_process_on_an_object_store(
    seaweedfs: Server,
    command: Sequence[str],
    shell_on: Callable[..., Shell],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    shell = shell_on("seaweedfs", command=command)
    for name, value in shell.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs.endpoint)  # not through the proxy
    spec = load_spec(str(shell.spec))
    seen: list[Status] = []

    def look(requests: list[str]) -> None:
        # — the run waits for the reply to this request, so it is at work meanwhile
        if not seen and sum("PUT" in line and "/labels/toxic/" in line for line in requests) == 5:
            seen.append(status(spec, cache_dir=tmp_path))

    shell.faults.watch = look
    code, _, err = shell.run()
    assert code == 0, err
    (between,) = seen
    for task in TASKS:
        counts = between.tasks[task]
        assert 0 < counts.done < DOCUMENTS and counts.failed == 0
        assert counts.done + counts.missing == DOCUMENTS
    assert between.snapshot is None
    after = status(spec, cache_dir=tmp_path)
    assert after.tasks == dict.fromkeys(TASKS, TaskStatus(DOCUMENTS, 0, 0))
    assert after.snapshot == 1
