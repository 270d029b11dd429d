"""The fused schedule: documents and their questions in one forward, nothing kept after a layer.

Knows token ids and the packed tree. Knows nothing of labels, text or batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.inference.attention.compiled import to_device
from pipeline.inference.attention.hook import PrefixKV, TreeAttention
from pipeline.inference.attention.tree import Branches, Tree
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import TokensRead
from pipeline.inference.schedules.forward import (
    at_ends,
    compiled,
    end_states,
    everywhere,
    packed,
    prefill,
    run,
)
from pipeline.inference.schedules.hooks import states_at
from pipeline.inference.schedules.interface import Depth, Take, sequences_of


class FusedSchedule:
    """A model with the keys and values of its prefix."""

    def __init__(
        self, model: LoadedModel, prefix: Sequence[int], *, layers: int | None = None
    ) -> None:
        self._model = model
        self._prefix = prefill(model, prefix, layers=layers)

    def ask(self, questions: Sequence[Sequence[int]]) -> FusedQuestions:
        """The questions, laid out below any document; what several begin with is read once."""
        return FusedQuestions(self._model, self._prefix, questions)

    def look(self, depths: Sequence[Depth]) -> FusedDepths:
        """The places of states at several layers, laid out below any document."""
        return FusedDepths(self._model, self._prefix, depths)

    def keep(self, document: Sequence[int], laid_out: TokensRead) -> FusedText:
        """A document that is read once, for whatever will be asked below it."""
        return FusedText(self._model, self._prefix, (), laid_out).extended(document)


class FusedQuestions:
    """Questions as the branches of one tree."""

    prefix_tokens = 0

    def __init__(
        self, model: LoadedModel, prefix: PrefixKV | None, questions: Sequence[Sequence[int]]
    ) -> None:
        self._model = model
        self._prefix = prefix
        self._branches = Branches.of(questions)
        self._ends = sorted(set(self._branches.ends))
        places = [self._ends.index(end) for end in self._branches.ends]
        self._end_of_question = torch.tensor(places, device=model.device)  # [questions] int64

    @property
    def question_tokens(self) -> int:
        return len(self._branches.token_ids)

    def states(self, documents: Sequence[Sequence[int]]) -> Tensor:  # [questions, docs, hidden]
        """The states at the questions' last tokens, in one forward over whole documents."""
        tree = Tree.of(
            [len(document) for document in documents],
            self._branches.nodes,
            prefix_tokens=self._prefix.tokens if self._prefix else 0,
        )
        read = [token for document in documents for token in document]
        token_ids = [*read, *self._branches.token_ids * len(documents)]
        states = end_states(
            self._model, token_ids, tree, prefix=self._prefix, ends=self._ends
        )  # [docs, ends, hidden]
        return states[:, self._end_of_question].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class FusedText:
    """A text whose keys and values are kept, but for its last token, which every forward reads."""

    model: LoadedModel
    prefix: PrefixKV | None
    left: tuple[int, ...]
    laid_out: TokensRead  # grows by what is read here

    def extended(self, token_ids: Sequence[int]) -> FusedText:
        """The text with these behind it."""
        *read, last = (*self.left, *token_ids)
        self.laid_out.tokens += len(read)
        return replace(self, prefix=prefill(self.model, read, prefix=self.prefix), left=(last,))

    def states(self, sequences: Sequence[Sequence[int]]) -> Tensor:  # [sequences, hidden]
        """The states at the sequences' last tokens, in one forward."""
        asked = FusedQuestions(self.model, self.prefix, sequences)
        self.laid_out.tokens += len(self.left) + asked.question_tokens
        return asked.states([self.left])[:, 0]


@dataclass(frozen=True, slots=True)
class _Step:
    """How the decoder gets from one depth to the next."""

    depth: Depth
    rows: tuple[int, ...]  # of one copy of the branches: where its token places end, rising
    body: nn.Module | None  # layers that are run at every row
    last: nn.Module | None  # the layer after them, where only the ends are wanted of it


