"""The benchmark of encoders runs on a small model."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import encoders


def test_both_engines_have_the_same_answers_and_a_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    monkeypatch.setattr(encoders, "SIZES", small)
    monkeypatch.setattr(encoders, "WORDS", 200)
    words = ["encoders", "--documents", "20", "--tokens", "30", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", words)
    encoders.main()
    first, *lines = capsys.readouterr().out.splitlines()
    difference = re.fullmatch(r".*largest difference of p (\S+)", first)
    assert difference is not None and float(difference[1]) < 1e-4
    assert [line.split()[0] for line in lines] == ["assay", "transformers"]
    assert all("documents/s" in line for line in lines)
