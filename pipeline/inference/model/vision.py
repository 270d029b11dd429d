"""What a model's vision tower makes of an image: rows of the decoder's input.

Entry points: `read_image`, `EmbeddedDocument`, and `whole_prompt`, the inputs of a prompt that is
read without the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.errors import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedDocument(Sequence[int]):
    """Consecutive rows of the decoder's input, some of which are of an image.

    Positions count from the one that a text would continue at.
    """

    token_ids: tuple[int, ...]
    embeddings: Tensor  # [tokens, hidden]
    positions: NDArray[np.int64] | None  # [axes, tokens]; None: those of text
    # Rows of an image get more of the tower's states after each of the first layers (DeepStack,
    # Meng et al., 2024).
    is_image: NDArray[np.bool_]  # [tokens]
    deep: tuple[Tensor, ...] = ()  # by layer: [image rows, hidden]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """The position after these rows: an image has fewer positions than rows."""
        return len(self) if self.positions is None else max(0, int(self.positions.max()) + 1)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> EmbeddedDocument: ...
    def __getitem__(self, index: int | slice) -> int | EmbeddedDocument:
        """A token id, or some of the rows."""
        if isinstance(index, int):
            return self.token_ids[index]
        start, stop, step = index.indices(len(self))
        assert step == 1 and start < stop, index
        positions = self.positions
        if positions is not None:
            before = int(positions[:, :start].max(initial=-1)) + 1
            positions = positions[:, start:stop] - before
        deep = slice(*(int(self.is_image[:end].sum()) for end in (start, stop)))
        return EmbeddedDocument(
            self.token_ids[start:stop],
            self.embeddings[start:stop],
            positions,
            self.is_image[start:stop],
            tuple(of_layer[deep] for of_layer in self.deep),
        )


class _ReachedDecoderError(Exception):
    """Leaves a forward of the whole model where its decoder would begin."""


@torch.inference_mode()
def read_image(
    network: PreTrainedModel, decoder: nn.Module, inputs: Mapping[str, Tensor], text: Sequence[int]
) -> EmbeddedDocument:
    """The rows of a document: those of its image, then those of its text.

    The whole model runs up to its decoder, so that the rows are those of transformers, whatever
    the family does there.

    Args:
        network: The whole model.
        decoder: Its decoder.
        inputs: The image's `input_ids` [1, tokens] and pixels, as `ImageReader.inputs` has them.
        text: The token ids that follow the image.

    Raises:
        ModelError: The model gives its decoder something that is not supported.
    """
    prompt = whole_prompt(network, inputs, before=(), after=text)
    taken: dict[str, Any] = {}

    def take(_decoder: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        taken.update(kwargs)
        raise _ReachedDecoderError

    handle = decoder.register_forward_pre_hook(take, with_kwargs=True)
    try:
        network.base_model(**prompt, use_cache=False)
    except _ReachedDecoderError:
        pass
    finally:
        handle.remove()
    if taken.get("inputs_embeds") is None:
        raise ModelError(f"{type(network).__name__} has no decoder that reads images as its input")
    [ids] = prompt["input_ids"].tolist()
    positions: Tensor | None = taken.get("position_ids")
    mask: Tensor | None = taken.get("visual_pos_masks")
    return EmbeddedDocument(
        token_ids=tuple(ids),
        embeddings=taken["inputs_embeds"][0],
        positions=None if positions is None else positions[:, 0].numpy(force=True),
        is_image=np.zeros(len(ids), np.bool_) if mask is None else mask[0].numpy(force=True),
        deep=tuple(taken.get("deepstack_visual_embeds") or ()),
    )


def whole_prompt(
    network: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    *,
    before: Sequence[int],
    after: Sequence[int],
) -> dict[str, Tensor]:
    """The inputs of the whole model for an image between token ids."""
    around = {"input_ids": (before, after)}
    if "mm_token_type_ids" in inputs:  # 0 of text, 1 of an image
        around["mm_token_type_ids"] = ([0] * len(before), [0] * len(after))
    prompt = {name: value.to(network.device) for name, value in inputs.items()}
    for name, (left, right) in around.items():
        middle = prompt[name]
        sides = [torch.tensor([side], device=middle.device).long() for side in (left, right)]
        prompt[name] = torch.cat([sides[0], middle, sides[1]], dim=1)
    prompt.pop("attention_mask", None)  # of ones
    return {
        name: value.to(network.dtype) if value.is_floating_point() else value
        for name, value in prompt.items()
    }
