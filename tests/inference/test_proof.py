"""The proof of a model finds what is off by one, in every number format and for any window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dense_oracle import needs_native
from numpy.typing import NDArray
from table_faults import FAULTS, end_early, planted

from pipeline.inference.attention import hook, tiles
from pipeline.inference.attention.reference import attend_plainly
from pipeline.inference.attention.tree import Tree
from pipeline.inference.loading import prepare
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.proof import tolerance, tree_error

MakeNetwork = Callable[..., Any]
FORMATS = pytest.mark.parametrize(
    "number_format",
    [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16],
    ids=str,
)


def long_windows(model: LoadedModel) -> LoadedModel:
    """The model with windows that no proof could fill."""
    for owner in owners_of_windows(model):
        owner.sliding_window = 4_096
    return replace(model, windows=frozenset(window and 4_096 for window in model.windows))


def owners_of_windows(model: LoadedModel) -> list[Any]:
    owners = (model.network.config, *model.network.modules())
    return [owner for owner in owners if getattr(owner, "sliding_window", None)]


def shift_positions(patch: pytest.MonkeyPatch) -> None:
    made = Tree.__init__

    def shifted(tree: Tree, *args: Any) -> None:
        made(tree, *args)
        tree.positions[tree.document_rows :] += 1

    patch.setattr(Tree, "__init__", shifted)


def hide_a_key(patch: pytest.MonkeyPatch) -> None:
    right = tiles._tiles

    def without_the_last(*args: Any, **options: Any) -> NDArray[np.int32]:
        table = right(*args, **options)
        end_early(table)
        return table

    patch.setattr(tiles, "_tiles", without_the_last)


def widen_windows(patch: pytest.MonkeyPatch) -> None:
    plan = hook.tile_plan

    def wider(*args: Any, window: int | None, **options: Any) -> Any:
        return plan(*args, window=window and window + 1, **options)

    patch.setattr(hook, "tile_plan", wider)


@FORMATS
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "phi3"])
def test_a_model_is_proved_with_windows_of_any_size(
    family: str, number_format: torch.dtype, make_network: MakeNetwork
) -> None:
    model = long_windows(prepare(make_network(family).to(number_format)))
    assert tree_error(model) <= tolerance(model)
    owners = owners_of_windows(model)
    assert {owner.sliding_window for owner in owners} <= {4_096}, "they are as before"


@FORMATS
@pytest.mark.parametrize(
    ("plant", "family"),
    [
        (shift_positions, "llama"),
        (shift_positions, "gemma3_text"),
        (hide_a_key, "llama"),
        (hide_a_key, "gemma3_text"),
        (widen_windows, "mistral"),
        (widen_windows, "gemma3_text"),
    ],
)
def test_one_position_one_key_or_a_window_that_is_off_by_one_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    family: str,
    number_format: torch.dtype,
    make_network: MakeNetwork,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = long_windows(prepare(make_network(family).to(number_format)))
    plant(monkeypatch)
    assert tree_error(model) > tolerance(model)


@pytest.mark.parametrize("kernel", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_off_by_one_in_a_loop_of_a_kernel_is_found(
    fault: Callable[..., None], kernel: str, make_network: MakeNetwork
) -> None:
    model = prepare(make_network("llama"))
    if kernel == "reference":
        model = replace(model, kernel=attend_plainly)
    assert tree_error(model) < tolerance(model)
    with planted(fault):
        # — NaN too, of a row that sees nothing
        assert not tree_error(model) <= 30 * tolerance(model)
