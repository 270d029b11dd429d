"""The fingerprint of a task: the hash of everything that can change its answers.

Entry point: `fingerprints`. Adding a task to a spec changes no fingerprint of another task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipeline.hashes import canonical_json, sha256_hex
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import CascadeTask, ClassifierTask, EncoderTask, TaskSpec

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
        """The same question, of all documents."""
        return self._without("when", "after", "limit")

    @property
    def of_all(self) -> Fingerprint:
        """The same task, without the condition of a run."""
        return self._without("limit")

    def under(self, **conditions: object) -> Fingerprint:
        """The same task of the documents that satisfy these conditions, too; None is no condition.

        `when` is the task's own, with the versions of the tasks that it names. `after` is the stage
        of a cascade before this one, with its thresholds; `limit` is the condition of a run.
        """
        present = {name: value for name, value in conditions.items() if value is not None}
        return Fingerprint({**self.content, **present})

    def _without(self, *names: str) -> Fingerprint:
        return Fingerprint({k: v for k, v in self.content.items() if k not in names})

    @property
    def stages(self) -> tuple[str, ...]:
        """The ids of the raw versions of a cascade's stages, of which its answers are made."""
        return tuple(self.content.get("cascade", {}).get("stages", ()))

    def json(self) -> bytes:
        return canonical_json(self.content)


def fingerprints(
    spec: JobSpec,
    *,
    weights: Mapping[str, str],
    dtype: str,
    readouts: Mapping[str, str] = MappingProxyType({}),
    classifiers: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Fingerprint]:
    """Every task's fingerprint; `weights` are the hashes of the model's and tokenizer's files.

    `readouts` and `classifiers` are the hashes of the files that tasks name, by task; those of a
    task of kind `multi` are by the names of its parts. Tasks with a cascade have a fingerprint of
    their own, `cascade_fingerprint`.
    """
    versions = {}
    for task in spec.tasks:
        if isinstance(task, CascadeTask):
            continue
        if isinstance(task, ClassifierTask):
            content = _classifier_content(task, task.classifier.kind, classifiers[task.name])
        elif isinstance(task, EncoderTask):
            content = _encoder_content(spec, task, weights, dtype)
        else:
            content = _decoder_content(spec, task, weights, dtype, readouts)
        if task.kind != "choice":
            content["kind"] = task.kind
        versions[task.name] = Fingerprint(content)
    return versions


def cascade_fingerprint(task: TaskSpec, thresholds: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of a task with a cascade; `thresholds` name its stages, too."""
    labels = list(task.labels)
    return Fingerprint({"schema": SCHEMA_VERSION, "labels": labels, "cascade": dict(thresholds)})


def _of_parts(task: TaskSpec, hashes: Mapping[str, str]) -> str | list[str]:
    """The hash of the task's file; of a task of kind `multi`, those of its labels' files."""
    if task.kind == "multi":
        return [hashes[part.name] for part in task.parts]
    return hashes[task.name]


def _classifier_content(task: TaskSpec, kind: str, digest: str) -> dict[str, Any]:
    """A classifier reads the whole text: neither prompt, model nor truncation changes an answer."""
    return {
        "schema": SCHEMA_VERSION,
        "task": _classes_content(task),
        "classifier": {"kind": kind, "hash": digest},
    }


def _encoder_content(
    spec: JobSpec, task: TaskSpec, weights: Mapping[str, str], dtype: str
) -> dict[str, Any]:
    """An encoder reads the document alone: the prompt changes no answer."""
    documents = spec.documents.model_dump(mode="json", exclude={"overlap_tokens"})
    content = _classes_content(task)
    if spec.documents.too_long == "chunk":
        documents["overlap_tokens"] = spec.documents.overlap_tokens
        content["chunks"] = task.chunks
    return {
        "schema": SCHEMA_VERSION,
        "kind": "encoder",
        "task": content,
        "documents": documents,
        "weights": dict(weights),
        "dtype": dtype,
    }


def _classes_content(task: TaskSpec) -> dict[str, Any]:
    """The labels of a task, each with the classes that mean it, and what is stored of them."""
    return {
        "labels": [[label, list(classes)] for label, classes in task.labels.items()],
        **task.model_dump(mode="json", include={"top_k", "separator"}, exclude_defaults=True),
    }


def _decoder_content(
    spec: JobSpec,
    task: TaskSpec,
    weights: Mapping[str, str],
    dtype: str,
    readouts: Mapping[str, str],
) -> dict[str, Any]:
    """Options that were added later are included only if they are set: older answers stay valid."""
    documents = spec.documents.model_dump(mode="json", exclude={"overlap_tokens"})
    scoring_options = {"length_penalty", "beam", "top_k", "separator"}
    asked: dict[str, Any] = {
        "question": task.question,
        "labels": [[label, list(verbalizers)] for label, verbalizers in task.labels.items()],
        **task.model_dump(mode="json", include=scoring_options, exclude_defaults=True),
    }
    if spec.documents.too_long == "chunk":
        documents["overlap_tokens"] = spec.documents.overlap_tokens
        asked["chunks"] = task.chunks
    if task.readout is not None:
        asked["readout"] = _of_parts(task, readouts)
    content: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "task": asked,
        "prompt": spec.prompt.model_dump(mode="json"),
        "documents": documents,
        "weights": dict(weights),
        "dtype": dtype,
    }
    if spec.model.engine != "assay":
        content["engine"] = spec.model.engine
    if spec.model.is_int8:
        content["products"] = "int8, rows evened out"
    if spec.model.kv != "none":
        content["kv"] = spec.model.kv
    return content
