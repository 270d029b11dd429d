"""What a configuration tells of a model: how long a prompt it reads, or why it is refused."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pipeline.errors import ModelError
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import context_reason, context_tokens, load_model, prepare

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
    question = Question("q", tuple(source.choices(range(300), k=8)), {"a": (4,), "b": (5,)})
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


@pytest.mark.parametrize("read", FIRST_READS)
@pytest.mark.parametrize("family", ["bloom", "mpt", "mamba", "mamba2", "falcon_mamba", "xlnet"])
def test_a_family_that_states_no_longest_prompt_is_refused_by_name(
    family: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=f"'{family}' does not state its longest prompt"):
        read(tmp_path)


@pytest.mark.parametrize("read", FIRST_READS)
@pytest.mark.parametrize("family", ["llama4_text", "llama4", "t5"])
def test_a_family_that_the_tree_does_not_model_is_refused_at_the_first_reading(
    family: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="which assay does not support; use a decoder"):
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


def test_a_folder_that_lacks_a_tensor_is_refused_by_its_name(
    model_folder: Path, tmp_path: Path
) -> None:
    """transformers would put random values in its place, and say so in a report."""
    folder = tmp_path / "torn"
    shutil.copytree(model_folder, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    lost = next(name for name in sorted(tensors) if "layers.1." in name)
    save_file({name: t for name, t in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"lack 1 of the model's tensors, {re.escape(lost)} first"):
        load_model(folder, dtype="float32", device="cpu")
