"""What a model's vision tower makes of an image: rows of the decoder's input.

Entry points: `read_images`, `EmbeddedDocument`, and `whole_prompt`, the inputs of a prompt that is
read without the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from pipeline.errors import ModelError
from pipeline.inference.images import IMAGES_AT_ONCE


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
        return len(self) if self.positions is None else int(self.positions.max()) + 1

    def __getitem__(self, index: Any) -> Any:
        return self.token_ids[index]


class _ReachedDecoderError(Exception):
    """Leaves a forward of the whole model where its decoder would begin."""


Image = tuple[Mapping[str, Tensor], Sequence[int]]  # its inputs, and the text that follows it


def read_images(
    network: PreTrainedModel, decoder: nn.Module, images: Sequence[Image]
) -> list[EmbeddedDocument]:
    """The rows of documents: those of an image, then those of its text.

    The whole model runs up to its decoder, so that the rows are those of transformers, whatever
    the family does there. Images whose inputs have the same shapes are read together.

    Args:
        network: The whole model.
        decoder: Its decoder.
        images: With each, its `input_ids` [1, tokens] and pixels, as `ImageReader.inputs` has them.

    Raises:
        ModelError: The model gives its decoder something that is not supported.
    """
    by_shape: dict[tuple[object, ...], list[int]] = {}
    for number, (inputs, _text) in enumerate(images):
        shapes = tuple((name, value.shape) for name, value in sorted(inputs.items()))
        by_shape.setdefault(shapes, []).append(number)
    read: dict[int, EmbeddedDocument] = {}
    for of_shape in by_shape.values():
        for start in range(0, len(of_shape), IMAGES_AT_ONCE):
            numbers = of_shape[start : start + IMAGES_AT_ONCE]
            documents = _read_together(network, decoder, [images[number] for number in numbers])
            read.update(zip(numbers, documents, strict=True))
    return [read[number] for number in range(len(images))]


@torch.inference_mode()
def _read_together(
    network: PreTrainedModel, decoder: nn.Module, images: Sequence[Image]
) -> list[EmbeddedDocument]:
    """Rows of images of one shape. Shorter texts are filled up on the right, then cut."""
    texts = [text for _inputs, text in images]
    together = {
        name: torch.cat([inputs[name] for inputs, _text in images]) for name in images[0][0]
    }
    # — with a token of a text, which is never that of an image
    filling = next((text[0] for text in texts if text), 0)
    filled = pad_sequence(
        [torch.tensor(text).long() for text in texts], batch_first=True, padding_value=filling
    )
    prompt = whole_prompt(network, together, before=(), after=filled.tolist())
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
    ids: list[list[int]] = prompt["input_ids"].tolist()
    positions: Tensor | None = taken.get("position_ids")  # [axes, images, tokens]
    mask: Tensor | None = taken.get("visual_pos_masks")  # [images, tokens]
    deep = [states.chunk(len(images)) for states in taken.get("deepstack_visual_embeds") or ()]
    documents = []
    for number, text in enumerate(texts):
        rows = slice(len(ids[number]) - filled.shape[1] + len(text))
        is_image = np.zeros(rows.stop, np.bool_)
        documents.append(
            EmbeddedDocument(
                token_ids=tuple(ids[number][rows]),
                embeddings=taken["inputs_embeds"][number, rows],
                positions=None
                if positions is None
                else positions[:, number, rows].numpy(force=True),
                is_image=is_image if mask is None else mask[number, rows].numpy(force=True),
                deep=tuple(of_layer[number] for of_layer in deep),
            )
        )
    return documents


def whole_prompt(
    network: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    *,
    before: Sequence[int],
    after: Sequence[Sequence[int]],
) -> dict[str, Tensor]:
    """The inputs of the whole model for images between token ids, as many after each of them."""
    sides: tuple[Sequence[Sequence[int]], ...] = ([before] * len(after), after)
    around = {"input_ids": sides}
    if "mm_token_type_ids" in inputs:  # 0 of text, 1 of an image
        around["mm_token_type_ids"] = tuple([[0] * len(ids) for ids in side] for side in sides)
    prompt = {name: value.to(network.device) for name, value in inputs.items()}
    for name, ids in around.items():
        middle = prompt[name]
        left, right = (torch.tensor(side, device=middle.device).long() for side in ids)
        prompt[name] = torch.cat([left, middle, right], dim=1)
    prompt.pop("attention_mask", None)  # of ones
    return {
        name: value.to(network.dtype) if value.is_floating_point() else value
        for name, value in prompt.items()
    }
