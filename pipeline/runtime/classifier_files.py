"""The files of classifiers, which tasks name by a local path or an fsspec URL.

Entry points: `find_classifiers` in the driver, which hashes them; `check_classifiers` before a run
writes anything; and `TaskClassifier`, which answers on a worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ModelError, Problem, SpecError, StorageError
from pipeline.hashes import content_hash
from pipeline.inference.classifiers import (
    Classifier,
    label_log_probs,
    language_model,
    load_classifier,
)
from pipeline.runtime.fitted_files import fitted_copy, options_for, places_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

_MADE_BY = {"fasttext": "fasttext supervised", "onnx": "skl2onnx.to_onnx"}
# Texts that a classifier reads in one call.
_BATCH_TEXTS = 256


def find_classifiers(
    spec: JobSpec, cache_dir: Path, places: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The SHA-256 of each task's classifier, by task; SpecError for files that are missing.

    For a model that a package carries, the package's version follows. `places` are those of the
    tasks, where the spec is a part of another.
    """
    hashes, places = {}, places or places_of(spec)
    for task in spec.tasks:
        if task.classifier is not None:
            file = _local_file(spec, task, cache_dir, f"{places[task.name]}.classifier.path")
            hashes[task.name] = content_hash(file, cache_dir)
            if task.classifier.kind == "language":
                hashes[task.name] += f" {language_model()[1]}"
    return hashes


def check_classifiers(
    spec: JobSpec,
    digests: Mapping[str, str],
    places: Mapping[str, str],
    is_known: Callable[[str], bool],
    cache_dir: Path,
) -> None:
    """SpecError unless each new classifier can be loaded and has the classes of its labels.

    One of a task that the output knows, `is_known`, was checked before: to load a large one takes
    seconds.
    """
    problems = []
    for task in spec.tasks:
        if task.classifier is None or is_known(task.name):
            continue
        try:
            TaskClassifier(spec, task, cache_dir, digests[task.name]).log_probs(["a text"])
        except ModelError as error:
            problems.append(
                Problem(f"{places[task.name]}.classifier", str(error), task.classifier.path)
            )
    if problems:
        raise SpecError(problems)


class TaskClassifier:
    """The classifier of a task, loaded when it is needed first.

    Args:
        spec: The job.
        task: A task with a classifier.
        cache_dir: Folder of downloaded files.
        digest: What `find_classifiers` returned for the task. A copy of a remote file with this
            hash is used. StorageError if the file has another hash now.
    """

    def __init__(self, spec: JobSpec, task: TaskSpec, cache_dir: Path, digest: str) -> None:
        self._spec, self._task, self._cache_dir, self._digest = spec, task, cache_dir, digest

    @cached_property
    def _loaded(self) -> Classifier:
        assert self._task.classifier is not None, self._task.name
        digest = self._digest.partition(" ")[0]
        file = _local_file(self._spec, self._task, self._cache_dir, "classifier.path", digest)
        if digest != content_hash(file, self._cache_dir):
            raise StorageError(
                f"{file}: the classifier of {self._task.name!r} changed "
                f"while the job ran; run again, with a file that does not change"
            )
        return load_classifier(self._task.classifier.kind, file)

    def load(self) -> None:
        """Loads the classifier."""
        _ = self._loaded

    def log_probs(
        self, texts: Sequence[str], on_batch: Callable[[], None] = lambda: None
    ) -> NDArray[np.float32]:  # [texts, labels]
        """The log-probability of each label; NaN where the classifier says nothing.

        `on_batch` is called after each batch of texts.
        """
        labels = self._task.labels
        parts = [np.empty((0, len(labels)), np.float32)]
        for start in range(0, len(texts), _BATCH_TEXTS):
            p = self._loaded.probabilities(texts[start : start + _BATCH_TEXTS])
            parts.append(label_log_probs(p, self._loaded.classes, labels))
            on_batch()
        return np.concatenate(parts)


def _local_file(
    spec: JobSpec, task: TaskSpec, cache_dir: Path, place: str, digest: str = ""
) -> Path:
    """The classifier's file on this machine: itself, or a copy of a remote one in the cache.

    A copy with the SHA-256 `digest` is used, if there is one.
    """
    assert task.classifier is not None, task.name
    path = task.classifier.path
    if path is None:
        try:
            return language_model()[0]
        except ModelError as error:
            place = place.removesuffix("path") + "kind"
            raise SpecError([Problem(place, str(error), task.classifier.kind)]) from error
    if "://" not in path:
        local = Path(os.path.expanduser(path))
        if not local.is_file():
            raise SpecError([Problem(place, "there is no such file", path)])
        return local
    return fitted_copy(
        path,
        options_for(path, spec),
        place=place,
        made_by=_MADE_BY[task.classifier.kind],
        cache_dir=cache_dir,
        digest=digest,
    )
