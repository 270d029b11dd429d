"""Models with random weights, a tokenizer and documents for benchmarks that download nothing.

Entry points: `GPU` and `TWIN`, which say how large everything is; `random_network`,
`trained_tokenizer` and `texts`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.parts import Part

VOCABULARY = 2_000  # of the tokenizer, also where a model knows more tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen model."""

    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151_936


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is that is measured."""

    device: str
    dtype: str
    models: Mapping[str, Shape]  # by part
    run_model: str  # of `assay run`
    parts: tuple[Part, ...]
    tests: tuple[str, ...]  # files or folders with tests
    tokens: int  # of a document
    documents: int  # that one call of a method labels
    window_s: float  # how long the busy share is sampled
    settle_s: float  # from the start of a window until a sample is of the window alone
    run_s: float  # of labelling in `assay run`
    batching: Mapping[str, int] = field(default_factory=dict)  # limits of continuous batching


GPU = Scale(
    device="cuda",
    dtype="bfloat16",
    models={
        "0.6B": Shape("qwen3", 1_024, 3_072, layers=28, heads=16, kv_heads=8),  # Qwen3-0.6B
        "1.5B": Shape("qwen2", 1_536, 8_960, layers=28, heads=12, kv_heads=2),  # Qwen2.5-1.5B
        "4B": Shape("qwen3", 2_560, 9_728, layers=36, heads=32, kv_heads=8),  # Qwen3-4B
    },
    run_model="0.6B",
    parts=(
        Part("tests", 40, 130),
        Part("0.6B", 45, 120),
        Part("run", 75, 150),
        Part("1.5B", 45, 120),
        Part("4B", 55, 130),
    ),
    tests=("tests",),
    tokens=1_000,
    documents=256,
    window_s=5,
    settle_s=1.5,  # — NVML's own samples are of up to a second
    run_s=25,
)
TWIN = Scale(
    device="cpu",
    dtype="float32",
    models={"tiny": Shape("qwen3", 64, 128, 2, 4, 2, head_dim=16, vocabulary=VOCABULARY)},
    run_model="tiny",
    parts=(Part("tests", 1, 120), Part("tiny", 1, 120), Part("run", 1, 180)),
    tests=("tests/inference/attention/test_compiled.py",),
    tokens=60,
    documents=3,
    window_s=0.1,
    settle_s=0,
    run_s=0.2,
    batching={"num_blocks": 32, "max_batch_tokens": 256},
)


def random_network(scale: Scale, name: str) -> PreTrainedModel:
    """The named model with random weights, on the device."""
    shape = scale.models[name]
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    models_: Any = AutoModelForCausalLM
    with torch.device(scale.device):  # — random numbers for 4B weights take minutes on a CPU
        network: PreTrainedModel = models_.from_config(config, dtype=getattr(torch, scale.dtype))
    return network


def trained_tokenizer(prompts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that writes the prompts' words as few tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*list(prompts) * 50, *texts(1_000, 10)], trainer)
    made: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = made(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def texts(words: int, count: int) -> list[str]:
    """Synthetic texts, each of this many words, so of at least as many tokens."""
    random_ = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    known = ["".join(random_.choices(syllables, k=random_.randint(1, 3))) for _ in range(2_000)]
    # — few words are frequent, as in a language
    weights = [1 / rank for rank in range(1, len(known) + 1)]
    return [" ".join(random_.choices(known, weights, k=words)) for _ in range(count)]
