"""Proofs on short prompts that a model gives the same answers under the tree as alone.

Entry points: `tree_error`, and `prove_layers` for states between its layers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.images import ImageDocument, ImageReader
from pipeline.inference.model.alone import PromptAlone, forward_alone, states_alone
from pipeline.inference.model.loaded import LoadedModel, plain_attention
from pipeline.inference.model.rounded_products import RoundedLinear, expert_weights
from pipeline.inference.schedules import read_prefix
from pipeline.inference.schedules.forward import ReadPoint, run_to_layers

# Relative errors of rounding where nothing else is known; a wrong mask makes an error near 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
# In half precision the tree differs from transformers by .8 to 1.6 times as much as two of its own
# implementations differ (tiny models of 15 families).
_TIMES_OWN = 3
# A window that ends in the rows of a short document; and one of a long document that ends in either
# of two blocks of keys before them, where the first key of the later block is just outside.
_PROVED_WINDOW, _LONG_WINDOW = 24, 64 + 22
# Kernels read keys in blocks of 64: a document of three and a few more runs each of their loops. By
# this number, 65 keys of a question are in no whole block, so that one is alone in the last. The
# states are compared after the first layers, among which those of every window are.
_LONG_TOKENS, _LONG_LAYERS = 3 * 64 + 20, 8
_IMAGE_SIZES = ((70, 45), (40, 90))


def tolerance(model: LoadedModel) -> float:
    """The relative error of states that the model's rounding explains.

    In half precision, a multiple of the error between two of transformers' own implementations,
    where the family has two. Not with experts: a last bit that differs may send a token to another
    one. Nor with activations in 8 bits, which are as coarse as bfloat16: it may move a value by a
    whole step.
    """
    network = model.network
    if any(isinstance(module, RoundedLinear) for module in network.modules()):
        return _TOLERANCE[torch.bfloat16]
    largest = _TOLERANCE[network.dtype]
    if network.dtype == torch.float32 or expert_weights(network):
        return largest
    try:
        return min(largest, _TIMES_OWN * _own_error(model))
    except ValueError:  # the family has one implementation
        return largest


@torch.inference_mode()
def _own_error(model: LoadedModel) -> float:
    """The relative error between two implementations of transformers, without the tree."""
    prompt = PromptAlone((), _proof_ids(model, 48), ())
    states = []
    for implementation in ("eager", "sdpa"):
        with plain_attention(model.network, implementation):
            states.append(forward_alone(model, prompt).last_hidden_state[0])
    return _relative_error(*states)


@contextmanager
def _short_windows(model: LoadedModel, longest: int) -> Iterator[None]:
    """In this block no window is longer than this, so that prompts of a proof reach its end."""
    owners: list[Any] = [model.network.config.get_text_config(), *model.network.modules()]
    windows = [(owner, getattr(owner, "sliding_window", None)) for owner in owners]
    long = [(owner, window) for owner, window in windows if (window or 0) > longest]
    try:
        for owner, _ in long:
            owner.sliding_window = longest
        yield
    finally:
        for owner, window in long:
            owner.sliding_window = window


def tree_error(model: LoadedModel) -> float:
    """The relative error of questions' states and logits against independent prompts.

    The document is longer than the windows, which are shortened for it. One question has one token,
    which makes the error of a lost recurrent state largest, and is the first row of a tile. A
    longer document is read by the first layers, with windows as they are and shortened. A model
    that sees images reads two of different sizes in one batch, too. Relative: the norm of the
    difference over the norm of the states, or of the logits, whichever is larger.
    """
    ids = _proof_ids(model, 36 + _PROVED_WINDOW * bool(model.windows - {None}))
    prefix, text = ids[:5], ids[12:]
    lowest, *others = sorted(ids[5:12])  # — branches are in the order of their tokens
    last = ReadPoint(model.layers, (tuple(others[:3]), tuple(others[3:]), (lowest,)))
    errors = [_head_error(model, ids)]
    with _short_windows(model, _PROVED_WINDOW):
        errors.append(_states_error(model, prefix, [text], [[last]]))
        if (images := model.images) is not None:
            shown = [_image_document(images, size, text[:7]) for size in _IMAGE_SIZES]
            errors.append(_states_error(model, prefix, shown, [[last]]))
    if model.schedule == "fused":
        errors.append(_long_error(model))
        if model.windows != {None}:
            with _short_windows(model, _LONG_WINDOW):
                errors.append(_long_error(model))
    return float(np.max(errors))  # NaN if one is, which `max` may pass over


@torch.inference_mode()
def _head_error(model: LoadedModel, ids: Sequence[int]) -> float:
    """The relative error of the logits of the family's own states."""
    with plain_attention(model.network, "eager"):
        states = forward_alone(model, PromptAlone((), ids, ())).last_hidden_state[0]
        inputs = torch.tensor([ids], device=model.device)
        logits = model.network(input_ids=inputs, use_cache=False).logits[0]
    return _relative_error(model.unembed(states), logits)


