"""The memory that a batch takes is that of the formula, as the allocator counts it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocations import allocated_at_most
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import prepare
from pipeline.inference.memory import plan_memory, shape_of
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.forward import prefill

SHAPES: dict[str, Any] = {
    "vocab_size": 2_000,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT = PromptTokens(
    tuple(range(20)),
    tuple(Question(f"q{i}", (i, *range(24)), {"a": [(1,)], "b": [(2,)]}) for i in range(8)),
)


def wide_model(family: str, **changes: Any) -> LoadedModel:
    config = AutoConfig.for_model(family, **{**SHAPES, **changes})
    return prepare(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {}),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        ("llama", {"intermediate_size": 128}),  # attention holds more than the feed-forward
        ("llama", {"num_key_value_heads": 6, "intermediate_size": 128}),
        ("qwen3", {"head_dim": 64}),
        ("gemma3_text", {"head_dim": 64}),
        (
            "qwen3_moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
        ),
    ],
)
@pytest.mark.parametrize("documents, tokens", [(1, 3_000), (12, 200)])
def test_a_batch_takes_the_planned_memory_within_15_percent(
    family: str, changes: dict[str, Any], documents: int, tokens: int
) -> None:
    model, source = wide_model(family, **changes), random.Random(0)
    engine = LabelEngine(model, PROMPT, max_batch_tokens=1_000_000)
    read = [source.choices(range(2_000), k=tokens) for _ in range(documents)]
    batch = documents * (tokens + engine.label([[1]]).usage.question_tokens_computed)
    planned = plan_memory(model, prefix_tokens=20, free_bytes=1 << 40, most_tokens=batch)
    measured = allocated_at_most(lambda: engine.label(read))
    expected = planned.shape.batch_bytes(batch)
    assert 0.85 * expected <= measured <= 1.15 * expected


def test_a_search_keeps_the_keys_and_values_of_its_document_once() -> None:
    model, source = wide_model("llama", num_hidden_layers=24), random.Random(0)
    labels = {str(n): [(n, *range(50 + n, 53 + n))] for n in range(8)}
    prompt = PromptTokens((1, 2), (Question("q", tuple(range(30)), labels, beam=8),))
    engine = LabelEngine(model, prompt, max_batch_tokens=1_000)
    document = source.choices(range(2_000), k=1_500)
    measured = allocated_at_most(lambda: engine.label([document]))
    shape = shape_of(model)
    kept = len(document) * shape.kv_bytes * shape.layers
    assert kept < measured < 1.15 * (kept + shape.batch_bytes(len(document)))


def test_little_memory_makes_batches_small_and_much_does_not_make_them_large() -> None:
    model = wide_model("llama")
    small = plan_memory(model, prefix_tokens=20, free_bytes=10_000_000, most_tokens=5_000)
    large = plan_memory(model, prefix_tokens=20, free_bytes=1 << 40, most_tokens=5_000)
    assert 1 < small.max_batch_tokens < large.max_batch_tokens == 5_000
    assert small.prefix_bytes + small.shape.batch_bytes(small.max_batch_tokens) <= 10_000_000


def test_a_kept_prefix_takes_the_planned_memory(tiny_model: Callable[[str], LoadedModel]) -> None:
    model = tiny_model("llama")
    planned = plan_memory(model, prefix_tokens=20, free_bytes=1 << 40, most_tokens=1)
    kept = prefill(model, PROMPT.prefix)
    assert kept is not None
    kept_bytes = sum(kv.k.nbytes + kv.v.nbytes for kv in kept.layers.values())
    assert planned.prefix_bytes == kept_bytes
    assert shape_of(model).kv_bytes * 20 * 2 == kept_bytes


# Forty blocks of 8 MB, two at a time: a kept heap is paged in once.
PROBE = """
import ctypes, resource, torch
from pipeline.inference.memory import disable_malloc_trim
def page_faults():
    torch.ones(1 << 21)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(1 << 21), torch.ones(1 << 21)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
ctypes.CDLL(None).mallopt(-3, 1 << 17)  # blocks mapped apart, as glibc does at first
given_back = page_faults()
assert disable_malloc_trim()
print(given_back, page_faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are glibc's")
def test_freed_memory_is_not_paged_in_anew_for_every_block() -> None:
    printed = subprocess.check_output([sys.executable, "-c", PROBE], text=True)
    given_back, kept = map(int, printed.split())
    assert kept < given_back / 2
