"""The benchmark of tables runs on few documents."""

from __future__ import annotations

import sys

import pytest

from benchmarks import tables


@pytest.mark.slow
def test_each_format_is_read_and_exported_to(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("URI", "WAREHOUSE"):  # — the benchmark sets them, and the test removes them
        monkeypatch.setenv(f"{tables.CATALOG}{name}", "")
    monkeypatch.setattr(sys, "argv", ["tables", "--documents", "60", "--rounds", "2"])
    tables.main()
    first, second, _, *lines = capfd.readouterr().out.splitlines()
    assert first == "60 documents in 1 shards of two tasks"
    assert second.startswith("1 files written to each table, ")
    kinds = ["delta", "iceberg", "lance"]
    read, exported = lines[:3], lines[3:]
    assert [line.split()[:2] for line in read] == [["read", kind] for kind in kinds]
    assert all("times the time of Parquet" in line for line in read)
    kinds = ["parquet", *kinds]
    assert [line.split()[:2] for line in exported] == [["export", kind] for kind in kinds]
    assert all("documents/s, peak" in line for line in exported)
