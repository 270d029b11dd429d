"""A call's questions, laid out: each kind of answer where it is read with the fewest tokens.

    read off fitted maps     ──┐
    first tokens             ──┼── at once, in one forward over whole documents
    whole labels             ──┘
    searched: a beam, or very many labels  ──  below a document that is kept

First tokens and whole labels go with the searched ones, where no map is read: then a document is
read once. Maps may need states of it at any layer, which a kept one has not: only where a call has
both is a document read for each. Knows which kind a question is. Knows nothing of how any is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.fitted.readout import LinearMap, Readout
from pipeline.inference.labels.beam import search
from pipeline.inference.labels.first_token import FirstTokens
from pipeline.inference.labels.full_label import WholeLabels, label_log_probs
from pipeline.inference.labels.prompt_tokens import Question
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import TokensRead, read_at_once
from pipeline.inference.schedules.interface import Depth, KeptText, Place, Schedule
from pipeline.spec.schema import ExitSpec


class LaidOut(Protocol):
    """Questions laid out once, for any number of documents."""

    @property
    def question_tokens(self) -> int:
        """Tokens that go through the model together with a document."""

    @property
    def alone(self) -> Sequence[int]:
        """The tokens below a document of each prompt that would ask for this without a tree."""

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Of documents, and below them, once these have been answered."""

    def answers(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [docs, labels] fp32 a question."""


def lay_out(
    questions: Sequence[Question],
    schedule: Schedule,
    model: LoadedModel,
    readouts: Readouts,
    way: ExitSpec | None,
    *,
    max_tokens: Callable[[], int],  # that go through the model at once; memory may lower it
) -> LaidOut:
    """The questions, so that whatever can be read together is."""
    searched = [question.searched for question in questions]
    if any(question.name in readouts for question in questions):
        at_once = [question for question in questions if not question.searched]
        trained = TrainedAnswers(schedule, at_once, readouts, way, model)
        if not any(searched):
            return trained
        below = [question for question in questions if question.searched]
        kept = SearchedAnswers(below, schedule, model, max_tokens=max_tokens)
        return _Both(trained, kept, searched)
    if any(searched):
        return SearchedAnswers(questions, schedule, model, max_tokens=max_tokens)
    return PlainAnswers(questions, schedule, model)


class _Both:
    """What is read at once, and what is searched, each in its own reading of a document."""

    def __init__(self, at_once: LaidOut, kept: LaidOut, searched: Sequence[bool]) -> None:
        self._at_once, self._kept, self._searched = at_once, kept, searched
        self.question_tokens = at_once.question_tokens
        self.alone = [*at_once.alone, *kept.alone]

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Of documents, and below them."""
        parts = (part.tokens_read(documents) for part in (self._at_once, self._kept))
        of_documents, below = zip(*parts, strict=True)
        return sum(of_documents), sum(below)

    def answers(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [docs, labels] fp32 a question."""
        at_once, kept = (iter(p.answers(documents)) for p in (self._at_once, self._kept))
        return [next(kept) if searched else next(at_once) for searched in self._searched]


class PlainAnswers:
    """Questions of which none is searched, laid out once for any documents."""

    def __init__(
        self, questions: Sequence[Question], schedule: Schedule, model: LoadedModel
    ) -> None:
        self._asked = schedule.ask([s for question in questions for s in question.sequences])
        self._words = [own_words(question, model.device) for question in questions]
        self._unembed = model.unembed
        self.alone = [tokens for question in questions for tokens in question.alone]
        self.question_tokens = self._asked.question_tokens

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Of documents, and below them."""
        return read_at_once(self._asked, documents)

    def answers(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [docs, labels] fp32 a question."""
        states = self._asked.states(documents)  # [sequences, docs, hidden]
        return label_log_probs(states, self._words, self._unembed)


def own_words(question: Question, device: torch.device) -> FirstTokens | WholeLabels:
    """What the states at the question's sequences are read for."""
    if question.trie is None:
        return FirstTokens.of(list(question.labels.values()), device)
    return WholeLabels.of(question.trie, device)


class SearchedAnswers:
    """Questions of which some are searched, laid out once for any documents."""

    def __init__(
        self,
        questions: Sequence[Question],
        schedule: Schedule,
        model: LoadedModel,
        *,
        max_tokens: Callable[[], int],  # that go through the model at once; memory may lower it
    ) -> None:
        self._questions, self._schedule, self._max_tokens = questions, schedule, max_tokens
        at_once = [question for question in questions if not question.searched]
        self._sequences = [s for question in at_once for s in question.sequences]
        self._words = [own_words(question, model.device) for question in at_once]
        self._unembed = model.unembed
        self._laid_out = schedule.ask(self._sequences)
        self._read = TokensRead()  # of kept documents, and below them
        self.alone = [tokens for question in questions for tokens in question.alone]
        self.question_tokens = self._laid_out.question_tokens  # what is searched comes later

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Of documents, and below them: how much of a trie was followed depends on the document."""
        of_documents, _ = read_at_once(self._laid_out, documents)
        return of_documents, self._read.tokens - of_documents

    def answers(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [docs, labels] fp32 a question."""
        by_document = [self._answers(document) for document in documents]
        return [torch.cat(of_question) for of_question in zip(*by_document, strict=True)]

    def _answers(self, document: Sequence[int]) -> list[Tensor]:  # one [1, labels] a question
        text = self._schedule.keep(document, self._read)
        at_once: Iterator[Tensor] = iter(())
        if self._words:
            states = text.states(self._sequences).unsqueeze(1)  # [sequences, 1, hidden]
            at_once = iter(label_log_probs(states, self._words, self._unembed))
        return [
            self._search(text, question) if question.searched else next(at_once)
            for question in self._questions
        ]

    def _search(self, text: KeptText, question: Question) -> Tensor:  # [1, labels]
        assert question.trie is not None, question.name
        *prefix, last = question.token_ids
        asking = text.extended(prefix) if prefix else text
        found = search(
            question.trie,
            lambda paths: asking.states([(last, *path) for path in paths]),
            self._unembed,
            beam=question.beam,
            max_tokens=self._max_tokens(),
        )
        return torch.from_numpy(found).unsqueeze(0)


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
