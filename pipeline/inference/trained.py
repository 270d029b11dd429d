"""Answers read off fitted maps: as deep as each task's map was fitted, or as it takes to be sure.

Knows readouts, questions as tokens, and states after a layer. Knows nothing of text, of files or
of how states come about.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.depths import Depth, Place
from pipeline.inference.model import LoadedModel
from pipeline.inference.plain_answers import own_words
from pipeline.inference.reading import read_at_once
from pipeline.inference.schedules import Schedule
from pipeline.inference.tokens import Question
from pipeline.inference.whole_labels import label_log_probs
from pipeline.readout_file import LinearMap, Readout
from pipeline.spec import ExitSpec

Readouts = Mapping[str, Readout]  # by task


def default_layer(question: Question, readouts: Readouts, way: ExitSpec | None, layers: int) -> int:
    """After how many of the model's layers a question is answered, where nothing is sure before."""
    readout = readouts.get(question.name)
    if readout is None:
        return layers
    return readout.card.layer if way is None or way.layer is None else way.layer


def layers_read(
    questions: Sequence[Question], readouts: Readouts, way: ExitSpec | None, layers: int
) -> list[int]:
    """After which layers states are read, rising."""
    default = {default_layer(question, readouts, way, layers) for question in questions}
    return sorted(default.union(way.layers if way else ()))


def check_maps(readouts: Readouts, *, layers: int, hidden: int) -> None:
    """ModelError unless every map reads states of a model of this many layers and this width."""
    for name, readout in readouts.items():
        for layer, fitted in readout.maps.items():
            _, width = fitted.weight.shape
            if layer > layers or width != hidden:
                raise ModelError(
                    f"the readout of {name!r} reads states of {width} numbers after layer {layer}; "
                    f"the model has {layers} layers of {hidden}; fit it on this model"
                )


class StackedMaps:
    """The maps of all questions that read one place at one layer, as one matrix."""

    def __init__(self, maps: Mapping[int, LinearMap], device: torch.device) -> None:
        """By question."""
        stacked = [np.concatenate([m.weight for m in maps.values()])]
        stacked.append(np.concatenate([m.bias for m in maps.values()]))
        self._weight, self._bias = (torch.from_numpy(part).to(device) for part in stacked)
        self._questions = list(maps)
        self._labels = [len(m.bias) for m in maps.values()]

    def log_probs(
        self,
        states: Tensor,  # [docs, hidden]
    ) -> Iterator[tuple[int, Tensor]]:  # a question and its [docs, labels] fp32
        """Every question's answers, from one product for all of them."""
        logits = torch.nn.functional.linear(states.float(), self._weight, self._bias)
        by_question = torch.split(logits, self._labels, dim=1)
        for question, of_question in zip(self._questions, by_question, strict=True):
            yield question, of_question.log_softmax(dim=-1)


class TrainedAnswers:
    """Questions of which some are read off fitted maps, laid out once for any documents."""

    def __init__(
        self,
        schedule: Schedule,
        questions: Sequence[Question],
        readouts: Readouts,
        way: ExitSpec | None,
        model: LoadedModel,
    ) -> None:
        self._questions = questions
        self._device, self._unembed = model.device, model.unembed
        self._places = [_places(question, readouts) for question in questions]
        self._default = [default_layer(q, readouts, way, model.layers) for q in questions]
        self._sure = frozenset(way.layers if way else ())
        self._log_confidence = math.log(way.confidence) if way and way.confidence else 0.0
        self._plain = {
            i: own_words(question, model.device)
            for i, question in enumerate(questions)
            if question.name not in readouts
        }
        depths = [self._depth(at) for at in layers_read(questions, readouts, way, model.layers)]
        self._maps = {
            (depth.layer, place): StackedMaps(maps, model.device)
            for depth in depths
            for place in depth.places
            if (maps := self._maps_at(depth.layer, place, readouts))
        }
        self._looked = schedule.look(depths)
        self.alone = [n for i, q in enumerate(questions) for n in self._alone(i, q)]
        self.question_tokens = self._looked.question_tokens

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Of documents, and below them."""
        return read_at_once(self._looked, documents)

    def _alone(self, i: int, question: Question) -> list[int]:
        """The tokens below a document of the question's own prompts."""
        if i in self._plain:
            return question.alone
        return [len(place or ()) for place in self._places[i]]

    def _read_at(self, layer: int) -> list[int]:
        """The questions that are read at a layer; all of them where documents may leave."""
        questions = range(len(self._questions))
        return [i for i in questions if layer in self._sure or self._default[i] == layer]

    def _depth(self, layer: int) -> Depth:
        places = dict.fromkeys(place for i in self._read_at(layer) for place in self._places[i])
        return Depth(layer, tuple(places))

    def _maps_at(self, layer: int, place: Place, readouts: Readouts) -> dict[int, LinearMap]:
        return {
            i: readouts[self._questions[i].name].maps[layer]
            for i in self._read_at(layer)
            if self._places[i] == (place,) and i not in self._plain
        }

    def answers(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [docs, labels] fp32 a question."""
        found = [self._unanswered(len(documents), question) for question in self._questions]
        going = list(range(len(documents)))

        def take(depth: Depth, states: Sequence[Tensor]) -> list[int] | None:
            read = self._read(depth, states)
            for i, log_probs in read.items():
                if self._default[i] != depth.layer:
                    continue
                if len(going) == len(documents):  # a device need not be told which
                    found[i] = log_probs
                else:
                    found[i][going] = log_probs
            if depth.layer not in self._sure:
                return None
            settled = self._settled(read)
            for i, log_probs in read.items():
                found[i][[going[d] for d in settled]] = log_probs[settled]
            left = sorted({*range(len(going))} - {*settled})
            going[:] = [going[d] for d in left]
            return left

        self._looked.descend(documents, take)
        return found

    def _unanswered(self, documents: int, question: Question) -> Tensor:  # [docs, labels] fp32
        shape = (documents, len(question.labels))
        return torch.full(shape, torch.nan, dtype=torch.float32, device=self._device)

    def _read(self, depth: Depth, states: Sequence[Tensor]) -> dict[int, Tensor]:
        """[docs, labels] of each question that is read at the depth."""
        at_place = dict(zip(depth.places, states, strict=True))  # [docs, hidden]
        read: dict[int, Tensor] = {}
        for place in depth.places:
            if maps := self._maps.get((depth.layer, place)):
                read.update(maps.log_probs(at_place[place]))
        plain = [i for i in self._plain if self._default[i] == depth.layer]
        if plain:
            hidden = torch.stack([at_place[place] for i in plain for place in self._places[i]])
            answered = label_log_probs(hidden, [self._plain[i] for i in plain], self._unembed)
            read.update(zip(plain, answered, strict=True))
        return read

    def _settled(self, read: Mapping[int, Tensor]) -> list[int]:
        """The documents of whose every answer one label has the confidence that is wanted."""
        surest = torch.stack([log_probs.amax(dim=1) for log_probs in read.values()])
        sure = surest.amin(dim=0) >= self._log_confidence  # [docs]
        settled: list[int] = sure.nonzero().flatten().tolist()
        return settled


def _places(question: Question, readouts: Readouts) -> tuple[Place, ...]:
    readout = readouts.get(question.name)
    if readout is None:
        return tuple(question.sequences)
    return (None if readout.card.pooling == "mean" else question.token_ids,)
