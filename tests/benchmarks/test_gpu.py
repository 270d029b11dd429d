"""The GPU benchmark's CPU twin takes the whole path, without Ray; it asserts laws and no speed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from stages import run_without_ray

from benchmarks.gpu import Row, main, measure, table
from benchmarks.parts import Ended, in_turn
from benchmarks.synthetic import TWIN, Scale

NEEDS_A_GPU = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu(): assert {passes}

def test_elsewhere(): assert False
"""


@pytest.fixture
def twin(tmp_path: Path) -> Scale:
    """The twin with a test file that takes no time."""
    return with_tests(tmp_path, passes=True)


def with_tests(folder: Path, *, passes: bool) -> Scale:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (folder / "test_one.py").write_text(NEEDS_A_GPU.format(passes=passes))
    return replace(TWIN, tests=(str(folder / "test_one.py"),))


def test_every_part_of_the_twin_is_measured(twin: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)
    results = in_turn(twin.parts, lambda part, _limit_s: measure(twin, part), budget_s=math.inf)
    rows = {(row.part, row.method): row for row in results if isinstance(row, Row)}
    assert list(rows) == [
        ("tests", "pytest -m gpu"),
        ("tiny", "device"),
        ("tiny", "tree"),
        ("tiny", "expand, 8 at once"),
        ("tiny", "expand, 32 at once"),
        ("tiny", "continuous batching"),
        ("run", "device"),
        ("run", "tree"),
        ("run", "assay run"),
    ]
    assert rows["tests", "pytest -m gpu"].note.startswith("1 passed, 1 deselected")
    for row in rows.values():
        if row.method not in ("pytest -m gpu", "device"):
            assert_possible(row, twin)


def assert_possible(row: Row, scale: Scale) -> None:
    """Figures are positive and finite, and shares are between 0 and 1."""
    for figure in (row.documents_per_s, row.tokens_per_s, row.product_flops, row.product_share):
        assert figure is not None and 0 < figure < math.inf, row
    assert row.tokens_per_s == pytest.approx(scale.tokens * (row.documents_per_s or 0))
    assert row.product_share is not None and row.product_share < 1, row
    assert row.busy is None or 0 <= row.busy <= 1, row
    assert row.peak_bytes is None or row.peak_bytes >= 0, row


def test_failed_tests_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 1: 1 failed, 1 deselected"):
        list(measure(with_tests(tmp_path, passes=False), "tests"))


def test_a_gpu_on_which_no_test_ran_is_named(tmp_path: Path) -> None:
    scale = replace(with_tests(tmp_path, passes=True), device="cuda")
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.gpu\n@pytest.mark.skip\ndef test_it(): pass\n"
    )
    with pytest.raises(RuntimeError, match="exit code 0: 1 skipped"):
        list(measure(scale, "tests"))


def test_parts_beyond_the_budget_are_named_in_the_table_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    assert main(to=file, seconds=0, cpu_twin=True) == 1
    reason = "not started: 0 s are left and it needs 1 s"
    assert json.loads(file.read_text()) == [
        {"part": name, "reason": reason} for name in ("tests", "tiny", "run")
    ]
    assert f"run: {reason}" in capsys.readouterr().out.splitlines()


def test_a_table_has_the_target_of_each_measurement_that_has_one() -> None:
    lines = table([Row("0.6B", "tree", 12.5, 12_500.0), Ended("4B", "not started")]).splitlines()
    assert lines[1].split() == ["0.6B", "tree", "12.50", "12,500", "370", "documents/s"]
    assert lines[2:] == ["4B: not started"]


@pytest.mark.parametrize("options", [{"parts": ("tiny",)}, {}])
def test_without_a_gpu_only_the_twin_runs(
    options: dict[str, tuple[str, ...]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(**options) == 2
    assert "sees no GPU here" in capsys.readouterr().err
