"""The file of a trained readout as `assay fit` writes it: a card, and a linear map a layer.

    layer<N>.weight   float32 [labels, hidden]   logits = weight @ state + bias
    layer<N>.bias     float32 [labels]
    metadata: card    JSON: what it was fitted for, to what, and what it is worth

Knows the file's form. Knows nothing of where it goes or how maps came about. Safetensors only:
reading it runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import safetensors.numpy

from pipeline.evaluation.linear import Linear
from pipeline.evaluation.scores import Scores

if TYPE_CHECKING:
    from pipeline.runtime.job import Job
    from pipeline.verbs.fit import TaskFit

Kind = Literal["document", "question"]

FORMAT = 1


def card(
    job: Job,
    fitted: TaskFit,
    *,
    question: str | None,
    folds: int,
    created_at: str,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """What the maps may be used for, and what was measured on rows that were held out."""
    spec = job.spec
    return {
        "format": FORMAT,
        "task": fitted.task,
        "labels": list(fitted.labels),
        "kind": fitted.kind,
        "question": question,
        "pooling": fitted.pooling,
        "layer": fitted.layer,
        "layers": {
            str(each.layer): {
                **{name: figure.value for name, figure in each.scores.headlines.items()},
                "strength": each.strength,
                "share": each.share,
            }
            for each in fitted.layers
        },
        "rows": fitted.rows,
        "folds": folds,
        "balanced": fitted.balanced,
        "scores": figures(fitted.scores),
        "model": {
            "weights": dict(job.files.hashes),
            "dtype": job.placement.dtype,
            "quantize": spec.model.quantize,
        },
        "prompt": spec.prompt.model_dump(mode="json"),
        "documents": spec.documents.model_dump(mode="json", include={"max_tokens", "too_long"}),
        "created_at": created_at,
        "versions": dict(versions),
    }


def figures(scores: Scores) -> dict[str, dict[str, float | None]]:
    """Every figure with its 95 % interval."""
    return {
        name: {"value": figure.value, "low": figure.low, "high": figure.high}
        for name, figure in scores.headlines.items()
    }


def readout_bytes(card: Mapping[str, Any], maps: Mapping[int, Linear]) -> bytes:
    """The file: the maps by layer, with their card."""
    tensors = {}
    for layer, fitted in maps.items():
        tensors[f"layer{layer}.weight"] = np.ascontiguousarray(fitted.weight, np.float32)
        tensors[f"layer{layer}.bias"] = np.ascontiguousarray(fitted.bias, np.float32)
    data: bytes = safetensors.numpy.save(tensors, metadata={"card": json.dumps(card)})
    return data
