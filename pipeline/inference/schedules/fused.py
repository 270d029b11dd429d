"""The fused schedule: documents and what is below them go through the model in one forward.

Documents are packed without padding. No keys or values outlive a layer, except those of the
prefix. Entry point: `FusedSchedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.inference.attention.hook import PrefixKV, TreeAttention
from pipeline.inference.attention.tiles import to_device
from pipeline.inference.attention.tree import Branches, Tree
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.forward import (
    LayerStates,
    PackedStates,
    ReadPoint,
    Suffix,
    prefill,
    run_to_layers,
)
from pipeline.inference.schedules.inputs import batch_inputs


@dataclass(frozen=True, slots=True)
class FusedSchedule:
    """A model with the keys and values of a text: the prefix, or a document below the prefix."""

    model: LoadedModel
    prefix: PrefixKV | None

    @classmethod
    def from_prefix(cls, model: LoadedModel, prefix: Sequence[int]) -> FusedSchedule:
        return cls(model, prefill(model, prefix))

    def reader(self, points: Sequence[ReadPoint]) -> FusedReader:
        """A reader of these points; tokens that several suffixes begin with are read once."""
        return FusedReader(self, points)

    def with_tokens(self, token_ids: Sequence[int]) -> FusedSchedule:
        """The text followed by these tokens."""
        return FusedSchedule(self.model, prefill(self.model, token_ids, prefix=self.prefix))

    def states(
        self, suffixes: Sequence[Suffix], *, below: Sequence[int] = ()
    ) -> Tensor:  # [suffixes, hidden]
        """The last layer's normalised states at the suffixes' last tokens, in one forward.

        `below` are tokens that follow the text, and that come before each of the suffixes.
        """
        [read] = self.reader([ReadPoint(self.model.layers, tuple(suffixes))]).read([below])
        return read.at_suffixes[:, 0]


class FusedReader:
    """Read points whose suffixes are the branches of one tree."""

    def __init__(self, schedule: FusedSchedule, points: Sequence[ReadPoint]) -> None:
        self._model, self._prefix, self._points = schedule.model, schedule.prefix, points
        suffixes = list(dict.fromkeys(suffix for point in points for suffix in point.suffixes))
        self._branches = Branches.of(suffixes)
        self._end_of = dict(zip(suffixes, self._branches.ends, strict=True))
        deepest = points[-1]
        # Of the deepest point: rows of one copy of the branches, rising, and each suffix's of them.
        rows = np.array([self._end_of[suffix] for suffix in deepest.suffixes], np.int64)
        ends, end_of_suffix = np.unique(rows, return_inverse=True)
        self._ends: list[int] = ends.tolist()
        self._end_of_suffix = torch.from_numpy(end_of_suffix).to(self._model.device)  # [suffixes]
        self._cuts = self._model.llama is not None and not deepest.mean
        # Tokens below every document that go through the model.
        self.question_tokens = len(self._branches.token_ids)

    @torch.inference_mode()
    def read(self, documents: Sequence[Sequence[int]]) -> list[LayerStates]:
        """The states of every read point. A document may be `EmbeddedDocument`."""
        model, prefix, deepest = self._model, self._prefix, self._points[-1].layer
        tree = Tree([*map(len, documents)], self._branches.spans, prefix.tokens if prefix else 0)
        inputs = batch_inputs(model, tree, documents, self._branches.token_ids, prefix)
        answers: Tensor | None = None
        # — what is added to the rows of images after the first layers is for all rows
        if self._cuts and deepest > len(inputs.get("deepstack_visual_embeds", ())):
            [answers] = to_device([tree.rows_at(self._ends)], model.device)
        points = {point.layer: point for point in self._points}
        by_layer: dict[int, LayerStates] = {}

        def on_states(layer: int, states: Tensor) -> None:  # [1, rows, hidden]
            if answers is not None and layer == deepest:
                at_ends = states.view(len(documents), len(self._ends), -1)[:, self._end_of_suffix]
                by_layer[layer] = LayerStates(at_ends.transpose(0, 1), mean=None)
                return
            point, batch = points[layer], PackedStates(tree, states[0])
            at_ends = batch.at_ends([self._end_of[suffix] for suffix in point.suffixes])
            mean = batch.means() if point.mean else None
            by_layer[layer] = LayerStates(at_ends.transpose(0, 1), mean)

        attention = TreeAttention(tree, model.kernel, prefix, answers=answers)
        run_to_layers(model, points, on_states, tree=attention, **inputs)
        return [by_layer[point.layer] for point in self._points]
