"""Products of 8-bit numbers against the same products in float64, and their laws."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processors import HAS_PRODUCTS, needs_products
from scipy.linalg import block_diag, hadamard
from torch import Tensor, nn

from benchmarks.methods import linear_weights
from pipeline.errors import ModelError
from pipeline.inference.loading import load_model, prepare, rounded
from pipeline.inference.memory import plan_memory
from pipeline.inference.model.alone import PromptAlone, forward_alone
from pipeline.inference.model.llama import _LlamaLayer
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.inference.model.rounded_products import (
    Fp8Linear,
    Int8Linear,
    RoundedLinear,
    RoundedProducts,
    RoundedRows,
    even_out,
    round_linear,
)
from pipeline.inference.processor import native
from pipeline.inference.proof import prove_layers, tolerance, tree_error
from pipeline.spec.model import RoundedFormat

MakeNetwork = Callable[..., Any]


def steps_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in steps, and the size of each row's step, in float64."""
    sizes = x.double().abs().amax(-1, keepdim=True) / 127
    return torch.floor(x.double() / sizes + 0.5), sizes


def evened(x: Tensor) -> Tensor:
    """The rows times a Hadamard matrix of each 32, or fewer, columns, in float64."""
    inputs = x.shape[-1]
    block = min(32, inputs & -inputs)
    matrix = block_diag(*[hadamard(block) / block**0.5] * (inputs // block))
    return x.double() @ torch.from_numpy(matrix)


def exact_product(linear: nn.Linear, x: Tensor) -> Tensor:
    """The slow twin: integers of rounded rows and weights, multiplied in float64."""
    rows, row_sizes = steps_of(evened(x))
    weight = evened(linear.weight)
    sizes = weight.abs().amax(-1, keepdim=True) / 127
    weights = (weight / sizes).round()
    product = (rows @ weights.T) * row_sizes * sizes.T
    return product if linear.bias is None else product + linear.bias.double()


@given(
    st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 1e4]), st.sampled_from([33, 64, 576])
)
def test_a_row_is_evened_out_and_rounded_to_its_nearest_steps(
    seed: int, size: float, inputs: int
) -> None:
    x = torch.randn(7, inputs, generator=torch.Generator().manual_seed(seed)) * size
    rounded = Int8Linear.round_rows(x)
    steps = rounded.quantized.int() - 128
    assert bool((steps.abs().amax(-1) == 127).all())  # the largest of each row
    moved = (steps * rounded.scale.double() - evened(x)).abs()
    # — half a step, and what float32 rounds: shifted values of at most 256 steps, sums of 32
    assert bool((moved <= rounded.scale.double() * (0.5 + 2**-14)).all())


@pytest.mark.parametrize("inputs", [16, 96])
def test_a_row_does_not_depend_on_its_batch_and_zeros_stay_zeros(inputs: int) -> None:
    x = torch.cat([torch.randn(5, inputs) * 100, torch.zeros(1, inputs), torch.randn(2, inputs)])
    together = Int8Linear.round_rows(x)
    for i, row in enumerate(x):
        alone = Int8Linear.round_rows(row[None])
        # — sums of another order may round to the other of two nearest steps
        assert (alone.quantized[0].int() - together.quantized[i].int()).abs().max() <= 1
        torch.testing.assert_close(alone.scale[0], together.scale[i], rtol=1e-6, atol=0)
    assert bool((together.quantized[5] == 128).all())


