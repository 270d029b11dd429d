"""The model of a spec, fetched ahead of a run. Entry point: `pull`. Must not import Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import Problem, SpecError
from pipeline.inference.loading import context_tokens, load_tokenizer
from pipeline.runtime.assembly import local_model
from pipeline.runtime.model_folder import check_folder
from pipeline.runtime.progress import CHECKING, LOCATING, Send, WorkerReport, ignore
from pipeline.runtime.weights import locate
from pipeline.spec.model import NO_MODEL
from pipeline.spec.schema import JobSpec


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that is on this machine and whole."""

    path: str  # as in the spec
    kind: str  # folder | gguf | hub | remote
    revision: str | None  # the commit of a model of the Hub
    folder: str  # what a run reads here
    size_bytes: int
    context_tokens: int


def pull(spec: JobSpec, *, cache_dir: Path, announce: Send = ignore) -> Pulled:
    """Fetch the spec's model to this machine, convert it where a run would, and check its files.

    Args:
        spec: The job; only its `model` is read.
        cache_dir: Folder of models and file hashes.
        announce: Called with the report of each phase.

    Returns:
        Where the model is, and its size.

    Raises:
        SpecError: There is no such model, or its terms are not accepted.
        ModelError: The model's files are damaged or missing.
        StorageError: The model cannot be downloaded; UnavailableError if it may succeed later.

    Examples:
        >>> pull(load_spec("my.yaml"), cache_dir=Path("cache")).kind
        'folder'
    """
    announce(WorkerReport(LOCATING))
    if spec.model == NO_MODEL:
        fix = "the spec has none, because all tasks have classifiers: there is nothing to fetch"
        raise SpecError([Problem("model", fix, None)])
    files = locate(spec.model, cache_dir)
    folder = local_model(files, spec.model, cache_dir, announce)
    announce(WorkerReport(CHECKING))
    check_folder(folder, engine=spec.model.engine)
    load_tokenizer(folder)
    return Pulled(
        path=spec.model.path,
        kind=files.kind,
        revision=files.revision,
        folder=str(folder),
        size_bytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        context_tokens=context_tokens(folder),
    )
