"""Spans with recurrent states are read below copies of the cache, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from allocations import allocated_at_most

from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules import staged
from pipeline.inference.schedules.forward import ReadPoint
from pipeline.inference.schedules.staged import StagedSchedule, cache_copies, read_below

TinyModel = Callable[[str], LoadedModel]
FAMILIES = ["qwen3_5_text", "lfm2", "nemotron_h", "granitemoehybrid"]


@pytest.mark.parametrize("prefix, left", [(0, 0), (1, 1), (2, 1)])
def test_documents_read_the_last_token_of_the_prefix(
    prefix: int, left: int, tiny_model: TinyModel
) -> None:
    model = tiny_model("lfm2")
    point = ReadPoint(model.layers, ((1,), (2,)))
    schedule = StagedSchedule.from_prefix(model, [5] * prefix)
    reader = schedule.reader([point])
    assert len(schedule.pending_tokens) == left
    assert reader.question_tokens == 2 * 2
    [read] = reader.read([[1], [2, 3], [4]])
    assert read.at_suffixes.shape == (2, 3, 48)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("copies, forwards", [(2, 10), (4, 8), (16, 6)])
def test_documents_of_one_length_are_read_together_with_the_states_of_each_alone(
    family: str,
    copies: int,
    forwards: int,
    tiny_model: TinyModel,
) -> None:
    model = tiny_model(family)
    points = [ReadPoint(model.layers, ((1,), (2, 3)), mean=True)]
    documents = [[9, 8, 7], [6, 5], [4, 3, 2], [7, 7, 7], [1, 2, 3, 4]]
    reader = StagedSchedule.from_prefix(model, [5, 6, 7]).reader(points)
    alone = [reader.read([document])[0] for document in documents]
    few = replace(model, cache_copies=copies)
    reader = StagedSchedule.from_prefix(few, [5, 6, 7]).reader(points)
    counted: list[int] = []
    handle = model.decoder.register_forward_pre_hook(lambda *_: counted.append(1))
    [together] = reader.read(documents)
    handle.remove()
    assert len(counted) == forwards
    assert together.mean is not None
    for row, expected in enumerate(alone):
        assert expected.mean is not None
        of_row = together.at_suffixes[:, row]
        torch.testing.assert_close(of_row, expected.at_suffixes[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(together.mean[row], expected.mean[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_46_suffixes_16_copies_are_in_memory_at_most(
    family: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    suffixes = tuple((7, number + 10) for number in range(46))
    schedule = StagedSchedule.from_prefix(model, [5, 6, 7])
    rows: list[int] = []
    read_below = staged.read_below

    def watched(*args: object) -> object:
        rows.append(len(args[2]))  # type: ignore[arg-type]
        return read_below(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(staged, "read_below", watched)
    [read] = schedule.reader([ReadPoint(model.layers, suffixes)]).read([[9, 8, 7]])
    assert rows == [1, 16, 16, 14]
    searched = schedule.with_tokens([9, 8, 7]).states(suffixes)
    torch.testing.assert_close(searched, read.at_suffixes[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_are_as_many_copies_of_a_cache_as_fit_into_memory(
    family: str, tiny_model: TinyModel
) -> None:
    model, tokens = tiny_model(family), 1_000
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    _, text = read_below(model, None, [0], ids, [model.layers])
    three = 3 * allocated_at_most(lambda: deepcopy(text.cache))
    for free_bytes in (1, 10 * three, 20 * three, 1 << 40):
        copies = cache_copies(model, tokens=tokens, free_bytes=free_bytes)
        assert copies == 1 or copies * three <= free_bytes / 2
        assert copies == 16 or (copies + 1) * three > 0.7 * free_bytes / 2