@needs_products
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
@torch.inference_mode()
def test_a_layer_equals_the_product_of_integers(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(48, 24, bias=bias)
    layer = Int8Linear(linear)
    x = torch.randn(2, rows, 48)
    expected = exact_product(linear, x)
    # — two scalings in float32; rounding in float32 may choose the other of two nearest steps
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    unrounded = linear(x)
    assert 0 < float((expected - unrounded).norm() / unrounded.norm()) < 0.02


@needs_products
@torch.inference_mode()
def test_bytes_do_not_overflow_where_all_products_are_largest() -> None:
    linear = nn.Linear(512, 8, bias=False)
    # — the matrix is its own inverse: evened out, all of these are 1, or 2
    linear.weight.copy_(even_out(torch.ones(8, 512)))
    x = even_out(torch.full((3, 512), 2.0))
    product = Int8Linear(linear)(x)
    torch.testing.assert_close(product, torch.full((3, 8), 1024.0), rtol=1e-5, atol=0)


@given(st.integers(1, 200), st.integers(0, 2**31))
def test_evening_out_keeps_products_and_is_its_own_inverse(inputs: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(3, inputs, generator=source) for _ in range(2))
    torch.testing.assert_close(even_out(even_out(x)), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(even_out(x) @ even_out(y).T, x @ y.T, rtol=0, atol=1e-4)
    torch.testing.assert_close(even_out(x).double(), evened(x), rtol=0, atol=1e-5)


@needs_products
@torch.inference_mode()
def test_a_large_column_takes_few_steps_from_the_others() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 24), torch.randn(9, 64)
    x[:, 5] *= 100
    exact = linear(x)
    error = (Int8Linear(linear)(x) - exact).norm() / exact.norm()
    steps, sizes = steps_of(x)  # of plain rows
    plain = nn.functional.linear((steps * sizes).float(), linear.weight, linear.bias)
    assert error < (plain - exact).norm() / exact.norm() / 2


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(Int8Linear, torch.float32, marks=needs_products),
        (Fp8Linear, torch.bfloat16),
    ],
)
@torch.inference_mode()
def test_layers_that_read_the_same_rows_round_them_once_and_keep_none(
    kind: type[RoundedLinear], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [kind(nn.Linear(64, outputs).to(dtype)) for outputs in (8, 16)]
    x, round_rows = torch.randn(5, 64, dtype=dtype), kind.round_rows
    counted: list[weakref.ref[Tensor]] = []
    expected = [layer(x) for layer in layers]

    def counting(rows: Tensor) -> RoundedRows:
        rounded = round_rows(rows)
        counted.append(weakref.ref(rounded.quantized))
        return rounded

    monkeypatch.setattr(kind, "round_rows", staticmethod(counting))
    for product, own in zip(RoundedProducts(*layers)(x), expected, strict=True):
        assert torch.equal(product, own)
    assert [rows() for rows in counted] == [None]
    states = torch.randn(5, 8, dtype=dtype)
    added = RoundedProducts(layers[0]).added_to(states, x)
    torch.testing.assert_close(added, states + expected[0])


@needs_products
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "lfm2"])
def test_the_tree_differs_from_independent_prompts_by_rounding_alone(
    family: str, make_network: MakeNetwork
) -> None:
    model = prepare(make_network(family))
    plain = sum(linear_weights(layer, experts_per_token=1) for layer in model.decoder.layers)  # type: ignore[arg-type]
    assert tree_error(model) < 1e-5
    model = rounded(model, "int8")
    layers = [m for m in model.network.modules() if isinstance(m, Int8Linear)]
    assert len(layers) >= 2 * 4
    assert not [m for m in model.decoder.modules() if type(m) is nn.Linear]
    assert type(model.network.lm_head) is nn.Linear
    # — a step is 1/127 of a row's largest value: a value on the edge may go to either side
    assert tree_error(model) < 0.05
    of_bytes = sum(linear_weights(layer, experts_per_token=1) for layer in model.decoder.layers)  # type: ignore[arg-type]
    assert of_bytes == plain


@needs_products
@pytest.mark.parametrize("seed", range(4))
def test_a_readout_of_an_earlier_layer_is_read_with_8_bit_products(
    seed: int, make_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_network("llama", num_hidden_layers=30)
    torch.manual_seed(seed)
    for weights in (each for each in network.parameters() if each.dim() > 1):
        # — with large weights, one value that is rounded to the other side moves all states
        weights.data.normal_(std=0.4)
    model = rounded(prepare(network), "int8")
    prove_layers(model, [8, 30])
    own = _LlamaLayer.__call__

    def larger(layer: _LlamaLayer, *inputs: Any) -> Tensor:
        return own(layer, *inputs) * (1.5 if layer._number == 3 else 1)

    monkeypatch.setattr(_LlamaLayer, "__call__", larger)
    with pytest.raises(ModelError, match="has other states between its layers"):
        prove_layers(model, [8, 30])


@needs_products
def test_a_folder_is_loaded_with_products_of_integers(model_folder: Path) -> None:
    model = load_model(model_folder, dtype="float32", device="cpu", rounded_to="int8")
    assert [m for m in model.network.modules() if isinstance(m, Int8Linear)]
    assert model.network.dtype == torch.float32
    # — which rounds less than 8-bit products do
    assert not native.computes(torch.bfloat16) or model.kernel_name.endswith(" bfloat16")


def test_a_processor_without_products_of_bytes_is_refused(
    make_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    with pytest.raises(ModelError, match=r"needs a processor with products of bytes .*write auto"):
        round_linear(make_network("llama"), "int8")


@pytest.mark.skipif(not HAS_PRODUCTS, reason="refused before: no VNNI, no AMX")
def test_a_mixture_is_refused_by_name(make_network: MakeNetwork) -> None:
    with pytest.raises(ModelError, match=r"'qwen3_moe' keeps its experts' .*write dtype: auto"):
        round_linear(make_network("qwen3_moe"), "int8")


@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 1e4]), st.booleans())
def test_a_number_is_rounded_to_the_nearest_of_its_rows_in_fp8(
    seed: int, size: float, half: bool
) -> None:
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(seed)) * size
    x[:, 5] *= 100  # — takes no steps from the others
    x = x.bfloat16() if half else x
    rounded = Fp8Linear.round_rows(x)
    assert bool((rounded.quantized.float().abs().amax(-1) == 448).all())
    # — in the layout that a GPU requires
    assert Fp8Linear.round_rows(x.t().contiguous().t()).quantized.is_contiguous()
    x, scale = x.double(), rounded.scale.double()
    moved = (rounded.quantized.double() * scale - x).abs()
    # — half a step of 3 bits, or of the smallest numbers; the quotient is rounded before
    assert bool((moved <= torch.maximum(x.abs() * (2**-4 + 2**-8), scale * 2**-10 * 1.01)).all())


