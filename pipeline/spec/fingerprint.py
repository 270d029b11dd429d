"""The fingerprint of a task: the hash of everything that can change its answers.

Entry point: `fingerprints`. Adding a task to a spec changes no fingerprint of another task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipeline.hashes import canonical_json, parse_json, sha256_hex
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import ClassifierTask, EncoderTask, QuestionTask
from pipeline.spec.tasks import CascadeTask, TaskSpec

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

    @property
    def question(self) -> str | None:
        """What is asked; None without a question."""
        question = _flat(self).get("question")
        return question if isinstance(question, str) else None

    def changes(self, earlier: Fingerprint) -> tuple[str, ...]:
        """The names of what differs from an earlier version, such as `question` or `the model`.

        A version that a cascade answers names its stages alone.
        """
        if bool(self.stages) != bool(earlier.stages):
            return ("cascade",)
        before, after = (_flat(version.of_all) for version in (earlier, self))
        differing = {name for name in before | after if before.get(name) != after.get(name)}
        return tuple(sorted("the model" if name == "weights" else name for name in differing))


def _flat(version: Fingerprint) -> dict[str, Any]:
    """The content as JSON values, with the keys of its task beside its own."""
    content = parse_json(version.json())
    task = content.pop("task", None)
    return {**content, **(task if isinstance(task, dict) else {})}


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
        content: dict[str, Any] = {"schema": SCHEMA_VERSION, "task": _task_content(task)}
        if isinstance(task, ClassifierTask):
            # — it reads the whole text: neither prompt, model nor truncation changes an answer
            file = {"kind": task.classifier.kind, "hash": classifiers[task.name]}
            content["classifier"] = file
        else:
            is_chunked = spec.documents.too_long == "chunk"
            unread = None if is_chunked else {"overlap_tokens"}
            documents = spec.documents.model_dump(mode="json", exclude=unread)
            content |= {"weights": dict(weights), "documents": documents}
            if spec.model.engine != "openai":  # — what a server computes in is not known
                content["dtype"] = dtype
            if is_chunked:
                content["task"]["chunks"] = task.chunks
            if isinstance(task, EncoderTask):  # — it reads the document alone, without a prompt
                content["kind"] = "encoder"
            else:
                content |= _prompt_content(spec)
            if task.readout is not None:
                of_parts = [readouts[part.name] for part in task.parts]
                content["task"]["readout"] = of_parts if task.kind == "multi" else of_parts[0]
        if task.kind != "choice":
            content["kind"] = task.kind
        versions[task.name] = Fingerprint(content)
    return versions


def cascade_fingerprint(task: TaskSpec, thresholds: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of a task with a cascade; `thresholds` name its stages, too."""
    labels = list(task.labels)
    return Fingerprint({"schema": SCHEMA_VERSION, "labels": labels, "cascade": dict(thresholds)})


def _task_content(task: TaskSpec) -> dict[str, Any]:
    """What is asked and stored. Options that were added later are included only if they are set:
    older answers stay valid."""
    options = {"length_penalty", "beam", "top_k", "separator"}
    content = {
        "labels": [[label, list(texts)] for label, texts in task.labels.items()],
        **task.model_dump(mode="json", include=options, exclude_defaults=True),
    }
    return {"question": task.question, **content} if isinstance(task, QuestionTask) else content


def _prompt_content(spec: JobSpec) -> dict[str, Any]:
    """What surrounds a document, and what else of the model changes the answers to a question."""
    content: dict[str, Any] = {"prompt": spec.prompt.model_dump(mode="json")}
    if spec.model.engine != "assay":
        content["engine"] = spec.model.engine
    if products := spec.model.rounded_to:
        content["products"] = "int8, rows evened out" if products == "int8" else products
    if spec.model.kv != "none":
        content["kv"] = spec.model.kv
    return content
