"""What `VllmEngine` asks of vLLM and makes of its answers, against assay's own engine.

vLLM itself is a twin here that computes each prompt alone; `make test-vllm` runs the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import ModelError
from pipeline.inference import vllm_engine
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.schedules.batching import Usage
from pipeline.inference.vllm_engine import VllmEngine, VllmOptions, check_vllm, load_vllm

QUESTIONS = (
    Question("first", (5, 6), {"a": ((1,),), "b": ((2,), (3,))}),
    Question("full", (7,), {"x": ((1, 4), (1, 5)), "y": ((2, 4, 6),), "z": ((9,),)}),
)
PROMPT = PromptTokens((11, 12, 13), QUESTIONS)
DOCUMENTS = [[20, 21, 22], [30], [20, 21, 23, 24]]


class TwinOfVllm:
    """Computes every prompt by a forward of its own."""

    def __init__(self, network: Any) -> None:
        self.network, self.prompts, self.most_tokens = network, 0, 0

    def generate(
        self, prompts: Sequence[Any], sampling: Sequence[Any], *, use_tqdm: bool
    ) -> list[Any]:
        assert len(prompts) == len(sampling) and not use_tqdm
        self.prompts += len(prompts)
        self.most_tokens = max(self.most_tokens, *(len(s.logprob_token_ids) for s in sampling))
        return [
            self._answer(p["prompt_token_ids"], s) for p, s in zip(prompts, sampling, strict=True)
        ]

    @torch.inference_mode()
    def _answer(self, token_ids: list[int], sampling: Any) -> Any:
        logits = self.network(input_ids=torch.tensor([token_ids])).logits[0, -1].float()
        log_probs = logits.log_softmax(-1)
        tokens = {
            t: SimpleNamespace(logprob=float(log_probs[t])) for t in sampling.logprob_token_ids
        }
        return SimpleNamespace(
            prompt_token_ids=token_ids,
            num_cached_tokens=1,  # of the prefix
            outputs=[SimpleNamespace(logprobs=[tokens])],
        )


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    module.TokensPrompt = dict
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_its_answers_are_those_of_assays_own_engine(
    vllm: None, tiny_model: Callable[[str], Any], make_network: Callable[..., Any]
) -> None:
    own = LabelEngine(tiny_model("llama"), PROMPT, max_batch_tokens=1_000)
    twin = TwinOfVllm(make_network("llama").eval())
    read: list[int] = []
    engine = VllmEngine(twin, PROMPT, version="0", device="cpu")
    result = engine.label(DOCUMENTS, on_batch=read.extend)
    expected = own.label(DOCUMENTS)
    assert read == [0, 1, 2] and twin.prompts == 3 * (1 + 4)
    # — 3 of the prefix, but 1 is cached; then the document, the question, and a label's tokens
    below = 2 + sum(1 + label_tokens for label_tokens in (0, 1, 1, 2))
    read_tokens = sum(5 * (2 + len(document)) + below for document in DOCUMENTS)
    assert result.usage == Usage(8, read_tokens - 8)
    for row, other in zip(result.log_probs, expected.log_probs, strict=True):
        np.testing.assert_allclose(row, other, rtol=0, atol=1e-5)
    [alone] = engine.label(DOCUMENTS, tasks=["full"]).log_probs
    np.testing.assert_array_equal(alone, result.log_probs[1])
    assert engine.label([], tasks=["full"]).log_probs[0].shape == (0, 3)
    assert engine.label(DOCUMENTS, tasks=[]).log_probs == ()


def test_a_gpu_gets_more_prompts_at_once(vllm: None) -> None:
    twin = TwinOfVllm(lambda input_ids: SimpleNamespace(logits=torch.zeros(1, 1, 300)))
    for device, batches in (("cpu", [102, 8]), ("cuda", [110])):
        read: list[int] = []
        engine = VllmEngine(twin, PROMPT, version="0", device=device)
        engine.label([[20]] * 110, on_batch=lambda batch, read=read: read.append(len(batch)))
        assert read == batches


def test_a_node_of_many_tokens_is_asked_about_several_times(
    vllm: None, tiny_model: Callable[[str], Any], make_network: Callable[..., Any]
) -> None:
    labels = {f"label {token}": ((token, 7), (token, 8)) for token in range(10, 290)}
    prompt = PromptTokens((11,), (Question("many", (5,), labels),))
    twin = TwinOfVllm(make_network("llama").eval())
    engine = VllmEngine(twin, prompt, version="0", device="cpu")
    [actual] = engine.label([[20, 21]]).log_probs
    own = LabelEngine(tiny_model("llama"), prompt, max_batch_tokens=1_000)
    np.testing.assert_allclose(actual, own.label([[20, 21]]).log_probs[0], rtol=0, atol=1e-5)
    assert twin.prompts == 3 + 280 and twin.most_tokens == 128


@pytest.mark.parametrize("error", [AssertionError(), KeyError("rope"), RuntimeError("a\nrope")])
def test_a_model_that_vllm_does_not_load_is_one_line_with_its_log(
    error: Exception, vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **_options: object) -> None:
        raise error

    module: Any = sys.modules["vllm"]
    module.LLM, module.__version__ = load, "0"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(vllm_engine, "check_vllm", lambda _prompt: None)
    monkeypatch.setattr(vllm_engine, "cache_dir", lambda: tmp_path)
    options = VllmOptions("float32", "cuda", threads=1)
    reason = "AssertionError" if str(error) == "" else "rope"
    with pytest.raises(ModelError, match=f"not load this model: '?{reason}'?; see .*vllm.log$"):
        load_vllm(tmp_path, PROMPT, options, max_tokens=9)


def test_a_task_whose_labels_are_searched_is_refused_by_name() -> None:
    searched = Question("many", (5,), {"a": ((1,),), "b": ((2,),)}, beam=2)
    with pytest.raises(ModelError, match=r"task 'many': .*write engine: assay"):
        check_vllm(PromptTokens((), (searched,)))
