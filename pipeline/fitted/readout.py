"""The file of a trained readout: linear maps and a card with what they were fitted for.

Entry points: `readout_file`, `parse_readout`, and `differences` between a spec and a card. The
format is safetensors, which runs no code when a file is loaded:

    layer<N>.weight   float32 [labels, hidden]   logits = weight @ state + bias
    layer<N>.bias     float32 [labels]
    metadata: card    JSON: what the readout was fitted to, and its scores on held-out rows
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from safetensors import SafetensorError

from pipeline.errors import Problem
from pipeline.hashes import parse_json, validated
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

_HEADER_LENGTH_BYTES = 8
_WEIGHT = re.compile(r"layer([0-9]+)\.weight")  # a file may have other tensors


class ReadoutError(Exception):
    """The file of a readout is invalid. The caller adds the path."""


class _Part(BaseModel):
    """A part of a card. Unknown fields are ignored: they are for people."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class CardModel(_Part):
    """The model whose hidden states were fitted."""

    weights: dict[str, str]
    dtype: str
    int8: bool = False
    fp8: bool = False
    kv: str = "none"


class CardDocuments(_Part):
    """The limits on the length of documents."""

    max_tokens: int
    too_long: str


class Card(_Part):
    """What the maps of a file were fitted for: task, model, prompt and layer."""

    format: Literal[1]
    task: str
    labels: Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
    kind: Literal["document", "question"]
    question: str | None
    pooling: Literal["last", "mean"]
    layer: PositiveInt
    model: CardModel
    prompt: dict[str, Any]
    documents: CardDocuments
    scores: dict[str, Any] = {}  # figures of held-out rows, by metric
    # The content hashes of the texts that it was fitted to; older files do not have them.
    texts: Annotated[tuple[str, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _kind_matches_question(self) -> Card:
        has_question = self.kind == "question"
        if has_question != (self.question is not None):
            raise ValueError("`kind` is `question` exactly if there is a question")
        if has_question and self.pooling != "last":
            raise ValueError("a question is read at its last token: write `pooling: last`")
        return self


@dataclass(frozen=True, slots=True)
class LinearMap:
    """Logits of a hidden state: `weight @ state + bias`."""

    weight: NDArray[np.floating]  # [labels, hidden], float32 in a file
    bias: NDArray[np.floating]  # [labels]

    def logits(
        self,
        states: NDArray[np.floating],  # [rows, hidden]
    ) -> NDArray[np.float64]:  # [rows, labels]
        return np.asarray(states.astype(np.float64) @ self.weight.T + self.bias, np.float64)

    def scaled(self, scale: float, offset: NDArray[np.float64]) -> LinearMap:
        """The map whose logits are `scale * logits + offset`."""
        return LinearMap(scale * self.weight, scale * self.bias + offset)


@dataclass(frozen=True, slots=True)
class Readout:
    """A task's fitted maps, one per layer, and their card."""

    card: Card
    maps: Mapping[int, LinearMap]  # by layer

    @property
    def layers(self) -> list[int]:
        return sorted(self.maps)


def readout_file(maps: Mapping[int, LinearMap], card: Mapping[str, Any]) -> bytes:
    """The bytes of a readout; `maps` is by layer, and `card` has at least the fields of `Card`."""
    tensors = {}
    for layer, fitted in maps.items():
        tensors[f"layer{layer}.weight"] = np.ascontiguousarray(fitted.weight, np.float32)
        tensors[f"layer{layer}.bias"] = np.ascontiguousarray(fitted.bias, np.float32)
    return safetensors.numpy.save(tensors, metadata={"card": json.dumps(card)})


def parse_readout(data: bytes) -> Readout:
    """The readout in the bytes of a file; ReadoutError if they are invalid."""
    card = _card(data)
    try:
        tensors = safetensors.numpy.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ReadoutError(f"is not a safetensors file: {error}") from error
    weights = filter(None, map(_WEIGHT.fullmatch, tensors))
    maps = {int(of_layer[1]): _map(tensors, of_layer[0], card) for of_layer in weights}
    if card.layer not in maps:
        raise ReadoutError(
            f"its card names layer {card.layer}, but it has the layers {sorted(maps)}"
        )
    return Readout(card, maps)


def _card(data: bytes) -> Card:
    length = int.from_bytes(data[:_HEADER_LENGTH_BYTES], "little")
    try:
        header = parse_json(data[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + length])
        card = header["__metadata__"]["card"]
    except (ValueError, KeyError, TypeError) as error:
        raise ReadoutError("is not a safetensors file with the card of a readout") from error
    try:
        return validated(Card, parse_json(card))
    except ValueError as error:
        raise ReadoutError(f"its card is invalid: {error}") from error


def _map(tensors: Mapping[str, NDArray[Any]], name: str, card: Card) -> LinearMap:
    weight = tensors[name]
    bias = tensors.get(name.replace(".weight", ".bias"))
    labels = len(card.labels)
    if bias is None or weight.ndim != 2 or len(weight) != labels or bias.shape != (labels,):
        raise ReadoutError(
            f"{name} and its bias do not have the shapes of the {labels} labels of the card"
        )
    if weight.dtype != np.float32 or bias.dtype != np.float32:
        raise ReadoutError(
            f"{name} and its bias must be float32 (got {weight.dtype}, {bias.dtype})"
        )
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ReadoutError(f"{name} or its bias has values that are not finite")
    return LinearMap(weight, bias)


def differences(
    spec: JobSpec,
    task: TaskSpec,
    place: str,
    readout: Readout,
    *,
    weights: Mapping[str, str],
    dtype: str,
) -> Iterator[Problem]:
    """A problem for each setting of the task that the readout was not fitted with.

    `place` is the task's.
    """
    card, model, rules = readout.card, spec.model, spec.documents
    settings: dict[str, tuple[object, object]] = {
        "labels": (list(task.labels), list(card.labels)),
        "question": (task.question, card.question),
        "version of the model's files": (dict(weights), card.model.weights),
        "model.dtype": (dtype, card.model.dtype),
        "model.dtype: int8": (model.dtype == "int8", card.model.int8),
        "model.dtype: fp8": (model.dtype == "fp8", card.model.fp8),
        "model.kv": (model.kv, card.model.kv),
        "documents.max_tokens": (rules.max_tokens, card.documents.max_tokens),
        "documents.too_long": (rules.too_long, card.documents.too_long),
    }
    prompt = spec.prompt.model_dump(mode="json")
    for key in sorted({*prompt, *card.prompt}):
        settings[f"prompt.{key}"] = (prompt.get(key), card.prompt.get(key))
    for setting, (own, fitted) in settings.items():
        if own != fitted:
            shown = _files_that_differ(own, fitted) if isinstance(own, dict) else repr(fitted)
            fix = (
                f"task {task.name!r}: the readout {task.readout} was fitted with another "
                f"{setting}: {shown}; fit it again, or change the spec"
            )
            yield Problem(f"{place}.readout", fix, None if isinstance(own, dict) else own)


def _files_that_differ(own: Mapping[str, str], fitted: object) -> str:
    other = fitted if isinstance(fitted, dict) else {}
    return ", ".join(n for n in sorted({*own, *other}) if own.get(n) != other.get(n))
