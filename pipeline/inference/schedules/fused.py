"""The fused schedule: documents and what is below them go through the model in one forward.

Documents are packed without padding. No keys or values outlive a layer, except those of the
prefix. Entry point: `FusedSchedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from pipeline.inference.attention.hook import PrefixKV, TreeAttention
from pipeline.inference.attention.tree import Branches, Tree
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.model.vision import ImageRows
from pipeline.inference.schedules.batching import TokenCounter
from pipeline.inference.schedules.forward import (
    LayerStates,
    OnLayer,
    PackedStates,
    ReadPoint,
    Suffix,
    attend_everywhere,
    deliver,
    packed,
    prefill,
    run,
    run_at_ends,
    run_to_layers,
)
from pipeline.inference.schedules.inputs import batch_inputs


@dataclass(frozen=True, slots=True)
class FusedSchedule:
    """A model with the keys and values of a text: the prefix, or a document below the prefix."""

    model: LoadedModel
    prefix: PrefixKV | None
    unread: Sequence[int] = ()  # a document's last token, which every forward below it reads

    @classmethod
    def below(
        cls, model: LoadedModel, prefix: Sequence[int], *, layers: int | None = None
    ) -> FusedSchedule:
        return cls(model, prefill(model, prefix, layers=layers))

    def reader(self, points: Sequence[ReadPoint]) -> FusedReader:
        """A reader of these points; tokens that several suffixes begin with are read once."""
        return FusedReader(self, points)

    def extended(self, token_ids: Sequence[int], counter: TokenCounter) -> FusedSchedule:
        """The text followed by these tokens, at least one; `counter` counts what is read."""
        spans = [self.unread, token_ids[:-1] if len(token_ids) > 1 else ()]
        if not any(isinstance(span, ImageRows) for span in spans):
            spans = [[token for span in spans for token in span]]
        prefix = self.prefix
        for span in spans:
            counter.tokens += len(span)
            prefix = prefill(self.model, span, prefix=prefix)
        return FusedSchedule(self.model, prefix, token_ids[-1:])

    def states(
        self, suffixes: Sequence[Suffix], counter: TokenCounter
    ) -> Tensor:  # [suffixes, hidden]
        """The last layer's normalised states at the suffixes' last tokens, in one forward."""
        reader = self.reader([ReadPoint(self.model.layers, tuple(suffixes))])
        counter.tokens += len(self.unread) + reader.question_tokens
        by_layer: list[LayerStates] = []
        reader.read_layers([self.unread], by_layer.append)
        return by_layer[0].at_suffixes[:, 0]


@dataclass(frozen=True, slots=True)
class _Step:
    """How the decoder gets from one read point to the next."""

    point: ReadPoint
    ends: tuple[int, ...]  # rows of one copy of the branches: the suffixes' last tokens, rising
    end_of_suffix: Tensor  # [suffixes] int64: index into `ends`
    start: int  # the number of the first layer that is run
    body: nn.Module | None  # the layers that are run at every row
    last: nn.Module | None  # the layer after them, if it is run at the ends alone


class FusedReader:
    """Read points whose suffixes are the branches of one tree."""

    repeated_prefix_tokens = 0  # tokens of the prefix that are read again with every document

    def __init__(self, schedule: FusedSchedule, points: Sequence[ReadPoint]) -> None:
        self._model, self._prefix = schedule.model, schedule.prefix
        suffixes = list(dict.fromkeys(suffix for point in points for suffix in point.suffixes))
        self._branches = Branches.of(suffixes)
        self._end_of = dict(zip(suffixes, self._branches.ends, strict=True))
        starts = [0, *(point.layer for point in points)]
        self._steps = [
            self._step(start, point, deepest=point is points[-1])
            for (start, _), point in zip(pairwise(starts), points, strict=True)
        ]

    @property
    def question_tokens(self) -> int:
        """Tokens below every document that go through the model."""
        return len(self._branches.token_ids)

    def _step(self, start: int, point: ReadPoint, *, deepest: bool) -> _Step:
        rows = [self._end_of[suffix] for suffix in point.suffixes]
        number = {row: i for i, row in enumerate(sorted(set(rows)))}
        ends = tuple(number)
        numbers = [number[row] for row in rows]
        end_of_suffix = torch.tensor(numbers, dtype=torch.int64, device=self._model.device)
        body, last, stages, stop = None, None, self._model.stages, point.layer
        if stages is not None:
            # — the first layer reads token ids, which go through the embedding once
            at_ends = deepest and not point.mean and stop > 1
            if not at_ends:
                body = stages.part(start, stop)
            else:
                body = stages.part(start, stop - 1) if start < stop - 1 else None
                last = stages.part(stop - 1, stop)
        return _Step(point, ends, end_of_suffix, start, body, last)

    @torch.inference_mode()
    def read_layers(self, documents: Sequence[Sequence[int]], on_layer: OnLayer) -> None:
        """Gives the states of every read point to `on_layer`, from the first layer down.

        A document may be `ImageRows`.
        """
        tree = Tree.of(
            [len(document) for document in documents],
            self._branches.nodes,
            prefix_tokens=self._prefix.tokens if self._prefix else 0,
        )
        inputs = batch_inputs(self._model, tree, documents, self._branches.token_ids, self._prefix)
        positions, deep = inputs.positions, inputs.deep.from_layer(0)
        attention = attend_everywhere(self._model, tree, self._prefix)
        if self._model.stages is not None:
            body = self._steps[0].body
            assert body is not None, self._steps[0]
            # — nothing here keeps these states while deeper layers replace them
            self._read_in_parts(
                PackedStates(
                    tree,
                    positions,
                    run(body, attention, positions, deep, **inputs.rows),
                    inputs.deep,
                ),
                attention,
                on_layer,
            )
            return
        steps = {step.point.layer: step for step in self._steps}
        by_layer: list[LayerStates] = []

        def keep(layer: int, states: Tensor) -> None:  # [1, rows, hidden]
            batch = PackedStates(tree, positions, states[0])
            by_layer.append(self._layer_states(steps[layer], batch))

        # — the decoder cannot be cut: all documents go to the deepest layer
        arguments = packed(attention, positions, deep, **inputs.rows)
        run_to_layers(self._model.decoder, steps, keep, **arguments)
        deliver(by_layer, on_layer)

    def _read_in_parts(
        self, batch: PackedStates, attention: TreeAttention, on_layer: OnLayer
    ) -> None:
        """From the first read point on: deeper layers are run for documents that continue alone."""
        first, *others = self._steps
        continuing = on_layer(self._layer_states(first, batch))
        for step in others:
            if continuing is not None and len(continuing) < len(batch.tree.documents):
                if not continuing:
                    return
                batch = batch.of_documents(continuing)
                attention = attend_everywhere(self._model, batch.tree, self._prefix)
            if step.body is not None:
                states = run(
                    step.body,
                    attention,
                    batch.positions,
                    batch.deep.from_layer(step.start),
                    inputs_embeds=batch.states,
                )
                batch = replace(batch, states=states)
            continuing = on_layer(self._layer_states(step, batch))

    def _layer_states(self, step: _Step, batch: PackedStates) -> LayerStates:
        if step.last is None:
            at_ends = batch.at_ends(step.ends)  # [docs, ends, hidden]
        else:
            at_ends = run_at_ends(self._model, step.last, batch, self._prefix, step.ends)
        return LayerStates(
            step.point.layer,
            at_ends[:, step.end_of_suffix].transpose(0, 1),
            batch.means() if step.point.mean else None,
        )
