"""A run with a bound ends between shards, keeps what it has, and says what is left."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from command import COMMANDS, ONE_PROCESS, assay
from counted_runs import Counting, Output, corpus
from stages import read_and_commit
from toy_assay import main_of_toy

from pipeline.errors import SpecError
from pipeline.options import RunOptions
from pipeline.runtime.progress import Mailbox, Post

HOUR = 3600.0


@pytest.mark.parametrize(
    "options, workers, seconds, named",
    [
        (RunOptions(max_hours=2), 8, 2 * HOUR, "--max-hours 2"),
        (RunOptions(max_cost=10, price=2), 4, 1.25 * HOUR, "--max-cost 10 (for 4 workers)"),
        (RunOptions(max_cost=10, price=2), 1, 5 * HOUR, "--max-cost 10 (for 1 worker)"),
        (RunOptions(max_hours=1, max_cost=10, price=2), 4, HOUR, "--max-hours 1"),
        (RunOptions(max_hours=2, max_cost=10, price=2), 5, HOUR, "--max-cost 10 (for 5 workers)"),
    ],
)
def test_the_bound_is_the_smaller_of_time_and_workers_times_price(
    options: RunOptions, workers: int, seconds: float, named: str
) -> None:
    assert options.bound(workers) == (seconds, named)
    assert RunOptions().bound(workers) is None


@pytest.mark.parametrize(
    "options, place",
    [
        ({"max_hours": 0}, "max_hours: write a number above 0"),
        ({"max_hours": math.inf}, "max_hours: write a number above 0"),
        ({"max_cost": -1, "price": 1}, "max_cost: write a number above 0"),
        ({"max_cost": 1, "price": 0}, "price: write a number above 0"),
        ({"max_cost": 1}, "price: missing; a limit of the cost needs it"),
        ({"price": 1}, "max_cost: missing; a price limits nothing alone"),
        ({"stall_limit": 0}, "stall_limit: write a number above 0"),
    ],
)
def test_a_wrong_bound_names_the_option(options: dict[str, float], place: str) -> None:
    with pytest.raises(SpecError, match=place):
        RunOptions(**options)


def test_shards_that_have_begun_are_finished_and_the_next_run_goes_on(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.write(corpus(40))
    late_s = 0.0
    label = Counting.label

    def slow(self: Counting, documents: Any, **how: Any) -> Any:
        nonlocal late_s
        late_s += 1_000
        return label(self, documents, **how)

    monkeypatch.setattr(Counting, "label", slow)
    clock = SimpleNamespace(time=lambda: time.time() + late_s)
    monkeypatch.setattr("pipeline.runtime.job.time", clock)
    outcome = output.run(max_hours=2_500 / HOUR)
    assert outcome.stopped is not None and outcome.stopped.startswith("--max-hours")
    assert not outcome.complete and outcome.snapshot is None
    done = outcome.shards - outcome.missing_shards
    assert done == 3 and output.asked.total() == 40 - outcome.missing_rows > 0
    part = output.run(max_cost=1e-9, price=1, publish_partial=True)
    assert part.snapshot == 1 and len(output.labels()) == output.asked.total()
    whole = output.run()
    assert whole.complete and whole.snapshot == 2 and whole.stopped is None
    assert output.asked.total() == 40 and set(output.asked.values()) == {1}


def test_a_run_whose_time_is_over_reads_no_texts(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.write(corpus(40))
    monkeypatch.setattr("pipeline.runtime.job.SMALL_INPUT_BYTES", -1)
    monkeypatch.setattr("pipeline.runtime.graph.read_items", read_and_commit)
    # — the time ends between the start of the first round and the first shard
    later_s = chain([0], repeat(2 * HOUR))
    clock = SimpleNamespace(time=lambda: time.time() + next(later_s))
    monkeypatch.setattr("pipeline.runtime.job.time", clock)
    outcome = output.run(max_hours=1)
    assert outcome.missing_rows == 40 and outcome.stopped == "--max-hours 1"
    assert not output.asked and not list(output.folder.glob("out/**/*.parquet"))
    monkeypatch.setattr("pipeline.runtime.job.time", time)
    assert output.run(max_hours=1).complete and output.asked.total() == 40


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("shared_ray")
def test_the_end_of_a_run_is_by_the_drivers_clock_wherever_the_worker_is() -> None:
    mailbox = ray.remote(num_cpus=0)(Mailbox).remote()
    post = Post(mailbox, 1.0)
    ends = time.time() + 60
    assert post.on_this_clock(ends) == ends  # nobody has told the mailbox the time
    ray.get(mailbox.take.remote(time.time() + HOUR))
    assert ends - HOUR - 30 < post.on_this_clock(ends) < ends - HOUR + 30
    ray.kill(mailbox)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:  # it may answer for a moment
            ray.get(mailbox.take.remote(time.time()), timeout=60)
    assert post.on_this_clock(ends) == ends


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_whose_time_is_over_ends_with_3_and_labels_nothing(
    command: Sequence[str], write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    spec = write_spec()
    code, out, err = assay(spec, "--max-hours=1e-9", command=command)
    assert code == 3, err
    assert (out["stopped"], out["missing_documents"]) == ("--max-hours 1e-09", 1)
    assert "ended by --max-hours 1e-09; left: 1 of 1 shards" in err.strip().splitlines()[-1]
    assert not list((tmp_path / "out").glob("labels/**/*.parquet"))
    assert assay(spec, "--max-hours=1", command=command)[0] == 0


def test_the_last_line_says_what_is_left_and_how_to_go_on(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(write_spec()), "--max-cost", "1e-9", "--price", "2"]
    assert main_of_toy(words) == 3
    line = capsys.readouterr().out.strip().splitlines()[-1]
    left = "left: 1 of 1 shards and 1 of 1 documents; run the same command again to go on"
    assert line.startswith("ended by --max-cost 1e-09 (for ") and line.endswith(left)


@pytest.mark.parametrize(
    "words, line",
    [
        (["--sample", "50"], "--sample: write a share above 0 and below 1"),
        (["--where", "nope = 1"], "--where: the first 1 rows of "),
        (["--max-hours", "soon"], "--max-hours: write a number"),
        (["--max-cost", "3"], "--price: missing"),
    ],
)
def test_the_command_refuses_a_wrong_value(
    words: list[str], line: str, write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_of_toy(["run", str(write_spec()), *words]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(line)


@pytest.mark.parametrize("command", [ONE_PROCESS])
def test_a_slice_of_the_command_says_what_it_labelled(
    command: Sequence[str], write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    spec = write_spec()
    lines = [json.dumps({"id": str(i), "text": f"Text {i}.", "n": i}) for i in range(20)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    code, out, err = assay(spec, "--where", "n >= 15", command=command)
    assert code == 0, err
    assert out["slice"] == {"where": "n >= 15"} and out["documents_in_slice"] == 5
    assert (out["snapshot"], out["documents_read_by_model"]) == (1, 5)
    code, out, err = assay(spec, command=command)
    assert (code, out["documents_read_by_model"], out["slice"]) == (0, 15, None)
