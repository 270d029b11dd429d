"""What is loaded, what is refused by name, and that nothing a folder carries is ever run."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from pipeline.errors import ModelError
from pipeline.inference import loading
from pipeline.inference.attention.hook import IMPLEMENTATION
from pipeline.inference.attention.reference import Attended, attend_plainly
from pipeline.inference.attention.tiles import Kernel
from pipeline.inference.loading import (
    context_tokens,
    load_model,
    load_tokenizer,
    prepare,
)
from pipeline.inference.model.loaded import plain_attention
from pipeline.inference.proof import tree_error
from pipeline.inference.schedules import staged

MakeNetwork = Callable[..., Any]
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": {"rope_theta": 1e4}}
# float32 sums of a few hundred terms in another order, in a share of the states and logits.
TOLERANCE = 1e-5


WINDOWS: list[Any] = [
    ("llama", {}, {None}),
    ("mistral", {"sliding_window": None}, {None}),
    ("gemma3_text", SLIDING, {8, None}),
    ("cohere2", SLIDING, {8, None}),
    ("gemma2", {**SLIDING, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, {8, None}),
    ("gpt_oss", {**SLIDING, **EXPERTS}, {8, None}),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {8, None},
    ),
]
OTHERS = [
    ("mistral", {"sliding_window": 8}, {8, None}),
    ("phi3", {"sliding_window": 8}, {8, None}),
    ("starcoder2", {"sliding_window": 8}, {8, None}),
    # — scaled or capped logits
    ("cohere", {"logit_scale": 0.0625}, {None}),
    ("gemma3_text", {**SLIDING, "final_logit_softcapping": 2.0}, {8, None}),
]


@pytest.mark.parametrize("family, changes, windows", [*WINDOWS, *OTHERS])
def test_every_window_of_a_model_is_known_and_its_answers_are_exact(
    family: str, changes: dict[str, Any], windows: set[int | None], make_network: MakeNetwork
) -> None:
    model = prepare(make_network(family, **changes))
    assert model.windows == windows
    assert tree_error(model) < TOLERANCE
    assert tree_error(replace(model, kernel=attend_plainly)) < TOLERANCE


def wrong(q: torch.Tensor, *args: Any, **kwargs: Any) -> Attended:
    attended = attend_plainly(q, *args, **kwargs)
    return Attended(1.1 * attended.out, attended.lse)


def wrong_lse(q: torch.Tensor, *args: Any, **kwargs: Any) -> Attended:
    attended = attend_plainly(q, *args, **kwargs)
    return Attended(attended.out, 1.4 * attended.lse)  # in powers of two


def broken(*args: Any, **kwargs: Any) -> Attended:
    raise RuntimeError("head_size must be a multiple of 8")


def without_headers(*args: Any, **kwargs: Any) -> Attended:
    raise subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c"])


def without_a_compiler(*args: Any, **kwargs: Any) -> Attended:
    raise FileNotFoundError(2, "No such file or directory", "gcc")


class UnknownGpuError(Exception):
    """As `triton.errors.TritonError`, which is an error of no other kind."""


def of_an_unknown_gpu(*args: Any, **kwargs: Any) -> Attended:
    raise UnknownGpuError


@pytest.mark.parametrize(
    "kernel, family, used",
    [
        (without_headers, "llama", False),
        (without_a_compiler, "gemma2", False),
        (of_an_unknown_gpu, "llama", False),
        (attend_plainly, "llama", True),
        (attend_plainly, "gemma2", True),
        (wrong, "llama", False),
        (wrong_lse, "gpt_oss", False),  # whose attention sinks are added by it
        (broken, "llama", False),
    ],
)
def test_a_fused_kernel_is_used_only_once_it_has_answered_as_independent_prompts_do(
    kernel: Kernel,
    family: str,
    used: bool,
    monkeypatch: pytest.MonkeyPatch,
    make_network: MakeNetwork,
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = SimpleNamespace(TritonError=UnknownGpuError)
    monkeypatch.setitem(sys.modules, "triton.errors", errors)  # type: ignore[arg-type]
    kernels = {"of a GPU": kernel, "torch": attend_plainly}
    monkeypatch.setattr(loading, "kernels_for", lambda _network: kernels)
    changes = {"attn_logit_softcapping": 1e4} if family == "gemma2" else {}
    model = prepare(make_network(family, **changes))
    assert model.processor["attention"] == ("of a GPU" if used else "torch")
    assert [r.getMessage()[:8] for r in caplog.records] == ["a slower"] * (not used)
    assert tree_error(model) < TOLERANCE


def test_cudnns_attention_is_off_for_all(make_network: MakeNetwork) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    prepare(make_network("llama"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    "family, changes",
    [
        ("bloom", {}),  # ALiBi without a key for it
        ("gpt2", {}),  # a decoder that is not called `model`
        ("nemotron", {}),  # layers that drop the tree's argument
        ("deepseek_v3", {}),  # values of another size than keys
        ("diffllama", {}),  # a difference of two attentions: wrong answers, and no error
    ],
)
def test_a_model_that_cannot_be_exact_is_refused_when_it_is_prepared(
    family: str, changes: dict[str, Any], make_network: MakeNetwork
) -> None:
    network = make_network(family, **changes)
    with pytest.raises(ModelError):
        prepare(network)


@pytest.mark.parametrize(
    "factor, reason", [(2, r"its states or logits differ by 0\.5"), (math.nan, "computes NaN")]
)
def test_logits_that_the_engine_would_not_reproduce_are_refused(
    factor: float, reason: str, make_network: MakeNetwork
) -> None:
    network = make_network("llama")
    real = network.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        output.logits = output.logits * factor
        return output

    network.forward = scaled
    with pytest.raises(ModelError, match=reason):
        prepare(network)


@pytest.mark.parametrize(
    "part, number, dtype, reason",
    [
        ("lm_head", math.nan, "float32", r"lm_head\.weight has NaN or infinity"),
        (
            "model.layers.1.mlp.up_proj",
            math.inf,
            "bfloat16",
            r"layers\.1\.mlp\.up_proj\.weight has",
        ),
        (
            "model.layers.1.input_layernorm",
            6e4,
            "float16",
            "a state has NaN .*write dtype: float32",
        ),
    ],
)
def test_a_model_that_computes_nan_is_refused_by_the_tensor_or_the_format(
    part: str, number: float, dtype: str, reason: str, make_network: MakeNetwork
) -> None:
    network = make_network("llama").to(getattr(torch, dtype))
    network.get_submodule(part).weight.data[3] = number
    with pytest.raises(ModelError, match=f"'llama' computes NaN: .*{reason}"):
        prepare(network)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_not_carried_on_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, make_network: MakeNetwork
) -> None:
    network = make_network("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]).to(
        dtype
    )
    assert prepare(network).schedule == "staged"

    def without_states(text: staged.Text, rows: list[int]) -> Any:
        cache = copied(text, rows)
        for layer in cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.reset()
        return cache

    copied = staged.Text.copies
    monkeypatch.setattr(staged.Text, "copies", without_states)
    with pytest.raises(ModelError, match="model family 'lfm2' gives other answers under the tree"):
        prepare(network)


def test_that_a_gpu_reads_recurrent_layers_by_length_is_logged_with_the_fix(
    make_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = make_network("lfm2")
    monkeypatch.setattr(type(network), "device", torch.device("cuda"))
    monkeypatch.setattr(loading, "prove_tree", lambda _model: None)
    assert prepare(network).schedule == "staged"
    assert ["`engine: vllm`" in record.getMessage() for record in caplog.records] == [True]


CANARY = """
from pathlib import Path
from types import SimpleNamespace
Path({path!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class EvilConfig(LlamaConfig):
    model_type = {family!r}
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", ["llama", "evil"])
def test_code_that_a_folder_carries_is_never_run(
    family: str, model_folder: Path, tmp_path: Path
) -> None:
    """Its own Python, under the name of a family that transformers has, and under another."""
    folder, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(model_folder, folder)
    (folder / "evil.py").write_text(CANARY.format(path=str(canary), family=family))
    autos = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    edit_json(folder / "config.json", auto_map=autos, model_type=family)
    autos = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
    edit_json(folder / "tokenizer_config.json", auto_map=autos)
    if family == "llama":
        model = load_model(folder, dtype="float32", device="cpu")
        assert type(model.network).__module__.startswith("transformers.")
        assert type(load_tokenizer(folder)).__module__.startswith("transformers.")
    else:
        with pytest.raises(ModelError, match="cannot be loaded"):
            load_model(folder, dtype="float32", device="cpu")
    assert not canary.exists()


class Explosive:
    """A pickle that leaves a trace when it is read."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def test_pickled_weights_are_refused_unread(model_folder: Path, tmp_path: Path) -> None:
    folder, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (folder / name).write_bytes(pickle.dumps(Explosive(canary)))
    with pytest.raises(ModelError, match=r"holds no \.safetensors file; .* convert them"):
        load_model(folder, dtype="float32", device="cpu")
    assert not canary.exists()


def test_a_loaded_model_holds_the_weights_of_its_folder(model_folder: Path) -> None:
    half = load_model(model_folder, dtype="bfloat16", device="cpu")
    assert {p.dtype for p in half.network.parameters()} == {torch.bfloat16}
    model = load_model(model_folder, dtype="float32", device="cpu")
    assert not model.network.training
    assert not any(parameter.requires_grad for parameter in model.network.parameters())
    assert model.context_tokens == context_tokens(model_folder) == 4_096
    assert model.device == torch.device("cpu")
    held = model.network.state_dict()
    for name, weights in load_file(model_folder / "model.safetensors").items():
        assert torch.equal(held[name], weights)


def test_plain_attention_lasts_as_long_as_its_block(model_folder: Path) -> None:
    network = load_model(model_folder, dtype="float32", device="cpu").network
    assert network.config._attn_implementation == IMPLEMENTATION
    with pytest.raises(RuntimeError, match="inside"), plain_attention(network, "sdpa"):
        assert network.config._attn_implementation == "sdpa"
        raise RuntimeError("inside")
    assert network.config._attn_implementation == IMPLEMENTATION


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "family, changes, _windows",
    # — of two experts, rounding now and then chooses the other one
    [each for each in WINDOWS if each[0] != "gpt_oss"],
)
def test_on_a_gpu_in_half_precision_the_kernel_is_proved_and_used(
    family: str, changes: dict[str, Any], _windows: set[int | None], make_network: MakeNetwork
) -> None:
    network = make_network(family, **changes).to("cuda", torch.bfloat16)
    assert prepare(network).kernel_name.startswith("triton")
