"""The benchmark of tables runs on few documents."""

from __future__ import annotations

import sys

import pytest

from benchmarks import tables


@pytest.mark.slow
def test_each_format_is_read_and_exported_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("URI", "WAREHOUSE"):  # — the benchmark sets them, and the test removes them
        monkeypatch.setenv(f"{tables.CATALOG}{name}", "")
    monkeypatch.setattr(sys, "argv", ["tables", "--documents", "60", "--rounds", "2"])
    tables.main()
    _, first, *lines = capsys.readouterr().out.splitlines()
    assert first == "60 documents in 1 shards of two tasks"
    words = [line.split()[:2] for line in lines]
    kinds = ["parquet", "delta", "iceberg", "lance"]
    assert words == [[verb, kind] for verb in ("read", "export") for kind in kinds]
    assert all("times the time" in line for line in lines[:4])
    assert all("documents/s, peak" in line for line in lines[4:])
