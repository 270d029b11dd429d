"""Which weights are rounded and how far, that the tree stays exact, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.quantization
from torch import Tensor, nn

from pipeline.errors import ModelError, SpecError
from pipeline.inference.loading import load_model, prepare
from pipeline.inference.model.quantisation import quantise, require_torchao
from pipeline.inference.proof import tree_error
from pipeline.spec.model import Quantize
from pipeline.spec.parse import parse_spec

KINDS: list[Quantize] = ["int8", "fp8"]
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
REPOSITORY = Path(__file__).parents[3]

MakeNetwork = Callable[..., Any]


def linear_layers(network: Any) -> dict[str, nn.Linear]:
    """The decoder's linear layers by name; the unembedding lies outside it."""
    return {n: m for n, m in network.model.named_modules() if isinstance(m, nn.Linear)}


def rounding(weight: Tensor, kind: str) -> Tensor:
    """The farthest that a weight may move.

    int8 rounds to half a step, of which the largest weight of a row is 127; fp8 (e4m3) to half of
    3 bits behind the leading one, or to half its smallest number, 2^-9 where the largest is 448.
    """
    largest = weight.abs().amax(dim=1, keepdim=True)
    if kind == "int8":
        return (largest / 127 / 2).expand_as(weight)
    return torch.maximum(weight.abs() * 2**-4, largest / 448 * 2**-10)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_are_rounded_and_nothing_else_is(
    kind: Quantize, make_network: MakeNetwork
) -> None:
    network, plain = make_network("llama"), make_network("llama")
    quantise(network, kind, "cpu")
    rounded, before = linear_layers(network), linear_layers(plain)
    assert len(rounded) == 2 * 7
    for name, layer in rounded.items():
        weight: Any = layer.weight
        assert (
            weight.qdata.dtype == STORED[kind] and weight.qdata.shape == before[name].weight.shape
        )
        moved = (weight.dequantize() - before[name].weight).abs()
        assert moved.max() > 0
        assert bool((moved <= rounding(before[name].weight, kind) * (1 + 1e-4)).all())
    others = dict(network.named_parameters())
    for name, parameter in plain.named_parameters():
        if name.removeprefix("model.").removesuffix(".weight") not in rounded:
            assert type(others[name]) is nn.Parameter and torch.equal(others[name], parameter)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_it_answers_as_a_plain_model_with_the_rounded_weights(
    kind: Quantize, make_network: MakeNetwork
) -> None:
    network, plain = make_network("llama"), make_network("llama")
    quantise(network, kind, "cpu")
    rounded = linear_layers(network)
    for name, layer in linear_layers(plain).items():
        weight: Any = rounded[name].weight
        layer.weight.copy_(weight.dequantize())
    ids = torch.arange(40)[None]
    found, expected = (n(input_ids=ids, use_cache=False).logits for n in (network, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_the_tree_stays_exact(kind: Quantize, family: str, make_network: MakeNetwork) -> None:
    network = make_network(family)
    quantise(network, kind, "cpu")
    model = prepare(network)
    assert tree_error(model) < 1e-5
    assert model.stages is not None and model.network.dtype == torch.float32


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "falcon_h1"])
def test_a_dense_model_with_convolutions_has_no_experts_and_stays_exact(
    family: str, make_network: MakeNetwork
) -> None:
    network = make_network(family)
    assert any(isinstance(part, nn.Conv1d) for part in network.modules())
    quantise(network, "int8", "cpu")
    assert tree_error(prepare(network)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_loaded_with_the_weights_that_were_asked_for(
    kind: Quantize, model_folder: Path
) -> None:
    model = load_model(model_folder, dtype="bfloat16", device="cpu", quantize=kind)
    weights: list[Any] = [layer.weight for layer in linear_layers(model.network).values()]
    assert {weight.qdata.dtype for weight in weights} == {STORED[kind]}
    assert {weight.dtype for weight in weights} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoehybrid", "lfm2_moe"])
def test_a_mixture_whose_experts_would_stay_as_they_are_is_refused(
    family: str, make_network: MakeNetwork
) -> None:
    with pytest.raises(ModelError, match=rf"'{family}' keeps its experts' .*write quantize: none"):
        quantise(make_network(family), "int8", "cpu")


def test_what_the_device_cannot_run_is_refused_by_name(
    make_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise NotImplementedError("no kernel\nfor Float8_e4m3fn")

    monkeypatch.setattr(torchao.quantization, "quantize_", lacking)
    with pytest.raises(ModelError) as caught:
        quantise(make_network("llama"), "fp8", "cpu")
    assert str(caught.value) == (
        f"quantize: fp8 does not run on cpu with torch {torch.__version__}; "
        "write another or none: no kernel for Float8_e4m3fn"
    )


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("without_torchao")
def test_without_torchao_the_install_command_is_named_in_one_line(
    kind: Quantize, model_folder: Path
) -> None:
    for refused in (
        lambda: require_torchao(kind),
        lambda: load_model(model_folder, dtype="float32", device="cpu", quantize=kind),
    ):
        with pytest.raises(SpecError) as caught:
            refused()
        (line,) = str(caught.value).splitlines()
        assert line.startswith("model.quantize: needs torchao; ")
        assert "pip install 'corpus-assay[quantize]'" in line
        assert line.endswith(f"(got {kind!r})")


@pytest.mark.usefixtures("without_torchao")
def test_a_model_that_is_not_quantised_needs_no_torchao(model_folder: Path) -> None:
    require_torchao("none")
    model = load_model(model_folder, dtype="float32", device="cpu", quantize="none")
    assert {type(parameter) for parameter in model.network.parameters()} == {nn.Parameter}


def test_no_module_imports_torchao_before_it_is_asked_for() -> None:
    files = list((REPOSITORY / "pipeline").rglob("*.py"))
    assert REPOSITORY / "pipeline/inference/model/quantisation.py" in files
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.startswith(("import torchao", "from torchao"))]


@pytest.mark.parametrize(
    "model, line",
    [
        (
            "quantize: int4",
            "model.quantize: write 'none', 'int8', 'int8_dynamic' or 'fp8' (got 'int4')",
        ),
        (
            "quantize: int8, dtype: float16",
            "model.quantize: sums of int8 weights overflow float16; write another dtype, or fp8 "
            "(got 'int8')",
        ),
    ],
)
def test_a_spec_that_cannot_be_quantised_so_is_one_line(model: str, line: str) -> None:
    text = "{name: j, model: {path: m, %s}, input: {path: i}, output: o, tasks: [%s]}"
    with pytest.raises(SpecError) as caught:
        parse_spec(text % (model, "{name: a, question: Why, labels: [x, y]}"))
    assert str(caught.value) == f"{line} in spec, line 1"


def test_other_weights_and_number_formats_go_together() -> None:
    text = "{name: j, model: {path: m, %s}, input: {path: i}, output: o, tasks: [%s]}"
    for model in ("quantize: fp8, dtype: float16", "quantize: int8, dtype: bfloat16"):
        spec = parse_spec(text % (model, "{name: a, question: Why, labels: [x, y]}"))
        assert spec.model.quantize in KINDS
