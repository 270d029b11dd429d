"""Proofs on short prompts that a model gives the same answers under the tree as alone.

Entry points: `tree_error` and `image_error`, and `proved_at` for states between its layers.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import ModelError
from pipeline.inference.images import ImageDocument
from pipeline.inference.model.int8_products import Int8Linear
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.inference.model.vision import whole_prompt
from pipeline.inference.schedules import read_prefix
from pipeline.inference.schedules.forward import LayerStates, ReadPoint

# Relative errors of rounding; a wrong mask makes an error near 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
_LONGEST_PROVED_WINDOW = 1_024


def tolerance(network: PreTrainedModel) -> float:
    """The relative error of states that the network's rounding explains.

    Activations in 8 bits are rounded as coarsely as bfloat16, which has 8 significant bits: a last
    bit that differs may move a value by a whole step.
    """
    is_rounded = any(isinstance(module, Int8Linear) for module in network.modules())
    return TOLERANCE[torch.bfloat16 if is_rounded else network.dtype]


@torch.inference_mode()
def tree_error(model: LoadedModel) -> float:
    """The relative error of questions' states and logits against independent prompts.

    The document is longer than the model's short windows. One question has one token, where a
    recurrent state that was lost shows most. Relative: the norm of the difference over the norm of
    the states, or of the logits, whichever is larger.
    """
    short = [window for window in model.windows if window and window <= _LONGEST_PROVED_WINDOW]
    token_ids = _proof_ids(model, 36 + max(short, default=0))
    prefix, document = token_ids[:5], token_ids[12:]
    questions = (token_ids[5:8], token_ids[8:11], token_ids[11:12])
    [read] = _read(model, prefix, document, [ReadPoint(model.layers, tuple(map(tuple, questions)))])
    states, expected, logits = read.at_suffixes[:, 0], [], []
    with plain_attention(model.network, "eager"):
        for question in questions:
            ids = torch.tensor([[*prefix, *document, *question]], device=model.device)
            expected.append(model.decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -1])
            output = model.network(input_ids=ids, use_cache=False, logits_to_keep=1)
            logits.append(output.logits[0, -1])
    of_states = _relative_error(states, torch.stack(expected))
    return max(of_states, _relative_error(model.unembed(states), torch.stack(logits)))


@torch.inference_mode()
def image_error(model: LoadedModel) -> float:
    """The relative error of questions below an image and text against independent prompts.

    Both are relative to the norm of the logits. Two images of different sizes are in one batch.
    """
    assert model.images is not None, model.network.config.model_type
    token_ids = _proof_ids(model, 17)
    prefix, text = token_ids[:5], token_ids[5:12]
    questions = (tuple(token_ids[12:15]), tuple(token_ids[15:17]))
    documents = []
    for size in ((70, 45), (40, 90)):
        pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
        sink = io.BytesIO()
        Image.fromarray(pixels).save(sink, "PNG")
        image = sink.getvalue()
        documents.append(ImageDocument((*model.images.token_ids(image), *text), image))
    reader = read_prefix(model, prefix).reader([ReadPoint(model.layers, questions)])
    [read] = reader.read(model.with_images(documents))
    expected = []
    with plain_attention(model.network, "eager"):
        for question in questions:
            for document in documents:
                prompt = whole_prompt(
                    model.network,
                    model.images.inputs(document.image),
                    before=prefix,
                    after=(*text, *question),
                )
                output = model.network(**prompt, use_cache=False, logits_to_keep=1)
                expected.append(output.logits[0, -1])
    states = read.at_suffixes.flatten(0, 1)
    return _relative_error(model.unembed(states), torch.stack(expected))


def _read(
    model: LoadedModel, prefix: Sequence[int], document: Sequence[int], points: list[ReadPoint]
) -> list[LayerStates]:
    """The states of one document at each of these points."""
    schedule = read_prefix(model, prefix, layers=points[-1].layer)
    return schedule.reader(points).read([document])


def _proof_ids(model: LoadedModel, tokens: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    vocabulary = model.network.config.get_text_config().vocab_size
    return [(7_919 * i + 13) % vocabulary for i in range(tokens)]


def _relative_error(actual: Tensor, expected: Tensor) -> float:  # both [rows, dim]
    """Over all rows together: half precision sends a token to another expert now and then."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def proved_at(model: LoadedModel, layers: Collection[int]) -> LoadedModel:
    """The model after a short forward has proved its states at the layers, whole if necessary.

    ModelError where neither gives them: layers of some families read more than the layer before.
    """
    depths = sorted(set(layers))
    variants = [model, replace(model, cuts_last_layer=False)]
    errors = []
    for variant in variants:
        # — rounding of what is kept is no difference between the layers
        errors.append(_depth_error(replace(variant, kv="none"), depths))
        if errors[-1] <= tolerance(model.network):
            return variant
    raise ModelError(
        f"model family {model.network.config.model_type!r} has other states between its layers "
        f"than transformers computes: they differ by {min(errors):.1g} of their norm after the "
        f"layers {depths}; use readouts of its last layer"
    )


@torch.inference_mode()
def _depth_error(model: LoadedModel, layers: Sequence[int]) -> float:
    """The relative error of the states at the layer where it is largest."""
    ids = _proof_ids(model, 24)
    prefix, below, document = ids[:3], tuple(ids[3:6]), ids[6:]
    points = [ReadPoint(layer, (below,), mean=True) for layer in layers]
    by_layer = _read(model, prefix, document, points)
    # — where no mean is read, the deepest layer may be run at the suffix's last token alone
    deepest = [_read(model, prefix, document, [ReadPoint(n, (below,))])[0] for n in layers]
    with plain_attention(model.network, "eager"):
        output = model.decoder(
            input_ids=torch.tensor([[*prefix, *document, *below]], device=model.device),
            use_cache=False,
            output_hidden_states=True,
        )
    own = slice(len(prefix), len(prefix) + len(document))
    errors = []
    for layer, read, as_deepest in zip(layers, by_layer, deepest, strict=True):
        states = output.hidden_states[layer][0].float()
        alone = torch.stack([states[-1], states[-1], states[own].mean(dim=0)])
        assert read.mean is not None, layer
        at_end = (each.at_suffixes[0, 0].float() for each in (read, as_deepest))
        together = torch.stack([*at_end, read.mean[0]])
        errors.append(_relative_error(together, alone))
    return max(errors)
