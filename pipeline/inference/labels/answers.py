"""Questions that are answered in one forward, by label tokens or by trained readouts.

Entry point: `OnePassQuestions`. Each trained readout is read after its own layer, and label tokens
after the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.fitted.readout import LinearMap, Readout
from pipeline.inference.labels.prompt_tokens import Question
from pipeline.inference.labels.scoring import LabelScorer, label_log_probs, label_scorer
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules import Schedule, tokens_read
from pipeline.inference.schedules.batching import Usage
from pipeline.inference.schedules.forward import LayerStates, ReadPoint

Readouts = Mapping[str, Readout]  # by task


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


class StackedMaps:
    """The maps of all questions that read the same state, as one matrix."""

    def __init__(self, maps: Mapping[int, LinearMap], device: torch.device) -> None:
        """`maps` are by question number."""
        weight = np.concatenate([m.weight for m in maps.values()])  # [all labels, hidden]
        bias = np.concatenate([m.bias for m in maps.values()])  # [all labels]
        self._weight, self._bias = (torch.from_numpy(a).to(device) for a in (weight, bias))
        self._questions = list(maps)
        self._labels = [len(m.bias) for m in maps.values()]

    def log_probs(
        self,
        states: Tensor,  # [docs, hidden]
    ) -> Iterator[tuple[int, Tensor]]:  # a question's number and its [docs, labels] fp32
        """The answers of every question, from one product for all."""
        _docs, _hidden = states.shape
        logits = torch.nn.functional.linear(states.float(), self._weight, self._bias)
        by_question = torch.split(logits, self._labels, dim=1)
        for question, of_question in zip(self._questions, by_question, strict=True):
            yield question, of_question.log_softmax(dim=-1)


@dataclass(frozen=True, slots=True)
class _LayerAnswers:
    """What is answered from the states of one read point; questions are by number."""

    point: ReadPoint  # the suffixes of scorers first, then one for each of `maps`
    scorers: Mapping[int, LabelScorer]
    maps: Sequence[StackedMaps]
    mean_maps: StackedMaps | None

    def log_probs(self, states: LayerStates, model: LoadedModel) -> dict[int, Tensor]:
        """By question: [docs, labels] fp32."""
        answers: dict[int, Tensor] = {}
        of_scorers = len(self.point.suffixes) - len(self.maps)
        if self.scorers:
            scored = states.at_suffixes[:of_scorers]
            by_question = label_log_probs(scored, list(self.scorers.values()), model.unembed)
            answers.update(zip(self.scorers, by_question, strict=True))
        for maps, at_suffix in zip(self.maps, states.at_suffixes[of_scorers:], strict=True):
            answers.update(maps.log_probs(at_suffix))
        if self.mean_maps is not None and states.mean is not None:
            answers.update(self.mean_maps.log_probs(states.mean))
        return answers


class OnePassQuestions:
    """Questions that are answered in one forward: by label tokens, or by trained readouts."""

    has_searches = False  # whether `max_tokens` limits what is read at once for a document

    def __init__(
        self,
        questions: Sequence[Question],
        schedule: Schedule,
        model: LoadedModel,
        readouts: Readouts,
    ) -> None:
        self._questions, self._model, self._readouts = questions, model, readouts
        layers = sorted({layer_of(question, readouts, model.layers) for question in questions})
        self._layers = [self._layer_answers(layer) for layer in layers]
        self._reader = schedule.reader([of_layer.point for of_layer in self._layers])
        # Tokens that go through the model together with every document.
        self.question_tokens = self._reader.question_tokens
        # Tokens below the document of each independent prompt that would ask the same.
        self.suffix_lengths = [n for question in questions for n in self._suffix_lengths(question)]

    def _layer_answers(self, layer: int) -> _LayerAnswers:
        scored: dict[int, Question] = {}
        by_suffix: dict[tuple[int, ...], dict[int, LinearMap]] = {}
        by_mean: dict[int, LinearMap] = {}
        for i, question in enumerate(self._questions):
            if layer_of(question, self._readouts, self._model.layers) != layer:
                continue
            readout = self._readouts.get(question.name)
            if readout is None:
                scored[i] = question
            elif readout.card.pooling == "mean":
                by_mean[i] = readout.maps[layer]
            else:
                by_suffix.setdefault(question.token_ids, {})[i] = readout.maps[layer]
        of_scorers = [suffix for question in scored.values() for suffix in question.suffixes]
        device = self._model.device
        return _LayerAnswers(
            ReadPoint(layer, (*of_scorers, *by_suffix), mean=bool(by_mean)),
            {i: label_scorer(question, device) for i, question in scored.items()},
            [StackedMaps(maps, device) for maps in by_suffix.values()],
            StackedMaps(by_mean, device) if by_mean else None,
        )

    def _suffix_lengths(self, question: Question) -> list[int]:
        readout = self._readouts.get(question.name)
        if readout is None:
            return question.suffix_lengths
        return [0 if readout.card.pooling == "mean" else len(question.token_ids)]

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> Usage:
        """The tokens read of these documents and below them, once they are answered."""
        return tokens_read(self._reader, documents)

    @torch.inference_mode()
    def answers(
        self, documents: Sequence[Sequence[int]], *, max_tokens: int
    ) -> list[Tensor]:  # one [docs, labels] fp32 a question
        """Label log-probabilities. `max_tokens` limits what a search reads at once."""
        answers: dict[int, Tensor] = {}
        for of_layer, states in zip(self._layers, self._reader.read(documents), strict=True):
            answers |= of_layer.log_probs(states, self._model)
        return [answers[number] for number in range(len(self._questions))]