def _long_error(model: LoadedModel) -> float:
    """The relative error of the states of a question below a document of several blocks of keys."""
    below = 3
    tokens = min(_LONG_TOKENS + _LONG_TOKENS // 2, model.context_tokens - below)
    ids = _proof_ids(model, tokens + below)
    prefix, document, question = ids[: tokens // 3], ids[tokens // 3 : -below], tuple(ids[-below:])
    point = ReadPoint(min(_LONG_LAYERS, model.layers), (question,), mean=True)
    return _states_error(model, prefix, [document], [[point]], _first_states)


def _first_states(model: LoadedModel, prompt: PromptAlone) -> list[Tensor]:  # [tokens, hidden]
    """As `states_alone`; deeper layers than those of a long document are not computed."""
    layers, states = range(min(_LONG_LAYERS, model.layers) + 1), list[Tensor]()
    by_family, inputs = replace(model, llama=None), prompt.inputs(model)
    run_to_layers(by_family, layers, lambda _, s: states.append(s[0]), use_cache=False, **inputs)
    return states


def _image_document(
    images: ImageReader, size: tuple[int, int], text: Sequence[int]
) -> ImageDocument:
    """A picture of random pixels, and a text after it."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    image = sink.getvalue()
    return ImageDocument((*images.token_ids(image), *text), image)


def _proof_ids(model: LoadedModel, tokens: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    vocabulary = model.network.config.get_text_config().vocab_size
    return [(7_919 * i + 13) % vocabulary for i in range(tokens)]


def _relative_error(actual: Tensor, expected: Tensor) -> float:  # both [rows, dim]
    """Over all rows together: half precision sends a token to another expert now and then."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def prove_layers(model: LoadedModel, layers: Collection[int]) -> None:
    """ModelError unless a short forward gives the states that transformers has after these layers.

    Layers of some families read more than the layer before.
    """
    depths, ids = sorted(set(layers)), _proof_ids(model, 24)
    below = (tuple(ids[3:6]),)
    # — where no mean is read, the deepest layer may be run at the suffix's last token alone
    readings = [[ReadPoint(n, below, mean=True) for n in depths]]
    readings += [[ReadPoint(n, below)] for n in depths]
    # — rounding of what is kept, or in the attention beside 8-bit layers, is no difference between
    # the layers, and grows from one to the next
    exact = getattr(model.kernel, "func", model.kernel)
    error = _states_error(replace(model, kv="none", kernel=exact), ids[:3], [ids[6:]], readings)
    if not error <= tolerance(model):
        raise ModelError(
            f"model family {model.network.config.model_type!r} has other states between its layers "
            f"than transformers computes: they differ by {error:.1g} of their norm after the "
            f"layers {depths}; use readouts of its last layer"
        )


@torch.inference_mode()
def _states_error(
    model: LoadedModel,
    prefix: Sequence[int],
    documents: Sequence[Sequence[int]],
    readings: Sequence[Sequence[ReadPoint]],  # of the same suffixes
    by_layer_alone: Callable[[LoadedModel, PromptAlone], list[Tensor]] = states_alone,
) -> float:
    """The relative error of all states of a read point together, where it is largest."""
    suffixes, errors = readings[0][0].suffixes, list[float]()
    with plain_attention(model.network, "eager"):
        prompts = [PromptAlone(prefix, d, suffix) for suffix in suffixes for d in documents]
        alone = [by_layer_alone(model, prompt) for prompt in prompts]
    rows = model.with_images(documents)
    for points in readings:
        reader = read_prefix(model, prefix).reader(points)
        for point, read in zip(points, reader.read(rows), strict=True):
            number = -1 if point.layer == model.layers else point.layer
            of_layer = [states[number].float() for states in alone]
            actual, expected = [*read.at_suffixes.flatten(0, 1).float()], [s[-1] for s in of_layer]
            if read.mean is not None:
                own = slice(len(prefix), -len(suffixes[0]))
                actual += read.mean
                expected += [states[own].mean(dim=0) for states in of_layer[: len(documents)]]
            errors.append(_relative_error(torch.stack(actual), torch.stack(expected)))
    return float(np.max(errors))
