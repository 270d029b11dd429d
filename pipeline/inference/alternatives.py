"""Labelling without a tree: what `assay check` compares the tree with.

The same questions on the same canonical prompts, with transformers' own attention. Entry points:
`answers_alone` for one document with readouts, and `per_question`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.fitted.readout import Readout
from pipeline.inference.engine import DocumentIds
from pipeline.inference.labels.answers import Readouts
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.labels.scoring import LabelScorer
from pipeline.inference.labels.trie import LabelTrie
from pipeline.inference.model.alone import PromptAlone, forward_alone, states_alone
from pipeline.inference.model.loaded import LoadedModel, plain_attention

LabelLogProbs = list[list[Tensor]]  # by document, by question: [labels]
Floats = NDArray[np.float32]


@torch.inference_mode()
def per_question(
    model: LoadedModel,
    prompt: PromptTokens,
    documents: Sequence[DocumentIds],
) -> LabelLogProbs:
    """One full forward for each document and question; with whole labels, for each verbalizer."""

    def answer(document: DocumentIds, question: Question) -> Tensor:  # [labels]
        alone = PromptAlone(prompt.prefix, document, question.token_ids)
        if question.scores_first_tokens:
            return _first_token_answer(model, alone, question.trie)
        return _whole_label_answer(model, alone, question.trie)

    with plain_attention(model.network):
        return [[answer(document, q) for q in prompt.questions] for document in documents]


@torch.inference_mode()
def answers_alone(
    model: LoadedModel,
    prompt: PromptTokens,
    document: DocumentIds,
    *,
    readouts: Readouts,
) -> list[Floats]:  # by question: [labels]
    """Log-probabilities of one document: each task by a plain forward, then by its readout."""
    untrained = [question for question in prompt.questions if question.name not in readouts]
    [answered] = per_question(model, replace(prompt, questions=tuple(untrained)), [document])
    answers = {q.name: a.numpy(force=True) for q, a in zip(untrained, answered, strict=True)}

    @cache  # tasks of one prompt read the same states
    def states_below(below: tuple[int, ...]) -> list[Tensor]:  # by layer: [tokens, hidden]
        alone = PromptAlone(prompt.prefix, document, below)
        with plain_attention(model.network):
            return states_alone(model, alone)

    for question in (q for q in prompt.questions if q.name in readouts):
        readout = readouts[question.name]
        averaged = readout.card.pooling == "mean"
        by_layer = states_below(() if averaged else question.token_ids)
        own = by_layer[readout.card.layer][len(prompt.prefix) if averaged else -1 :]
        answers[question.name] = _readout_log_probs(readout, own.float().mean(dim=0))
    return [answers[question.name] for question in prompt.questions]


def _readout_log_probs(
    readout: Readout,
    state: Tensor,  # [hidden] fp32
) -> Floats:  # [labels]
    linear = readout.maps[readout.card.layer]
    logits = linear.weight @ state.numpy(force=True) + linear.bias
    return np.asarray(logits - np.logaddexp.reduce(logits), dtype=np.float32)


def _first_token_answer(
    model: LoadedModel, prompt: PromptAlone, trie: LabelTrie
) -> Tensor:  # [labels]
    """The log-probability that each label's first token comes next."""
    states = forward_alone(model, prompt).last_hidden_state[:, -1:]  # [1, 1, hidden]
    [log_probs] = LabelScorer([trie], model.device).log_probs(states, model.unembed)
    return log_probs[0]


def _whole_label_answer(
    model: LoadedModel, prompt: PromptAlone, trie: LabelTrie
) -> Tensor:  # [labels] fp32
    """The log-probability of each label: the sum over its verbalizers, one full forward each."""

    def verbalizer_log_prob(path: Sequence[int]) -> Tensor:  # []
        whole = replace(prompt, after=(*prompt.after, *path))
        states = forward_alone(model, whole).last_hidden_state[0]
        # — the state at position i predicts token i + 1
        logits = model.unembed(states[len(prompt) - 1 : -1])  # [tokens, vocab]
        log_probs = logits.float().log_softmax(-1)
        total = log_probs[range(len(path)), list(path)].sum()
        return total / float(len(path) ** trie.length_penalty)

    of_labels = ([verbalizer_log_prob(path) for path in paths] for paths in trie.verbalizers)
    return torch.stack([torch.stack(own).logsumexp(0) for own in of_labels])
