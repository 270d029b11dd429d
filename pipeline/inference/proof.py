"""Proofs on short prompts that a model gives the same answers under the tree as alone.

Entry points: `tree_error`, and `prove_layers` for states between its layers.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
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
from pipeline.inference.schedules.forward import LayerStates, ReadPoint, Suffix, run_to_layers

# Relative errors of rounding where nothing else is known; a wrong mask makes an error near 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
# In half precision the tree differs from transformers by .8 to 1.6 times as much as two of its own
# implementations differ (tiny models of 15 families).
_TIMES_OWN = 3
_PROVED_WINDOW = 24
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
def _short_windows(model: LoadedModel) -> Iterator[None]:
    """In this block no window is longer than the prompts of a proof, so that each is proved."""
    owners: list[Any] = [model.network.config.get_text_config(), *model.network.modules()]
    windows = [(owner, getattr(owner, "sliding_window", None)) for owner in owners]
    long = [(owner, window) for owner, window in windows if (window or 0) > _PROVED_WINDOW]
    try:
        for owner, _ in long:
            owner.sliding_window = _PROVED_WINDOW
        yield
    finally:
        for owner, window in long:
            owner.sliding_window = window


@torch.inference_mode()
def tree_error(model: LoadedModel) -> float:
    """The relative error of questions' states and logits against independent prompts.

    The document is longer than the windows, which are shortened for it. One question has one
    token, where a recurrent state that was lost shows most. A longer document is read by the first
    layers, with windows as they are and shortened. A model that sees images reads two of
    different sizes in one batch, too. Relative: the norm of the difference over the norm of the
    states, or of the logits, whichever is larger.
    """
    ids = _proof_ids(model, 36 + _PROVED_WINDOW * bool(model.windows - {None}))
    prefix, text = ids[:5], ids[12:]
    questions = (tuple(ids[5:8]), tuple(ids[8:11]), tuple(ids[11:12]))
    batches: list[list[Sequence[int]]] = [[text]]
    if model.images is not None:
        batches.append([_image_document(model.images, size, text[:7]) for size in _IMAGE_SIZES])
    errors = []
    with _short_windows(model):
        errors += [_questions_error(model, prefix, batch, questions) for batch in batches]
        if model.schedule == "fused":
            errors.append(_long_error(model))
    if model.schedule == "fused" and model.windows != {None}:
        errors.append(_long_error(model))
    return _largest(errors)


def _long_error(model: LoadedModel) -> float:
    """The relative error of the states of a question below a document of several blocks of keys."""
    below = 3
    tokens = min(_LONG_TOKENS + _LONG_TOKENS // 2, model.context_tokens - below)
    prefix, ids = tokens // 3, _proof_ids(model, tokens + below)
    layer = min(_LONG_LAYERS, model.layers)
    document, question = ids[prefix:-below], tuple(ids[-below:])
    [read] = _read(model, ids[:prefix], document, [ReadPoint(layer, (question,), mean=True)])
    states: list[Tensor] = []
    with plain_attention(model.network, "eager"):
        run_to_layers(
            replace(model, llama=None),
            [layer],
            lambda _, of_layer: states.append(of_layer[0]),
            input_ids=torch.tensor([ids], device=model.device),
            use_cache=False,
        )
    return _states_error(read, states[0], slice(prefix, -below))


def _questions_error(
    model: LoadedModel,
    prefix: Sequence[int],
    documents: Sequence[Sequence[int]],
    questions: tuple[Suffix, ...],
) -> float:
    reader = read_prefix(model, prefix).reader([ReadPoint(model.layers, questions)])
    [read] = reader.read(model.with_images(documents))
    states, expected, logits = read.at_suffixes.flatten(0, 1), [], []
    with plain_attention(model.network, "eager"):
        for prompt in (
            PromptAlone(prefix, d, question) for question in questions for d in documents
        ):
            expected.append(forward_alone(model, prompt).last_hidden_state[0, -1])
            output = model.network(**prompt.inputs(model), use_cache=False, logits_to_keep=1)
            logits.append(output.logits[0, -1])
    of_states = _relative_error(states, torch.stack(expected))
    return _largest([of_states, _relative_error(model.unembed(states), torch.stack(logits))])


def _image_document(
    images: ImageReader, size: tuple[int, int], text: Sequence[int]
) -> ImageDocument:
    """A picture of random pixels, and a text after it."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    image = sink.getvalue()
    return ImageDocument((*images.token_ids(image), *text), image)


def _read(
    model: LoadedModel, prefix: Sequence[int], document: Sequence[int], points: list[ReadPoint]
) -> list[LayerStates]:
    """The states of one document at each of these points."""
    return read_prefix(model, prefix).reader(points).read([document])


def _proof_ids(model: LoadedModel, tokens: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    vocabulary = model.network.config.get_text_config().vocab_size
    return [(7_919 * i + 13) % vocabulary for i in range(tokens)]


def _relative_error(actual: Tensor, expected: Tensor) -> float:  # both [rows, dim]
    """Over all rows together: half precision sends a token to another expert now and then."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def _largest(errors: Sequence[float]) -> float:
    """The largest error; NaN if one is, which `max` may pass over."""
    return float(np.max(errors))


def prove_layers(model: LoadedModel, layers: Collection[int]) -> None:
    """ModelError unless a short forward gives the states that transformers has after these layers.

    Layers of some families read more than the layer before.
    """
    depths = sorted(set(layers))
    # — rounding of what is kept is no difference between the layers
    error = _depth_error(replace(model, kv="none"), depths)
    if not error <= tolerance(model):
        raise ModelError(
            f"model family {model.network.config.model_type!r} has other states between its layers "
            f"than transformers computes: they differ by {error:.1g} of their norm after the "
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
        hidden_states = states_alone(model, PromptAlone(prefix, document, below))
    own = slice(len(prefix), len(prefix) + len(document))
    errors = []
    for layer, read, as_deepest in zip(layers, by_layer, deepest, strict=True):
        for at_ends in (read, replace(as_deepest, mean=read.mean)):
            errors.append(_states_error(at_ends, hidden_states[layer], own))
    return _largest(errors)


def _states_error(read: LayerStates, alone: Tensor, own: slice) -> float:  # alone [tokens, hidden]
    """The relative error at the only suffix's end, and of the mean of the document's own tokens."""
    assert read.mean is not None, "no mean is read"
    expected = torch.stack([alone[-1].float(), alone[own].float().mean(dim=0)])
    return _relative_error(torch.stack([read.at_suffixes[0, 0].float(), read.mean[0]]), expected)
