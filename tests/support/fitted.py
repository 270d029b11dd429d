"""Files as `assay fit` writes them: maps of chance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from pipeline.fitted.readout import Card, CardDocuments, CardModel
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec


def bare_card(labels: int, *, pooling: Literal["last", "mean"], layer: int) -> Card:
    """A document readout's card, for maps that no spec names: labels l0, l1 and so on."""
    return Card(
        format=1,
        task="t",
        labels=tuple(f"l{i}" for i in range(labels)),
        kind="document",
        question=None,
        pooling=pooling,
        layer=layer,
        model=CardModel(weights={}, dtype="float32"),
        prompt={},
        documents=CardDocuments(max_tokens=1, too_long="head"),
    )


def card_of(
    spec: JobSpec, task: TaskSpec, *, weights: dict[str, str], dtype: str, **changes: Any
) -> dict[str, Any]:
    """The card of a readout that was fitted for the task as the spec has it."""
    documents = spec.documents.model_dump(mode="json", include={"max_tokens", "too_long"})
    return {
        "format": 1,
        "task": task.name,
        "labels": list(task.labels),
        "kind": "document" if task.question is None else "question",
        "question": task.question,
        "pooling": "last",
        "layer": 2,
        "layers": {},
        "rows": 10,
        "folds": 5,
        "scores": {},
        "model": {"weights": weights, "dtype": dtype},
        "prompt": spec.prompt.model_dump(mode="json"),
        "documents": documents,
        "created_at": "2026-11-21T00:00:00+00:00",
        "versions": {},
        **changes,
    }


def write_readout(
    path: Path, card: dict[str, Any], *, hidden: int, layers: Sequence[int], seed: int = 0
) -> Path:
    """A file of random maps that are far from uniform at every layer."""
    source = np.random.default_rng([seed, *layers])
    labels = len(card["labels"])
    tensors = {}
    for layer in layers:
        weight = source.normal(size=(labels, hidden)) / np.sqrt(hidden)
        tensors[f"layer{layer}.weight"] = weight.astype(np.float32)
        tensors[f"layer{layer}.bias"] = source.normal(size=labels).astype(np.float32)
    data = safetensors.numpy.save(tensors, metadata={"card": json.dumps(card)})
    path.write_bytes(data)
    return path
