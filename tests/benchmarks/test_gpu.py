"""The GPU benchmark's CPU twin takes the whole path, without Ray; it asserts laws and no speed."""

from __future__ import annotations

import json
import math

import pytest
from stages import run_without_ray

from benchmarks.gpu import main

MEASURED = [
    ("tiny", "device"),
    ("tiny", "tree"),
    ("tiny", "expand, 8 at once"),
    ("tiny", "expand, 32 at once"),
    ("tiny", "continuous batching"),
    ("run", "device"),
    ("run", "tree"),
    ("run", "assay run"),
]


def test_every_part_of_the_twin_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    assert main(cpu_twin=True) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["part"], row["method"]) for row in rows] == MEASURED
    for row in rows:
        assert not row["error"]
        if row["method"] != "device":
            assert 0 < row["documents_per_s"] < math.inf, row
            assert 0 < row["product_share"] < 1, row
            assert row["peak_bytes"] is None or row["peak_bytes"] >= 0, row


def test_a_method_that_fails_is_named_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu.expand", int)
    assert main(parts=("tiny",), cpu_twin=True) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 5
    failed = [row for row in rows if row["error"]]
    assert [row["method"] for row in failed] == ["expand, 8 at once", "expand, 32 at once"]
    assert all(row["error"].startswith("TypeError: ") for row in failed)


def test_unknown_parts_and_a_missing_gpu_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main() == 2
    assert "sees no GPU here" in capsys.readouterr().err
    assert main(parts=("4B",), cpu_twin=True) == 2
    assert "there is no ['4B']; choose from ['tiny', 'run']" in capsys.readouterr().err
