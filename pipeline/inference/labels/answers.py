"""Questions grouped by how they are scored, so that each document is read once if possible.

    trained readouts   ──┐
    first tokens       ──┼── one forward over whole documents
    full labels        ──┘
    beams, large tries ──── a search below a document whose keys and values are kept

Entry point: `group_questions`. On a CPU, first tokens and full labels are read below the kept
document too, so a document is read once. Two kinds of calls with a search read documents twice. One
has readouts, which may need the states of any layer; a kept document does not have them. The other
is on a GPU, which reads a document in a batch faster than single questions below a kept one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.fitted.readout import LinearMap, Readout
from pipeline.inference.labels.prompt_tokens import Question
from pipeline.inference.labels.scoring import LabelScorer
from pipeline.inference.labels.searched import SearchedQuestions
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules import Schedule
from pipeline.inference.schedules.forward import LayerStates, ReadPoint

Readouts = Mapping[str, Readout]  # by task


def group_questions(
    questions: Sequence[Question], schedule: Schedule, model: LoadedModel, readouts: Readouts
) -> list[OnePassQuestions | SearchedQuestions]:
    """The questions in as few groups as their kinds allow; each group reads the documents once."""
    searched = [question for question in questions if question.searched]
    # — a search rounds the document's keys and values, where these are kept in another format
    reads_twice = model.kv != "none" or model.device.type == "cuda"
    reads_twice |= any(question.name in readouts for question in questions)
    if searched and not reads_twice:
        return [SearchedQuestions(questions, schedule, model)]
    others = [question for question in questions if not question.searched]
    groups: list[OnePassQuestions | SearchedQuestions] = []
    if others:
        groups.append(OnePassQuestions(others, schedule, model, readouts))
    if searched:
        groups.append(SearchedQuestions(searched, schedule, model))
    return groups


def layer_of(question: Question, readouts: Readouts, layers: int) -> int:
    """The layer after which a question is answered by a model of this many layers."""
    readout = readouts.get(question.name)
    return layers if readout is None else readout.card.layer


def check_readouts(readouts: Readouts, *, layers: int, hidden: int) -> None:
    """ModelError unless every readout fits a model of this many layers and this hidden size."""
    for name, readout in readouts.items():
        for layer, fitted in readout.maps.items():
            _labels, width = fitted.weight.shape
            if layer > layers or width != hidden:
                raise ModelError(
                    f"the readout of {name!r} reads states of {width} numbers after layer {layer}; "
                    f"the model has {layers} layers of {hidden}; fit it on this model"
                )


class _LayerAnswers:
    """What is answered from the states of one layer: by label tokens, or by trained readouts."""

    def __init__(
        self, layer: int, questions: Sequence[Question], readouts: Readouts, device: torch.device
    ) -> None:
        scored: list[Question] = []
        by_suffix: dict[tuple[int, ...], dict[str, LinearMap]] = {}
        by_mean: dict[str, LinearMap] = {}
        for question in questions:
            if (readout := readouts.get(question.name)) is None:
                scored.append(question)
                continue
            is_mean, below = readout.card.pooling == "mean", question.token_ids
            maps = by_mean if is_mean else by_suffix.setdefault(below, {})
            maps[question.name] = readout.maps[layer]
        of_scorer = [suffix for question in scored for suffix in question.suffixes]
        # The suffixes of the scorer first, then one for each state that maps read.
        self.point = ReadPoint(layer, (*of_scorer, *by_suffix), mean=bool(by_mean))
        self._scored, self._of_scorer = [question.name for question in scored], len(of_scorer)
        self._scorer = LabelScorer([question.trie for question in scored], device)
        # By state, the mean last: the labels of each question, and all of its maps as one.
        self._maps: list[tuple[dict[str, int], Tensor, Tensor]] = []
        for maps in filter(None, (*by_suffix.values(), by_mean)):
            weight = torch.from_numpy(np.concatenate([m.weight for m in maps.values()]))
            bias = torch.from_numpy(np.concatenate([m.bias for m in maps.values()]))
            labels = {name: len(m.bias) for name, m in maps.items()}
            self._maps.append((labels, weight.to(device), bias.to(device)))

    def log_probs(self, states: LayerStates, model: LoadedModel) -> dict[str, Tensor]:
        """By question: [docs, labels] fp32."""
        answers: dict[str, Tensor] = {}
        if self._scored:
            at_nodes = states.at_suffixes[: self._of_scorer]
            by_question = self._scorer.log_probs(at_nodes, model.unembed)
            answers.update(zip(self._scored, by_question, strict=True))
        own_states = [*states.at_suffixes[self._of_scorer :]]
        if states.mean is not None:
            own_states.append(states.mean)
        for (labels, weight, bias), state in zip(self._maps, own_states, strict=True):
            logits = torch.nn.functional.linear(state.float(), weight, bias)
            parts = torch.split(logits, list(labels.values()), dim=1)
            answers.update(zip(labels, (own.log_softmax(-1) for own in parts), strict=True))
        return answers


class OnePassQuestions:
    """Questions that are answered in one forward: by label tokens, or by trained readouts.

    Each readout is read after its own layer, and label tokens after the last.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        schedule: Schedule,
        model: LoadedModel,
        readouts: Readouts,
    ) -> None:
        self._model = model
        by_layer: dict[int, list[Question]] = {}
        for question in questions:
            by_layer.setdefault(layer_of(question, readouts, model.layers), []).append(question)
        self._layers = [
            _LayerAnswers(layer, by_layer[layer], readouts, model.device)
            for layer in sorted(by_layer)
        ]
        self._reader = schedule.reader([of_layer.point for of_layer in self._layers])
        # Tokens that go through the model together with every document.
        self.question_tokens = self._reader.question_tokens

    @torch.inference_mode()
    def answers(
        self, documents: Sequence[Sequence[int]], *, max_tokens: int
    ) -> dict[str, Tensor]:  # by question: [docs, labels] fp32
        """Label log-probabilities; `max_tokens` limits what a search reads at once."""
        answers: dict[str, Tensor] = {}
        for of_layer, states in zip(self._layers, self._reader.read(documents), strict=True):
            answers |= of_layer.log_probs(states, self._model)
        return answers