ON_A_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 300])
@torch.inference_mode()
def test_a_layer_equals_the_product_of_its_fp8_numbers(rows: int, bias: bool, device: str) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(640, 32, bias=bias).bfloat16().to(device)
    layer, x = Fp8Linear(linear), torch.randn(rows, 640).bfloat16().to(device)
    numbers, weights = layer.round_rows(x), layer.round_rows(linear.weight)
    left = numbers.quantized.double() * numbers.scale
    right = weights.quantized.double() * weights.scale
    added = linear.bias.double() if bias else 0
    expected, whole = left @ right.T + added, left.abs() @ right.abs().T
    # — sums in float32, and the result in bfloat16
    allowed = whole * 640 * 2**-24 + expected.abs() * 2**-8
    assert bool(((layer(x).double() - expected).abs() <= allowed).all())
    # — a row does not depend on its batch
    assert bool(((layer(x[:1]).double() - expected[:1]).abs() <= allowed[:1]).all())
    # — both sides are off by a sixteenth and the quotient's rounding
    exact = x.double() @ linear.weight.double().T + added
    off = (1 + 2**-4 + 2**-8) ** 2 - 1
    close = (x.double().abs() @ linear.weight.double().abs().T) * off * 1.01 + allowed
    assert bool(((expected - exact).abs() <= close).all())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "lfm2"])
def test_a_model_in_fp8_differs_from_independent_prompts_by_rounding_alone(
    family: str, make_network: MakeNetwork
) -> None:
    model = prepare(make_network(family).bfloat16())
    rounded_bytes = sum(linear_weights(part, experts_per_token=1) for part in layers_of(model))
    plain, model = bytes_of(model), rounded(model, "fp8")
    assert not [m for m in model.decoder.modules() if type(m) is nn.Linear]
    assert type(model.network.lm_head) is nn.Linear
    assert tree_error(model) < tolerance(model)
    layers = [m for m in model.network.modules() if isinstance(m, Fp8Linear)]
    # — a byte in place of two, and the scales; the plan counts what the network holds
    assert plain - bytes_of(model) == rounded_bytes - 4 * sum(m.out_features for m in layers)


def layers_of(model: LoadedModel) -> list[nn.Module]:
    return list(model.decoder.layers)  # type: ignore[arg-type]


def bytes_of(model: LoadedModel) -> int:
    return plan_memory(model, prefix_tokens=1, free_bytes=1 << 30, most_tokens=9).weights_bytes


def test_a_folder_in_fp8_has_the_states_of_its_rounded_numbers(model_folder: Path) -> None:
    def widened(x: Tensor) -> Tensor:
        rows = Fp8Linear.round_rows(x.flatten(0, -2))
        return (rows.quantized.float() * rows.scale).view(x.shape)

    def states(rounded_to: RoundedFormat | None, *, is_twin: bool = False) -> Tensor:
        """The last states; the slow twin multiplies rounded numbers in float32."""
        dtype = "float32" if is_twin else "bfloat16"
        model = load_model(model_folder, dtype=dtype, device="cpu", rounded_to=rounded_to)
        for layer in model.decoder.modules() if is_twin else ():
            if type(layer) is nn.Linear:
                layer.weight.data = widened(layer.weight.data.bfloat16())
                layer.register_forward_pre_hook(lambda _, x: (widened(x[0].bfloat16()),))
        with plain_attention(model.network):
            prompt = PromptAlone((), range(40), ())
            return forward_alone(model, prompt).last_hidden_state.float()

    own, twin, plain = states("fp8"), states(None, is_twin=True), states(None)
    error, moved = ((own - other).norm() / other.norm() for other in (twin, plain))
    # — what else the model rounds to bfloat16 sends a number to the other of its nearest
    assert error < 0.2 and moved > 1.5 * error


def test_a_machine_without_the_fp8_product_of_a_layer_is_refused_by_its_sizes(
    make_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("not supported\non your device")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    line = r"a layer of \d+ x \d+ weights has no fp8 product here: not supported on your "
    with pytest.raises(ModelError, match=f"{line}device; write dtype: auto"):
        round_linear(make_network("llama").bfloat16(), "fp8")
