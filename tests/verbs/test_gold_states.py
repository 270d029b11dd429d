"""Documents' states, against transformers' own `output_hidden_states` on independent prompts."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.errors import SpecError
from pipeline.evaluation.readout_fitting import GoldStates, choose
from pipeline.gold.labels import read_gold
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.spec.parse import load_spec
from pipeline.verbs.gold_states import chosen_layers, document_states, read_gold_states

PREFIX = [5, 9, 2]
SUFFIXES = [[11, 12], [11, 12, 13, 14, 15, 16, 17], [20]]
DOCUMENTS = [[(7 * i + n) % 300 for i in range(n)] for n in (40, 3, 1, 17)]


def alone(model: LoadedModel, layers: list[int]) -> NDArray[np.float32]:
    """[docs, layers, kinds, hidden], one forward for every document and suffix."""
    by_document = []
    with torch.inference_mode(), plain_attention(model.network, "eager"):
        for document in DOCUMENTS:
            of_document = []
            for suffix in SUFFIXES:
                ids = torch.tensor([[*PREFIX, *document, *suffix]])
                states = model.decoder(
                    input_ids=ids, use_cache=False, output_hidden_states=True
                ).hidden_states
                of_document.append(torch.stack([states[layer][0] for layer in layers]))
            own = of_document[0][:, len(PREFIX) : len(PREFIX) + len(document)].mean(dim=1)
            by_document.append(
                torch.stack([*(states[:, -1] for states in of_document), own], dim=1)
            )
    return torch.stack(by_document).numpy()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "qwen3_5_text", "falcon_h1"])
def test_states_are_those_of_independent_prompts(
    family: str, tiny_model: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    model = tiny_model(family)
    layers = list(range(1, model.layers + 1))
    expected, done = alone(model, layers), list[int]()
    options = {"layers": layers, "max_batch_tokens": 50, "on_documents": done.append}
    actual = document_states(model, PREFIX, SUFFIXES, DOCUMENTS, folder=tmp_path, **options)
    assert not list(tmp_path.iterdir()) and done[-1] == len(DOCUMENTS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_states_of_many_rows_and_tasks_are_read_and_fitted_without_all_of_them_in_memory(
    tiny_model: Callable[[str], LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, questions = tiny_model("llama"), [[n, 1, 2, 3] for n in range(60)]
    documents = [[n % 300, n // 300] for n in range(600)]
    truth = np.arange(600) % 2
    options = {"layers": [1, 2], "max_batch_tokens": 2_000}
    tracemalloc.start()
    try:
        states = document_states(model, [], questions, documents, folder=tmp_path, **options)
        gold = GoldStates(states[:, :, :2], np.eye(2)[truth], np.arange(600))
        choose(gold.part(np.arange(0, 600, 3)), [0.1])
        assert tracemalloc.get_traced_memory()[1] < states.nbytes / 3
    finally:
        tracemalloc.stop()
    disk = shutil.disk_usage(tmp_path)._replace(free=states.nbytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: disk)
    with pytest.raises(SpecError, match=r"layers: the states of 600 documents after 2 layers"):
        document_states(model, [], questions, documents, folder=tmp_path, **options)


def test_layers_are_spread_over_the_decoder() -> None:
    assert chosen_layers(None, 30) == (8, 12, 16, 21, 26, 30)
    assert chosen_layers(None, 2) == (1, 2)
    assert chosen_layers("all", 3) == (1, 2, 3) and chosen_layers("3, 1", 3) == (1, 3)


def test_texts_with_equal_tokens_after_truncation_share_a_fold(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    task = {"name": "asked", "question": "Rude?", "labels": {"toxic": ["y"], "clean": ["n"]}}
    spec = load_spec(write_spec(documents={"max_tokens": 64}, tasks=[task]))
    gold = tmp_path / "long.jsonl"
    texts = [f"{'the same header ' * 10}{n}" for n in range(6)] + ["short a", "short b"]
    gold.write_text("".join(json.dumps({"text": t, "asked": "toxic"}) + "\n" for t in texts))
    job = make_job(spec, place(spec.model, this_machine()), tmp_path / "cache")
    result = read_gold_states(job, read_gold(str(gold), spec), ["asked"], layers="1")
    assert [len(np.unique(result.groups)), len(np.unique(result.groups[:6]))] == [3, 1]
    assert result.positions == {"asked": {"document": (1, 2), "question": (0,)}}
