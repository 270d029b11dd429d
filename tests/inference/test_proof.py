"""The proof of a model finds what is off by one, in every number format and for any window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_oracle import needs_native

from pipeline.inference.attention import kernels
from pipeline.inference.attention import plan as planning
from pipeline.inference.attention.tree import Tree
from pipeline.inference.loading import prepare
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.processor import native
from pipeline.inference.proof import tolerance, tree_error
from pipeline.inference.schedules import forward

MakeNetwork = Callable[..., Any]
FORMATS = pytest.mark.parametrize(
    "number_format", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
FAMILIES = pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "phi3"])


def long_windows(model: LoadedModel) -> LoadedModel:
    """The model with windows that no proof could fill."""
    for owner in (model.network.config, *model.network.modules()):
        if getattr(owner, "sliding_window", None):
            owner.sliding_window = 4_096
    return replace(model, windows=frozenset(window and 4_096 for window in model.windows))


def shift_positions(patch: pytest.MonkeyPatch) -> None:
    positions = Tree.positions.fget

    def shifted(tree: Tree) -> Any:
        of_rows = positions(tree)  # type: ignore[misc]
        of_rows[tree.document_rows :] += 1
        return of_rows

    patch.setattr(Tree, "positions", property(shifted))


def hide_a_key(patch: pytest.MonkeyPatch) -> None:
    documents = planning._over_documents

    def without_the_last(*args: Any) -> Any:
        for segment in documents(*args):
            keys = segment.keys
            yield replace(segment, keys=keys.part(0, keys.tokens - 1))

    patch.setattr(planning, "_over_documents", without_the_last)


def widen_windows(patch: pytest.MonkeyPatch) -> None:
    plan = forward.plan_attention

    def wider(tree: Tree, *, window: int | None, **options: Any) -> Any:
        return plan(tree, window=window and window + 1, **options)

    patch.setattr(forward, "plan_attention", wider)


@FORMATS
@FAMILIES
def test_a_model_is_proved_with_windows_of_any_size(
    family: str, number_format: torch.dtype, make_network: MakeNetwork
) -> None:
    model = long_windows(prepare(make_network(family).to(number_format)))
    assert tree_error(model) <= tolerance(model)
    assert all(window in {None, 4_096} for window in model.windows), "they are as before"


@FORMATS
@FAMILIES
@pytest.mark.parametrize("plant", [shift_positions, hide_a_key, widen_windows])
def test_one_position_one_key_or_a_window_that_is_off_by_one_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    family: str,
    number_format: torch.dtype,
    make_network: MakeNetwork,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = long_windows(prepare(make_network(family).to(number_format)))
    plant(monkeypatch)
    has_none = plant is widen_windows and model.windows == {None}
    assert (tree_error(model) > tolerance(model)) != has_none


@needs_native
@pytest.mark.parametrize("number_format", [torch.float32, torch.bfloat16], ids=str)
@FAMILIES
@pytest.mark.parametrize("fault", ["none", "offset", "window"])
def test_a_kernel_that_is_off_by_one_is_found(
    fault: str,
    family: str,
    number_format: torch.dtype,
    make_network: MakeNetwork,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if number_format not in native.formats():
        pytest.skip("no products of bfloat16")
    monkeypatch.setattr(kernels, "is_native", lambda dtype, _dim: dtype in native.formats())
    model = long_windows(prepare(make_network(family).to(number_format)))
    right = native.attend_into

    def faulty(*tensors: Any, offset: int, window: int | None, **options: Any) -> None:
        offset += fault == "offset"
        right(*tensors, offset=offset, window=window and window + (fault == "window"), **options)

    monkeypatch.setattr(native, "attend_into", faulty)
    is_wrong = fault == "offset" or (fault == "window" and model.windows != {None})
    assert (tree_error(model) > tolerance(model)) == is_wrong
