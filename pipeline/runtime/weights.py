"""A model's files. Entry points: `locate` in the driver, which hashes them; `fetch` on a worker.

A model is a local folder, a GGUF file, a hub id or an object-store prefix. Its identity is the
content of the files that are read, wherever they are. `inference.model` loads the files.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import huggingface_hub as hub  # — loads its client, which is slow to load, when it is used
from fsspec import AbstractFileSystem
from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_ETAG_TIMEOUT
from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

from pipeline.errors import AssayError, ModelError, Problem, SpecError, StorageError
from pipeline.hashes import canonical_json, content_hash, parse_json, short_hash
from pipeline.runtime.model_cache import (
    SUMS,
    cached_folder,
    cached_model,
    differing,
    locked,
    parse_sums,
    require_room,
)
from pipeline.runtime.model_folder import check_folder
from pipeline.sources.listing import FileInfo, remote_etag
from pipeline.sources.streams import Options
from pipeline.spec.model import NO_MODEL, ModelSpec
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.hub import HUB_ERRORS, NOT_THERE, hub_error, hub_fix
from pipeline.stores.retries import (
    Cause,
    as_storage_error,
    cause_of,
    remote_errors,
    retry,
    storage_errors,
)

# Weights, configuration, tokenizer, template. Other files, and folders, do not change an answer.
_WEIGHTS = "*.safetensors"
_FILES = (_WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files: where a worker gets them, and the hashes of their content."""

    kind: str  # folder | gguf | hub | remote | server | none
    location: str
    revision: str | None
    hashes: Mapping[str, str]  # SHA-256 by name; of a server, its model's names
    size_bytes: int
    etags: Mapping[str, str] = field(default_factory=dict)  # of a model in an object store

    @property
    def id(self) -> str:
        """A hash that changes when any file changes."""
        return short_hash(canonical_json(dict(self.hashes)))

    def loaded_bytes(self, dtype: str) -> int:
        """Upper bound of the bytes of the loaded weights, whose files hold 4 bits or more each."""
        least_bits = 4 if self.kind == "gguf" else 16
        return self.size_bytes * (32 if dtype == "float32" else 16) // least_bits


@contextmanager
def model_at(model: str) -> Iterator[None]:
    """A SpecError about the model of a reader names this place of it in the spec."""
    try:
        yield
    except SpecError as error:

        def placed(problem: Problem) -> Problem:
            first, dot, below = problem.place.partition(".")
            is_moved = first == "model" and model != "model"
            return replace(problem, place=f"{model}{dot}{below}") if is_moved else problem

        raise SpecError([placed(problem) for problem in error.problems]) from error


