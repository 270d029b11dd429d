"""The GPU benchmark's CPU twin takes the whole path, without Ray; it asserts laws and no speed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from stages import run_without_ray

from benchmarks.gpu import GPU, main
from pipeline.inference.alternatives import answers_alone
from pipeline.inference.engine import DocumentIds
from pipeline.inference.labels.answers import Readouts
from pipeline.inference.labels.prompt_tokens import PromptTokens
from pipeline.inference.model.loaded import LoadedModel
from pipeline.runtime.assembly import CUDA_BATCH_TOKENS

MEASURED = [
    ("tiny", "device"),
    ("tiny", "exactness"),
    ("tiny", "tree"),
    ("run", "device"),
    ("run", "tree"),
    ("run", "assay run"),
]


def test_every_part_of_the_twin_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    monkeypatch.setattr("benchmarks.gpu.SHARDS", 4)
    assert main(cpu_twin=True) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["part"], row["method"]) for row in rows] == MEASURED
    for row in rows:
        assert not row["error"]
        if row["method"] not in ("device", "exactness"):
            assert 0 < row["documents_per_s"] < math.inf, row
            assert 0 < row["product_share"] < 1, row
            assert row["peak_bytes"] is None or row["peak_bytes"] >= 0, row


def test_a_method_that_fails_is_named_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the engine had left out a token of every document."""

    def longer(
        model: LoadedModel, prompt: PromptTokens, document: DocumentIds, *, readouts: Readouts
    ) -> list[NDArray[np.float32]]:
        return answers_alone(model, prompt, [*document, 1], readouts=readouts)

    monkeypatch.setattr("pipeline.verbs.exactness.answers_alone", longer)
    assert main(parts=("tiny",), cpu_twin=True) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3
    [failed] = [row for row in rows if row["error"]]
    assert failed["method"] == "exactness"
    assert failed["error"].startswith("ArithmeticError: p differs by ")


def test_what_a_call_does_beside_its_batches_is_a_small_share_of_it() -> None:
    assert GPU.documents * GPU.tokens >= 15 * CUDA_BATCH_TOKENS


def test_unknown_parts_and_a_missing_gpu_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main() == 2
    assert "sees no GPU here" in capsys.readouterr().err
    assert main(parts=("7B",), cpu_twin=True) == 2
    assert "there is no ['7B']; choose from ['tiny', 'run']" in capsys.readouterr().err
