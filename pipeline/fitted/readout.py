"""A trained readout's file: its maps, and the card that says what they were fitted for.

Knows the file's form and what a spec must share with the card. Knows nothing of where the file
lies, of how it was fitted or of how hidden states come about. Safetensors only: no code is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from safetensors import SafetensorError

from pipeline.errors import Problem
from pipeline.hashes import sha256_hex
from pipeline.spec.schema import ContextualSpec, JobSpec, TaskSpec

_HEADER_LENGTH_BYTES = 8


class ReadoutError(Exception):
    """What is wrong with a readout's file; whoever read it says where it lies."""


class _Part(BaseModel):
    """A part of a card; what it says besides is for people."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class CardModel(_Part):
    """The model whose states were fitted."""

    weights: dict[str, str]
    dtype: str
    quantize: str = "none"


class CardDocuments(_Part):
    """How much of a document was read."""

    max_tokens: int
    too_long: str


class Card(_Part):
    """What the maps of a file were fitted for."""

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
    layers: dict[str, Any] = {}

    @model_validator(mode="after")
    def _kind_says_what_is_read(self) -> Card:
        asked = self.kind == "question"
        if asked != (self.question is not None) or (asked and self.pooling != "last"):
            raise ValueError("a question is read at its last token, a document needs none")
        return self


@dataclass(frozen=True, slots=True)
class LinearMap:
    """Logits of a state: `weight @ state + bias`."""

    weight: NDArray[np.float32]  # [labels, hidden]
    bias: NDArray[np.float32]  # [labels]


@dataclass(frozen=True, slots=True)
class Readout:
    """A task's fitted maps, one a layer, and their card."""

    card: Card
    maps: Mapping[int, LinearMap]  # by layer

    @property
    def layers(self) -> list[int]:
        return sorted(self.maps)


def parse_readout(data: bytes) -> Readout:
    """The readout in a file's bytes; ReadoutError says what is wrong with them."""
    card = _card(data)
    try:
        tensors = safetensors.numpy.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ReadoutError(f"is no safetensors file: {error}") from error
    maps = {
        int(name.removeprefix("layer").removesuffix(".weight")): _map(tensors, name, card)
        for name in tensors
        if name.startswith("layer") and name.endswith(".weight")
    }
    if card.layer not in maps:
        raise ReadoutError(f"names layer {card.layer} and holds the layers {sorted(maps)}")
    return Readout(card, maps)


def content_id(data: bytes) -> str:
    """What a readout's file is called in a fingerprint: the SHA-256 of its bytes."""
    return sha256_hex(data)


def _card(data: bytes) -> Card:
    length = int.from_bytes(data[:_HEADER_LENGTH_BYTES], "little")
    try:
        header = json.loads(data[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + length])
        written = header["__metadata__"]["card"]
    except (ValueError, KeyError, TypeError) as error:
        raise ReadoutError("is no safetensors file with a readout's card") from error
    try:
        return Card.model_validate_json(written)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ReadoutError(f"has a card that is none: {place}: {first['msg']}") from error


def _map(tensors: Mapping[str, NDArray[Any]], name: str, card: Card) -> LinearMap:
    weight = tensors[name]
    bias = tensors.get(name.replace(".weight", ".bias"))
    labels = len(card.labels)
    if bias is None or weight.ndim != 2 or len(weight) != labels or bias.shape != (labels,):
        raise ReadoutError(f"{name} and its bias do not map to the {labels} labels of the card")
    if weight.dtype != np.float32 or bias.dtype != np.float32:
        raise ReadoutError(f"{name} and its bias must be float32, not {weight.dtype}, {bias.dtype}")
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ReadoutError(f"{name} or its bias holds what is no number")
    return LinearMap(weight, bias)


def differences(
    spec: JobSpec, task: TaskSpec, place: str, card: Card, *, weights: Mapping[str, str], dtype: str
) -> Iterator[Problem]:
    """What a task asks for otherwise than its readout was fitted for; `place` is the task's."""
    model, rules = spec.model, spec.documents
    asked: dict[str, tuple[object, object]] = {
        "labels": (list(task.labels), list(card.labels)),
        "question": (task.question, card.question),
        "the model's files": (dict(weights), card.model.weights),
        "model.dtype": (dtype, card.model.dtype),
        "model.quantize": (model.quantize, card.model.quantize),
        "documents.max_tokens": (rules.max_tokens, card.documents.max_tokens),
        "documents.too_long": (rules.too_long, card.documents.too_long),
    }
    prompt = spec.prompt.model_dump(mode="json")
    for key in sorted({*prompt, *card.prompt}):
        asked[f"prompt.{key}"] = (prompt.get(key), card.prompt.get(key))
    for what, (wanted, fitted) in asked.items():
        if wanted != fitted:
            shown = _files_that_differ(wanted, fitted) if isinstance(wanted, dict) else repr(fitted)
            fix = (
                f"task {task.name!r}: the readout {task.readout} was fitted with another {what}: "
                f"{shown}; fit it again, or change the spec back"
            )
            yield Problem(f"{place}.readout", fix, None if isinstance(wanted, dict) else wanted)


def unmeasurable(task: TaskSpec, place: str, card: Card) -> Iterator[Problem]:
    """A calibration by documents without content, of which such a readout reads nothing."""
    if isinstance(task.calibration, ContextualSpec) and card.pooling == "mean":
        fix = (
            f"the readout {task.readout} takes the mean over a document's own tokens, of which an "
            f"empty one has none; calibrate by a file of `assay calibrate`"
        )
        yield Problem(f"{place}.calibration", fix, task.calibration.method)


def _files_that_differ(wanted: Mapping[str, str], fitted: object) -> str:
    other = fitted if isinstance(fitted, dict) else {}
    return ", ".join(n for n in sorted({*wanted, *other}) if wanted.get(n) != other.get(n))


def pointless_layers(spec: JobSpec, readouts: Mapping[str, Readout]) -> Iterator[Problem]:
    """Layers at which no document can leave early: all tasks have been read by then."""
    deepest = max((readout.card.layer for readout in readouts.values()), default=0)
    layers = spec.exit.layers if spec.exit else ()
    if readouts and layers and layers[-1] >= deepest:
        fix = f"the readouts are read at layer {deepest} at the latest; name layers before that"
        yield Problem("exit.layers", fix, list(layers))


def missing_layers(spec: JobSpec, task: TaskSpec, readout: Readout) -> Iterator[Problem]:
    """Layers at which `exit` reads a task whose readout holds none."""
    if spec.exit is None:
        return
    wanted = spec.exit.layers if spec.exit.layer is None else (spec.exit.layer,)
    if missing := sorted(set(wanted) - set(readout.maps)):
        fix = (
            f"the readout {task.readout} of task {task.name!r} holds the layers "
            f"{readout.layers}, not {missing}; choose among them, or fit these too"
        )
        yield Problem("exit", fix, list(wanted))
