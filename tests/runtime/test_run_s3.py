"""Whole runs of the command with input and output on S3, in a shell with ordinary AWS variables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from command import ASSAY, COMMANDS, SLOW_ON_RAY, TOY_ASSAY
from shell import BAD_CONNECTION, Shell

from pipeline.cli import main
from pipeline.ledger.snapshots import contents


@pytest.mark.parametrize(
    ("server", "command"),
    [
        pytest.param("moto", TOY_ASSAY, id="moto-toy"),
        pytest.param("moto", ASSAY, id="moto-ray", marks=SLOW_ON_RAY),
        pytest.param("seaweedfs", ASSAY, id="seaweedfs-ray", marks=SLOW_ON_RAY),
    ],
)
def test_a_run_over_a_bad_connection_is_complete_and_the_next_has_nothing_to_do(
    server: str, command: Sequence[str], shell_on: Callable[..., Shell]
) -> None:
    shell = shell_on(server, command=command, shares=BAD_CONNECTION, seed=7)
    assert shell.complete()["snapshot"] == 1
    shell.assert_every_row_once()
    assert min(shell.faults.counted[kind] for kind in BAD_CONNECTION) > 0, shell.faults.counted
    before = list(shell.output.list(""))
    shell.faults.shares, shell.faults.requests[:] = {}, []
    result = shell.complete()
    assert (result["snapshot"], result["documents_labelled"]) == (1, 0)
    assert list(shell.output.list("")) == before
    assert not [line for line in shell.faults.requests if line.startswith("GET") and "/in/" in line]
    written = [line for line in shell.faults.requests if line.startswith("PUT")]
    own = ("create-only-probe", "attempts/in-use/")
    assert written and all(any(name in line for name in own) for line in written)


@pytest.mark.parametrize("command", COMMANDS)
def test_credentials_that_expire_in_the_middle_end_the_run_and_the_next_goes_on(
    command: Sequence[str], shell_on: Callable[..., Shell]
) -> None:
    def expire(requests: list[str]) -> None:
        if sum("PUT" in line and "/labels/" in line for line in requests) == 5:
            shell.faults.watch = None
            shell.faults.shares = {"expired": 1.0}

    shell = shell_on("moto", command=command, watch=expire)
    code, _, err = shell.run()
    assert code == 3, err
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("assay: s3://") and "renew the credentials" in last
    done = {stored.key: stored.etag for stored in shell.output.list("labels/")}
    assert done
    shell.faults.shares = {}
    shell.complete()
    shell.assert_every_row_once()
    assert done.items() <= {s.key: s.etag for s in shell.output.list("labels/")}.items()


@pytest.mark.parametrize("command", COMMANDS)
def test_an_input_overwritten_in_the_middle_is_noticed_and_the_next_run_labels_the_new_one(
    command: Sequence[str], shell_on: Callable[..., Shell]
) -> None:
    def overwrite(requests: list[str]) -> None:
        planned = [at for at, line in enumerate(requests) if "PUT" in line and "/inputs/" in line]
        since = requests[planned[0] :] if planned else []
        # — before the first shard is read: a worker commits a shard before it reads the next
        if sum("GET" in line and "/in/corpus" in line for line in since) == 1:
            shell.faults.watch = None
            shell.write_corpus("NUMBER")  # as many bytes

    shell = shell_on("moto", command=command, watch=overwrite)
    code, out, err = shell.run()
    assert code == 3, err
    assert "Traceback" not in err
    result = json.loads(out)
    assert len(result["failed_shards"]) == result["missing_shards"] > 1
    assert all("changed while the job ran" in reason for reason in result["failed_shards"])
    shell.complete()
    shell.assert_every_row_once()
    (shard_path,) = {shard.path for shard in contents(shell.output, 1).shards}
    assert shard_path == shell.corpus


def test_a_store_that_ignores_the_condition_is_refused_before_any_work(
    shell_on: Callable[..., Shell],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = shell_on("moto", dropped_headers=frozenset({"if-none-match"}))
    for name, value in shell.environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", str(shell.spec)]) == 4
    *_, line = capsys.readouterr().err.splitlines()  # — on a busy machine after a line of progress
    assert line.startswith(f"assay: output: {shell.output.url}: a second create of")
    assert list(shell.output.list("")) == []
