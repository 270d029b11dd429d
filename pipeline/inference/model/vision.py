"""What a model's vision tower makes of an image: rows of the decoder's input.

Entry points: `read_images`, `EmbeddedDocument`, and `whole_prompt`, the inputs of a prompt that is
read without the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.errors import ModelError
from pipeline.inference.images import IMAGES_AT_ONCE


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Rows of the decoder's input that an image takes, with the tokens that mark its edges.

    Positions count from the one that a text would continue at.
    """

    embeddings: Tensor  # [rows, hidden]
    positions: NDArray[np.int64] | None  # [axes, rows]; None: those of text
    # Rows of the image itself get more of the tower's states after each of the first layers
    # (DeepStack, Meng et al., 2024).
    is_image: NDArray[np.bool_]  # [rows]
    deep: tuple[Tensor, ...] = ()  # by layer: [image rows, hidden]

    @property
    def offset(self) -> int:
        """The next position minus the number of rows: an image has fewer positions than rows."""
        rows = len(self.embeddings)
        return 0 if self.positions is None else int(self.positions.max()) + 1 - rows


class EmbeddedDocument(tuple[int, ...]):
    """The token ids of a document, the first of which are of an image that has been read."""

    rows: ImageRows

    def __new__(cls, token_ids: Iterable[int], rows: ImageRows) -> EmbeddedDocument:
        document = super().__new__(cls, token_ids)
        document.rows = rows
        return document


class _ReachedDecoderError(Exception):
    """Leaves a forward of the whole model where its decoder would begin."""


def read_images(
    network: PreTrainedModel, decoder: nn.Module, images: Sequence[Mapping[str, Tensor]]
) -> list[ImageRows]:
    """The rows of each image.

    The whole model runs up to its decoder, so that the rows are those of transformers, whatever
    the family does there. Images whose inputs have the same shapes are read together.

    Args:
        network: The whole model.
        decoder: Its decoder.
        images: Of each, its `input_ids` [1, tokens] and pixels, as `ImageReader.inputs` has them.

    Raises:
        ModelError: The model gives its decoder something that is not supported.
    """
    by_shape: dict[tuple[object, ...], list[int]] = {}
    for number, inputs in enumerate(images):
        shapes = tuple((name, value.shape) for name, value in sorted(inputs.items()))
        by_shape.setdefault(shapes, []).append(number)
    read: dict[int, ImageRows] = {}
    for of_shape in by_shape.values():
        for start in range(0, len(of_shape), IMAGES_AT_ONCE):
            numbers = of_shape[start : start + IMAGES_AT_ONCE]
            rows = _read_together(network, decoder, [images[number] for number in numbers])
            read.update(zip(numbers, rows, strict=True))
    return [read[number] for number in range(len(images))]


@torch.inference_mode()
def _read_together(
    network: PreTrainedModel, decoder: nn.Module, images: Sequence[Mapping[str, Tensor]]
) -> list[ImageRows]:
    """The rows of images of one shape."""
    together = {name: torch.cat([inputs[name] for inputs in images]) for name in images[0]}
    taken: dict[str, Any] = {}

    def take(_decoder: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        taken.update(kwargs)
        raise _ReachedDecoderError

    handle = decoder.register_forward_pre_hook(take, with_kwargs=True)
    try:
        network.base_model(**whole_prompt(network, together), use_cache=False)
    except _ReachedDecoderError:
        pass
    finally:
        handle.remove()
    embeddings: Tensor | None = taken.get("inputs_embeds")  # [images, rows, hidden]
    if embeddings is None:
        raise ModelError(f"{type(network).__name__} has no decoder that reads images as its input")
    positions: Tensor | None = taken.get("position_ids")  # [axes, images, rows]
    mask: Tensor | None = taken.get("visual_pos_masks")  # [images, rows]
    if mask is None:
        mask = torch.zeros(embeddings.shape[:2], dtype=torch.bool)
    deep = [states.chunk(len(images)) for states in taken.get("deepstack_visual_embeds") or ()]
    return [
        ImageRows(
            embeddings=embeddings[number],
            positions=None if positions is None else positions[:, number].numpy(force=True),
            is_image=mask[number].numpy(force=True),
            deep=tuple(of_layer[number] for of_layer in deep),
        )
        for number in range(len(images))
    ]


def whole_prompt(
    network: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    *,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
) -> dict[str, Tensor]:
    """The inputs of the whole model for images, each between the same token ids."""
    prompt = {name: value.to(network.device) for name, value in inputs.items()}
    sides = {"input_ids": (before, after)}
    if "mm_token_type_ids" in inputs:  # 0 of text, 1 of an image
        sides["mm_token_type_ids"] = ([0] * len(before), [0] * len(after))
    for name, around in sides.items():
        left, right = (prompt[name].new_tensor(ids).expand(len(prompt[name]), -1) for ids in around)
        prompt[name] = torch.cat([left, prompt[name], right], dim=1)
    prompt.pop("attention_mask", None)  # of ones
    return {
        name: value.to(network.dtype) if value.is_floating_point() else value
        for name, value in prompt.items()
    }