def locate(model: ModelSpec, cache_dir: Path, *, downloads: bool = True) -> ModelFiles:
    """The model that `model.path` names; SpecError if there is none, ModelError if it is broken.

    A spec whose tasks all have classifiers has no model, and so no files. Without `downloads`,
    SpecError if a model in an object store would be downloaded for its hashes. UnavailableError if
    a store or the Hub does not answer.
    """
    if model == NO_MODEL:
        return ModelFiles("none", "", None, {}, 0)
    if model.engine == "openai":
        # — the URL may change: it is that of a machine, and the name identifies the model
        named = {"model": model.path, "revision": model.revision or model.path}
        return ModelFiles("server", str(model.base_url), model.revision, named, 0)
    path = Path(os.path.expanduser(model.path))
    if path.is_dir():
        hashes = _content_hashes(path, cache_dir)
        if not any(fnmatchcase(name, _WEIGHTS) for name in hashes):
            fix = "the folder holds no .safetensors file; pickled weights are not read, convert"
            raise SpecError([Problem("model.path", f"{fix} them", str(path))])
        check_folder(path, engine=model.engine)
        return ModelFiles("folder", os.path.abspath(path), None, hashes, _weights_bytes(path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SpecError([Problem("model.path", "there is no such file", str(path))])
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path}: is not a GGUF file; fetch the model again")
        hashes = _content_hashes(path, cache_dir)
        return ModelFiles("gguf", os.path.abspath(path), None, hashes, path.stat().st_size)
    if "://" in model.path:
        return _remote(model.path, model.storage_options, cache_dir, downloads)
    return _hub(model.path, model.revision, cache_dir)


def fetch(files: ModelFiles, cache_dir: Path, options: Options) -> Path:
    """A local folder with the files, or the local GGUF file.

    StorageError unless their content has the hashes of `locate`.
    """
    if files.kind == "remote":
        needed = files.size_bytes
        folder = _downloaded(files.location, files.etags, cache_dir, options, needed_bytes=needed)
        present = parse_sums((folder / SUMS).read_bytes())
    else:
        folder = Path(files.location)
        if files.kind == "hub":
            names = [glob.escape(name) for name in files.hashes]
            weights = [name for name in files.hashes if fnmatchcase(name, _WEIGHTS)]
            cached = (
                hub.try_to_load_from_cache(files.location, n, revision=files.revision)
                for n in weights
            )
            if not any(cached):
                require_room(Path(HF_HUB_CACHE), files.size_bytes)
            folder = _from_hub(files.location, files.revision, names)
        elif not folder.exists():
            raise ModelError(f"{folder}: not on this machine; use a path all machines see")
        with locked(cache_dir, files.id):  # — one process of a machine reads gigabytes, if any
            present = _content_hashes(folder, cache_dir)
    if present != files.hashes:
        raise StorageError(
            f"{files.location}: {differing(present, files.hashes)} on this machine is not what "
            f"the run was planned with; use one copy on all machines, correct its {SUMS} if it has "
            f"one, and run again"
        )
    return folder


def model_config(files: ModelFiles, options: Options) -> dict[str, Any]:
    """The configuration of the model's decoder, as its config.json states it; of GGUF nothing."""
    name = "config.json"
    if files.kind == "gguf":
        return {}
    if files.kind == "remote":
        with storage_errors(files.location, "read"):
            file_system, place = file_system_at(files.location, options)
            content = file_system.cat_file(f"{place.rstrip('/')}/{name}")
    else:
        folder = Path(files.location)
        if files.kind == "hub":
            folder = _from_hub(files.location, files.revision, [name])
        content = (folder / name).read_bytes()
    config: dict[str, Any] = parse_json(content)
    return {**config, **(config.get("text_config") or {})}


def _is_ours(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _FILES)


def _content_hashes(
    folder: Path, cache_dir: Path, known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The hash of each file of the folder that may be read; `known` ones are not read for it.

    Of a GGUF file, which is a model without a folder, the hash of the file.
    """
    if folder.suffix == ".gguf" and folder.is_file():
        return {"gguf": content_hash(folder, cache_dir)}
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [file.name for file in files if file.is_file() and _is_ours(file.name)]
    others = {n: content_hash(folder / n, cache_dir) for n in names if n not in known}
    return {**known, **others}


def _weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob(_WEIGHTS))


def _remote(url: str, options: Options, cache_dir: Path, downloads: bool) -> ModelFiles:
    """The model in an object store. It is read once, unless its hashes are beside it."""
    refused = remote_errors()
    failures: tuple[type[BaseException], ...] = (ValueError, TypeError, ImportError, *refused)
    try:
        file_system, place = file_system_at(url, options)
        infos = _root_files(file_system, place)
        sums = file_system.cat_file(infos[SUMS]["name"]) if SUMS in infos else b""
    except failures as error:
        if isinstance(error, refused) and cause_of(error) is not Cause.MISSING:
            raise as_storage_error(error, url, "read") from error
        raise SpecError([Problem("model.path", f"cannot be opened: {error}", url)]) from error
    etags = _etags(infos)
    sizes = [infos[name]["size"] for name in etags if fnmatchcase(name, _WEIGHTS)]
    if not sizes:
        fix = "no .safetensors file is in it; folders below it are not read"
        raise SpecError([Problem("model.path", fix, url)])
    hashes, kept = parse_sums(sums), _cached_at(etags, cache_dir) / SUMS
    if not etags.keys() <= hashes.keys() and kept.is_file():
        hashes = parse_sums(kept.read_bytes())
    if not etags.keys() <= hashes.keys():
        if not downloads:
            fix = (
                f"the hashes of its files are not known here, and the model is not downloaded "
                f"({sum(sizes) / 1e9:,.1f} GB) to plan or count; run `assay check` once on this "
                f"machine, or put a file {SUMS} beside them"
            )
            raise SpecError([Problem("model.path", fix, url)])
        logger.info("%s: the model is fetched once, for the hashes of its files", url)
        folder = _downloaded(url, etags, cache_dir, options, needed_bytes=sum(sizes))
        hashes = parse_sums((folder / SUMS).read_bytes())
    hashes = {name: hashes[name] for name in etags}
    return ModelFiles("remote", url, None, hashes, sum(sizes), etags=etags)


def _root_files(file_system: AbstractFileSystem, place: str) -> dict[str, FileInfo]:
    """The description of each file in a folder, by name, without those of folders below."""
    file_system.invalidate_cache()
    infos = retry(partial(file_system.find, place, detail=True, maxdepth=1))
    start = f"{place.rstrip('/')}/"
    return {path.removeprefix(start): info for path, info in infos.items()}


def _etags(infos: Mapping[str, FileInfo]) -> dict[str, str]:
    """The store's identifier of the content of each file of a model."""
    return {name: remote_etag(name, info) for name, info in infos.items() if _is_ours(name)}


def _cached_at(etags: Mapping[str, str], cache_dir: Path) -> Path:
    """Where the model with these ETags is kept, once it is downloaded."""
    return cached_folder(short_hash(canonical_json(dict(etags))), cache_dir)


def _downloaded(
    url: str, etags: Mapping[str, str], cache_dir: Path, options: Options, *, needed_bytes: int
) -> Path:
    """The folder of a remote model in the cache; StorageError if its files have other ETags."""

    def download(folder: Path) -> None:
        with storage_errors(url, "read"):
            file_system, place = file_system_at(url, options)
            for name in etags:
                source = f"{place.rstrip('/')}/{name}"
                retry(partial(file_system.get_file, source, str(folder / name)))
            now = _etags(_root_files(file_system, place))
        if now != etags:
            raise StorageError(
                f"{url}: {differing(now, etags)} changed while the job ran; run again to label "
                f"with the new version"
            )

    name = _cached_at(etags, cache_dir).name
    return cached_model(name, cache_dir, download, needed=lambda: needed_bytes)


def _hub(repo: str, revision: str | None, cache_dir: Path) -> ModelFiles:
    """The model on the Hub, which has the hashes of its weights; other files are fetched."""
    folder = _from_hub(repo, revision, _FILES[1:])
    commit, known = folder.name, {}
    try:
        # — `list_repo_tree` tries for 23 s to reach the Hub
        info = hub.HfApi().model_info(
            repo, revision=commit, files_metadata=True, timeout=HF_HUB_ETAG_TIMEOUT
        )
        in_root = [file for file in info.siblings or () if "/" not in file.rfilename]
        listed = [file for file in in_root if fnmatchcase(file.rfilename, _WEIGHTS)]
    except HUB_ERRORS as reason:  # the Hub does not answer: a model that was downloaded is used
        _from_hub(repo, commit, _FILES)
        size_bytes = _weights_bytes(folder)
        if not size_bytes:
            raise _not_on_hub(repo, revision, reason) from reason
    else:
        size_bytes = sum(file.size or 0 for file in listed)
        known = {file.rfilename: file.lfs.sha256 for file in listed if file.lfs is not None}
        if plain := [file.rfilename for file in listed if file.lfs is None]:
            _from_hub(repo, commit, plain)
        if not listed:
            fix = "the repository on the Hub holds no .safetensors file; name a repository with"
            raise SpecError([Problem("model.path", f"{fix} them", repo)])
    hashes = _content_hashes(folder, cache_dir, known)
    return ModelFiles("hub", repo, commit, hashes, size_bytes)


def _from_hub(repo: str, revision: str | None, names: Sequence[str]) -> Path:
    """The folder of a commit in the Hub's cache, with the files of these names or patterns.

    SpecError if the Hub has no such model, UnavailableError if it does not answer.
    """
    try:
        allowed, ignored = list(names), ["*/*"]
        return Path(
            hub.snapshot_download(
                repo, revision=revision, allow_patterns=allowed, ignore_patterns=ignored
            )
        )
    except HUB_ERRORS as reason:
        raise _not_on_hub(repo, revision, reason) from reason
    except OSError as error:
        raise StorageError(f"{repo}: cannot be downloaded: {error}") from error


def _not_on_hub(path: str, revision: str | None, reason: Exception) -> AssayError:
    """The error of a model that the Hub does not return."""
    cause = reason.__cause__ if isinstance(reason.__cause__, NOT_THERE) else reason
    fix = hub_fix(cause, path)
    if isinstance(cause, RevisionNotFoundError):
        return SpecError([Problem("model.revision", fix, revision)])
    if not isinstance(cause, NOT_THERE):
        fix += ", or write the path of a folder with the model"
    if not isinstance(cause, GatedRepoError):
        fix = f"no such folder here; {fix}"
    return hub_error(cause, Problem("model.path", fix, path))
