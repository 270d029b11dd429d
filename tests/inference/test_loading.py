"""A model's configuration: how long a prompt it reads, or why it is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from pipeline.errors import ModelError
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import context_reason, context_tokens, load_model, prepare
from pipeline.runtime.assembly import local_model

# Four pairs of a head's eight dimensions; the first trained length is 128 of a stretched 512.
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 8.0, 20.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
STRETCHED = {"max_position_embeddings": 512, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
BY_LAYER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {**LONGROPE, "original_max_position_embeddings": 128},
}

CONTEXTS: list[Any] = [
    ("phi3", {**STRETCHED, "rope_parameters": LONGROPE}, 128),
    ("phi3", {**STRETCHED, "rope_parameters": {**LONGROPE, "rope_type": "yarn"}}, 128),
    ("llama", {**STRETCHED, "rope_parameters": LONGROPE}, 128),
    ("llama", {"max_position_embeddings": 64, "rope_parameters": LONGROPE}, 64),
    ("gemma3_text", {"max_position_embeddings": 512, "rope_parameters": BY_LAYER_TYPE}, 128),
    ("llama", {"max_position_embeddings": 512, "rope_parameters": DYNAMIC}, 512),
    ("llama", {"max_position_embeddings": 512}, 512),
]


@pytest.mark.parametrize("family, changes, context", CONTEXTS)
def test_the_context_ends_where_the_frequencies_would_change(
    family: str,
    changes: dict[str, Any],
    context: int,
    make_network: Callable[..., Any],
    tmp_path: Path,
) -> None:
    network = make_network(family, **changes)
    network.config.save_pretrained(tmp_path)
    assert prepare(network).context_tokens == context_tokens(tmp_path) == context
    assert bool(context_reason(tmp_path)) == (context < changes["max_position_embeddings"])


@pytest.mark.parametrize(
    "changes", [{**STRETCHED, "rope_parameters": LONGROPE}, {"rope_parameters": DYNAMIC}]
)
def test_the_longest_prompt_of_the_context_changes_no_answer_beside_it(
    changes: dict[str, Any], make_network: Callable[..., Any]
) -> None:
    model = prepare(make_network("llama", **{"max_position_embeddings": 512, **changes}))
    source = random.Random(0)
    question = Question("q", tuple(source.choices(range(300), k=8)), {"a": [(4,)], "b": [(5,)]})
    prompt = PromptTokens(tuple(source.choices(range(300), k=20)), (question,))
    short, long = (
        source.choices(range(300), k=tokens) for tokens in (40, prompt.room(model.context_tokens))
    )

    def answer(documents: list[list[int]]) -> np.ndarray:
        engine = LabelEngine(model, prompt, max_batch_tokens=2_000)
        return np.asarray(engine.label(documents).log_probs[0][0])

    # — float32 sums in another order
    np.testing.assert_allclose(answer([short, long]), answer([short]), rtol=0, atol=1e-5)


FIRST_READS: list[Any] = [
    context_tokens,
    partial(load_model, dtype="float32", device="cpu"),
]


def configuration(folder: Path, **content: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


NO_CONTEXT = "does not state its longest prompt"


@pytest.mark.parametrize("read", FIRST_READS)
@pytest.mark.parametrize(
    "family, changes, reason",
    [
        *[(family, {}, NO_CONTEXT) for family in ("bloom", "mpt", "mamba2", "xlnet")],
        ("llama4", {}, "chunked_attention"),
        ("deepseek_v32", {}, "indexed_attention"),
        ("deepseek_v4", {}, "compressed_sparse_attention"),
        ("falcon", {"alibi": True}, "ALiBi positions"),
        ("t5", {}, "an encoder"),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 4}, "2 heads for 4 heads of k"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention"),
    ],
)
def test_a_family_that_cannot_be_read_is_refused_by_its_configuration(
    family: str,
    changes: dict[str, Any],
    reason: str,
    read: Callable[[Path], Any],
    tmp_path: Path,
) -> None:
    AutoConfig.for_model(family, **changes).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=f"model family '{family}.*{reason}"):
        read(tmp_path)


@pytest.mark.parametrize("read", FIRST_READS)
@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}},
        {"model_type": "unknown"},
        {"hidden_size": 48},
        {"model_type": "llama", "max_position_embeddings": "many"},
        {"model_type": "llama", "rope_parameters": {"rope_type": "longrope"}},
    ],
    ids=["own code", "unknown", "no family", "a wrong type", "a key is missing"],
)
def test_a_configuration_that_cannot_be_read_is_a_model_error(
    content: dict[str, Any], read: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder = configuration(tmp_path, **content)
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        read(folder)
    assert str(caught.value).startswith(str(folder))


SHORT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    OSError(12, "Cannot allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", SHORT, ids=lambda error: type(error).__name__)
def test_a_lack_of_memory_is_not_taken_for_a_damaged_gguf_file(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("pipeline.inference.loading.AutoTokenizer.from_pretrained", short)
    monkeypatch.setattr("pipeline.runtime.assembly.fetch", lambda *_: tmp_path / "a.gguf")
    monkeypatch.setattr("pipeline.runtime.assembly.converted_bytes", lambda _gguf: 0)
    files: Any = SimpleNamespace(kind="gguf", id="a")
    model: Any = SimpleNamespace(storage_options={})
    with pytest.raises(ModelError, match=r"a\.gguf: memory is too short to convert it: "):
        local_model(files, model, tmp_path / "cache")


@pytest.mark.parametrize("error", SHORT, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["AutoModelForCausalLM.from_pretrained", "tree_error"])
def test_a_lack_of_memory_is_not_taken_for_an_unsupported_model(
    error: Exception, place: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(f"pipeline.inference.loading.{place}", short)
    with pytest.raises(ModelError, match=r"memory is too short to load it: .* write dtype: bf"):
        load_model(model_folder, dtype="float32", device="cpu")
