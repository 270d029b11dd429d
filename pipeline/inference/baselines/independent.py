"""Every task alone: one plain forward for each document and prompt, and the task's map on it.

What a check compares the tree with, where some tasks are read off fitted maps. Knows the
canonical prompt and the model as transformers runs it. Knows nothing of the tree or its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.fitted.readout import Readout
from pipeline.inference.baselines.baselines import per_question
from pipeline.inference.engine import DocumentIds
from pipeline.inference.labels.answers import Readouts
from pipeline.inference.labels.prompt_tokens import PromptTokens
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.spec.schema import ExitSpec

LogProbs = NDArray[np.float32]  # [labels]


def answers_alone(
    model: LoadedModel,
    prompt: PromptTokens,
    document: DocumentIds,
    *,
    readouts: Readouts,
    way: ExitSpec | None,
) -> list[LogProbs]:
    """Label log-probabilities of one document by question."""
    trained = [question for question in prompt.questions if question.name in readouts]
    plain = [question for question in prompt.questions if question.name not in readouts]
    (answered,) = per_question(model, replace(prompt, questions=tuple(plain)), [document])
    found = {q.name: a.numpy(force=True) for q, a in zip(plain, answered, strict=True)}
    read: dict[tuple[int, ...], list[Tensor]] = {}  # tasks of one prompt read the same states
    states = {}
    for question in trained:
        averaged = readouts[question.name].card.pooling == "mean"
        below = () if averaged else question.token_ids
        if below not in read:
            read[below] = _hidden_states(model, [*prompt.prefix, *document, *below])
        first = len(prompt.prefix) if averaged else -1
        states[question.name] = [_mean(of_layer[first:]) for of_layer in read[below]]
    layers = _layers(states, readouts, way)
    for name, by_layer in states.items():
        found[name] = _log_probs(by_layer, readouts[name], layers[name])
    return [found[question.name] for question in prompt.questions]


def _layers(
    states: dict[str, list[LogProbs]], readouts: Readouts, way: ExitSpec | None
) -> dict[str, int]:
    """Where each task of one document is read."""
    if way is not None and way.layer is not None:
        return dict.fromkeys(states, way.layer)
    for layer in way.layers if way else ():
        surest = [_log_probs(s, readouts[name], layer).max() for name, s in states.items()]
        if way and way.confidence and min(surest) >= np.log(way.confidence):
            return dict.fromkeys(states, layer)
    return {name: readouts[name].card.layer for name in states}


def _log_probs(states: list[NDArray[np.float32]], readout: Readout, layer: int) -> LogProbs:
    fitted = readout.maps[layer]
    logits = fitted.weight @ states[layer] + fitted.bias
    return np.asarray(logits - np.logaddexp.reduce(logits), dtype=np.float32)


@torch.inference_mode()
def _hidden_states(
    model: LoadedModel, token_ids: Sequence[int]
) -> list[Tensor]:  # by layer: [tokens, hidden]
    with plain_attention(model.network, "sdpa"):
        output = model.decoder(
            input_ids=torch.tensor([token_ids], device=model.device),
            use_cache=False,
            output_hidden_states=True,
        )
    return [states[0] for states in output.hidden_states]


def _mean(
    states: Tensor,  # [tokens, hidden]
) -> NDArray[np.float32]:  # [hidden]
    return np.asarray(states.float().mean(dim=0).numpy(force=True))