class FusedDepths:
    """Places as the branches of one tree."""

    prefix_tokens = 0

    def __init__(
        self, model: LoadedModel, prefix: PrefixKV | None, depths: Sequence[Depth]
    ) -> None:
        self._model = model
        self._prefix = prefix
        sequences = sequences_of(depths)
        self._branches = Branches.of(sequences)
        self._end_of = dict(zip(sequences, self._branches.ends, strict=True))
        starts = [0, *(depth.layer for depth in depths)]
        self._steps = [
            self._step(start, depth, deepest=depth is depths[-1])
            for (start, _), depth in zip(pairwise(starts), depths, strict=True)
        ]

    @property
    def question_tokens(self) -> int:
        return len(self._branches.token_ids)

    def _step(self, start: int, depth: Depth, *, deepest: bool) -> _Step:
        ends = {self._end_of[place] for place in depth.places if place is not None}
        rows, stages, stop = tuple(sorted(ends)), self._model.stages, depth.layer
        if stages is None:
            return _Step(depth, rows, None, None)
        # The first layer reads ids, which go through the embedding once.
        if not deepest or None in depth.places or stop == 1:
            return _Step(depth, rows, stages.part(start, stop), None)
        body = stages.part(start, stop - 1) if start < stop - 1 else None
        return _Step(depth, rows, body, stages.part(stop - 1, stop))

    @torch.inference_mode()
    def descend(self, documents: Sequence[Sequence[int]], take: Take) -> None:
        """Hands the states of every depth to `take`; the documents it does not keep are left."""
        tree = Tree.of(
            [len(document) for document in documents],
            self._branches.nodes,
            prefix_tokens=self._prefix.tokens if self._prefix else 0,
        )
        read = [token for document in documents for token in document]
        token_ids = [*read, *self._branches.token_ids * len(documents)]
        batch = _Batch(self._model, self._prefix, tree, np.array(token_ids))
        if self._model.stages is None:
            batch.run_whole([step.depth.layer for step in self._steps])
        for step in self._steps:
            going = take(step.depth, self._states(batch, step))
            if going is not None and len(going) < len(batch.tree.documents):
                if not going:
                    return
                batch.keep(going)

    def _states(self, batch: _Batch, step: _Step) -> list[Tensor]:  # a place: [docs, hidden]
        at_rows = batch.advance(step)  # [docs, ends, hidden]
        return [
            batch.means() if place is None else at_rows[:, step.rows.index(self._end_of[place])]
            for place in step.depth.places
        ]


class _Batch:
    """Packed documents on their way down: the states of their rows, after some layer."""

    def __init__(
        self,
        model: LoadedModel,
        prefix: PrefixKV | None,
        tree: Tree,
        token_ids: NDArray[np.int64],  # [rows]
    ) -> None:
        self._model, self._prefix = model, prefix
        self._whole: dict[int, Tensor] = {}  # by layer, where the decoder is run whole
        ids, self._positions = to_device([token_ids, tree.positions], model.device)
        self._read = {"input_ids": ids}
        self._enter(tree)

    def _enter(self, tree: Tree) -> None:
        self.tree = tree
        plans = everywhere(self._model, tree)
        launches = compiled(self._model, plans)
        self._attention = TreeAttention(plans, self._prefix, compiled=launches)

    def run_whole(self, layers: Sequence[int]) -> None:
        """All layers that are needed, for a decoder that cannot be cut."""
        called = packed(self._attention, self._positions, **self._read)
        found = states_at(self._model.decoder, layers, **called)
        self._whole = {layer: states[0] for layer, states in found.items()}

    def advance(self, step: _Step) -> Tensor:  # [docs, ends, hidden]
        """Goes down to the step's depth, and gives the states at its ends."""
        [rows] = to_device([self.tree.rows_at(step.rows)], self._model.device)
        if self._whole:
            self._read = {"inputs_embeds": self._whole[step.depth.layer]}
        if step.body is not None:
            states = run(step.body, self._attention, self._positions, **self._read)
            self._read = {"inputs_embeds": states}
        states = self._read["inputs_embeds"]
        if step.last is not None:
            args = (self.tree, states, self._positions, rows, self._prefix, step.rows)
            return at_ends(self._model, step.last, *args)
        return states[rows].view(len(self.tree.documents), len(step.rows), states.shape[-1])

    def means(self) -> Tensor:  # [docs, hidden] fp32
        """The mean of the states at each document's own tokens."""
        states = self._read["inputs_embeds"][: self.tree.document_rows]
        [lengths] = to_device([np.array(self.tree.documents)], self._model.device)
        # — `unsafe` leaves out the check of the lengths, for which a device would be waited for
        return torch.segment_reduce(states.float(), "mean", lengths=lengths, unsafe=True)

    def keep(self, documents: Sequence[int]) -> None:
        """Goes on with these documents alone."""
        [rows] = to_device([self.tree.rows_of(documents)], self._model.device)
        self._positions = self._positions[rows]
        self._read = {"inputs_embeds": self._read["inputs_embeds"][rows]}
        self._whole = {layer: states[rows] for layer, states in self._whole.items()}
        self._enter(self.tree.only(documents))
