"""The fingerprint of a task: the hash of everything that can change its answers.

Entry point: `fingerprints`. Adding a task to a spec changes no fingerprint of another task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipeline.hashes import canonical_json, sha256_hex
from pipeline.spec.schema import ContextualSpec, JobSpec, TaskSpec

# Increased when this program answers the same spec differently, or writes answers differently.
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One version of one task: its content, without secrets, and the hash of it."""

    content: Mapping[str, Any]

    @property
    def id(self) -> str:
        """16 hex digits; changes exactly when an answer could change."""
        return sha256_hex(self.json(), 16)

    @property
    def raw(self) -> Fingerprint:
        """The same task without calibration: its answers differ only in the calibrated part."""
        return Fingerprint({k: v for k, v in self.content.items() if k != "calibration"})

    def json(self) -> bytes:
        return canonical_json(self.content)


def fingerprints(
    spec: JobSpec,
    *,
    weights: Mapping[str, str],
    dtype: str,
    readouts: Mapping[str, str] = MappingProxyType({}),
    calibrations: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Fingerprint]:
    """Every task's fingerprint; `weights` are the hashes of the model's and tokenizer's files.

    `readouts` and `calibrations` are the hashes of the files that tasks name, by task.
    """
    return {
        task.name: Fingerprint(_content(spec, task, weights, dtype, readouts, calibrations))
        for task in spec.tasks
    }


def _content(
    spec: JobSpec,
    task: TaskSpec,
    weights: Mapping[str, str],
    dtype: str,
    readouts: Mapping[str, str],
    calibrations: Mapping[str, str],
) -> dict[str, Any]:
    """Options that were added later are included only if they are set: older answers stay valid."""
    documents = spec.documents.model_dump(mode="json", exclude={"overlap_tokens"})
    scoring_options = {"length_penalty", "beam", "top_k", "separator"}
    asked: dict[str, Any] = {
        "question": task.question,
        "labels": [[label, list(verbalizers)] for label, verbalizers in task.labels.items()],
        # — `auto` follows from the labels and the tokenizer, which are hashed; without labels that
        #   begin alike, it is this
        "scoring": "full" if task.scoring == "full" else "first_token",
        **task.model_dump(mode="json", include=scoring_options, exclude_defaults=True),
    }
    if spec.documents.too_long == "chunk":
        documents["overlap_tokens"] = spec.documents.overlap_tokens
        asked["chunks"] = task.chunks
    if task.readout is not None:
        asked["readout"] = readouts[task.name]
    content: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "task": asked,
        "prompt": spec.prompt.model_dump(mode="json"),
        "documents": documents,
        "weights": dict(weights),
        "dtype": dtype,
    }
    if spec.model.quantize != "none":
        content["quantize"] = spec.model.quantize
    if spec.exit is not None and spec.exit.layer is not None:
        content["exit"] = {"layer": spec.exit.layer}
    elif spec.exit is not None:
        # — by confidence, an answer depends on all tasks: only here does one change another's
        content["exit"] = {**spec.exit.model_dump(mode="json", include={"layers", "confidence"})}
        content["exit"]["readouts"] = sorted(readouts.values())
    if isinstance(task.calibration, ContextualSpec):
        content["calibration"] = task.calibration.model_dump(mode="json")
    elif task.calibration is not None:
        method = task.calibration.method
        content["calibration"] = {"method": method, "hash": calibrations[task.name]}
    return content
