"""A model's files. Entry points: `locate` in the driver, which hashes them; `fetch` on a worker.

A model is a local folder, a GGUF file, a hub id or an object-store prefix. `inference.model` loads
the files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

from pipeline.errors import ModelError, Problem, SpecError, StorageError, UnavailableError
from pipeline.hashes import canonical_json, content_hash, parse_json, short_hash
from pipeline.sources.streams import Options
from pipeline.spec.model import NO_MODEL, ModelSpec
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.hub import HUB_ERRORS, NOT_THERE, hub_fix
from pipeline.stores.retries import REMOTE_ERRORS, storage_errors

# Weights, configuration, tokenizer, template. Other files in the folder do not change an answer.
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
# The hashes of the files of a cached model, as `sha256sum --check` reads them.
SUMS = "SHA256SUMS"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files: where a worker gets them, and the hashes of their content."""

    kind: str  # folder | gguf | hub | remote | none
    location: str
    revision: str | None
    hashes: Mapping[str, str]
    size_bytes: int

    @property
    def id(self) -> str:
        """Changes when any file does."""
        return short_hash(canonical_json(dict(self.hashes)))

    def loaded_bytes(self, dtype: str) -> int:
        """Upper bound of the bytes of the loaded weights, whose files hold 4 bits or more each."""
        least_bits = 4 if self.kind == "gguf" else 16
        return self.size_bytes * (32 if dtype == "float32" else 16) // least_bits


def locate(model: ModelSpec, cache_dir: Path, *, sees_images: bool = False) -> ModelFiles:
    """The model that `model.path` names; SpecError if there is no such model.

    With `sees_images`, a local model must have a vision tower; of others, the worker checks it. A
    spec whose tasks all have classifiers has no model, and so no files.
    """
    if model == NO_MODEL:
        return ModelFiles("none", "", None, {}, 0)
    path = Path(model.path).expanduser()
    if sees_images and (path.is_dir() or path.suffix == ".gguf") and not _has_vision_tower(path):
        fix = "this model has no vision tower, and input.image needs one; name a model that sees"
        raise SpecError([Problem("model.path", f"{fix} images, or remove input.image", str(path))])
    if path.is_dir():
        return _folder(path, cache_dir)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SpecError([Problem("model.path", "there is no such file", str(path))])
        hashes = {"gguf": content_hash(path, cache_dir)}
        return ModelFiles("gguf", os.path.abspath(path), None, hashes, path.stat().st_size)
    if "://" in model.path:
        return _remote(model.path, model.storage_options)
    return _hub(model, cache_dir)


def fetch(files: ModelFiles, cache_dir: Path, options: Options) -> Path:
    """A local folder with the files, or the local GGUF file."""
    if files.kind in ("folder", "gguf"):
        if not Path(files.location).exists():
            raise ModelError(f"{files.location}: not on this machine; use a path all machines see")
        return Path(files.location)
    if files.kind == "hub":
        return _download(files)

    def download(folder: Path) -> None:
        with storage_errors(files.location, "read"):
            file_system, place = file_system_at(files.location, options)
            for name in filter(_is_ours, file_system.find(place)):
                file_system.get_file(name, str(folder / Path(name).name))

    return cached_model(files, cache_dir, download)


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
        folder = _download(files, [name]) if files.kind == "hub" else Path(files.location)
        content = (folder / name).read_bytes()
    config: dict[str, Any] = parse_json(content)
    return {**config, **(config.get("text_config") or {})}


def _download(files: ModelFiles, patterns: Sequence[str] = _FILES) -> Path:
    """The folder of a model of the Hub in its cache, with the files of these patterns."""
    try:
        return Path(
            snapshot_download(
                files.location, revision=files.revision, allow_patterns=list(patterns)
            )
        )
    except HUB_ERRORS as error:
        fix = hub_fix(error, files.location)
        if isinstance(error, NOT_THERE) or isinstance(error.__cause__, NOT_THERE):
            raise SpecError([Problem("model.path", fix, files.location)]) from error
        raise UnavailableError(f"{files.location}: {fix}; run again to go on") from error
    except OSError as error:
        raise StorageError(f"{files.location}: cannot be downloaded: {error}") from error


def _has_vision_tower(path: Path) -> bool:
    """False where the configuration of a model folder names none, and of a GGUF file."""
    config = path / "config.json"
    if not config.is_file():
        return False
    try:
        return bool(parse_json(config.read_bytes()).get("vision_config"))
    except (ValueError, AttributeError):
        return True  # — what loads the model says what is wrong with the file


def _folder(path: Path, cache_dir: Path) -> ModelFiles:
    files = sorted({file for pattern in _FILES for file in path.glob(pattern)})
    if not any(file.suffix == ".safetensors" for file in files):
        fix = "the folder holds no .safetensors file; pickled weights are not read, convert them"
        raise SpecError([Problem("model.path", fix, str(path))])
    hashes = {file.name: content_hash(file, cache_dir) for file in files}
    size_bytes = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
    return ModelFiles("folder", os.path.abspath(path), None, hashes, size_bytes)


def _remote(url: str, options: Options) -> ModelFiles:
    try:
        file_system, place = file_system_at(url, options)
        file_system.invalidate_cache()
        infos = file_system.find(place, detail=True)
    except (ValueError, TypeError, ImportError, *REMOTE_ERRORS) as error:
        raise SpecError([Problem("model.path", f"cannot be opened: {error}", url)]) from error
    files = {name: info for name, info in infos.items() if _is_ours(name)}
    if not any(name.endswith(".safetensors") for name in files):
        fix = "no .safetensors file is below it"
        raise SpecError([Problem("model.path", fix, url)])
    hashes = {
        Path(name).name: str(info.get("ETag") or info.get("md5Hash") or file_system.checksum(name))
        for name, info in files.items()
    }
    size_bytes = sum(info["size"] for name, info in files.items() if "safetensors" in name)
    return ModelFiles("remote", url, None, hashes, size_bytes)


def _is_ours(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in _FILES)


def _hub(model: ModelSpec, cache_dir: Path) -> ModelFiles:
    try:
        info = HfApi().model_info(model.path, revision=model.revision, files_metadata=True)
    except HUB_ERRORS as reason:  # the Hub does not answer: a downloaded model is used
        folder = _downloaded(model, cache_dir)
        if folder is None:
            raise _unavailable(model, reason) from reason
        revision = folder.name
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    else:
        assert info.sha is not None, info
        revision = info.sha
        files = [file for file in info.siblings or () if file.rfilename.endswith(".safetensors")]
        sizes = [file.size or 0 for file in files]
        _write_commit(_commit_file(model, cache_dir), revision)
    if not sizes:
        fix = "the repository on the Hub holds no .safetensors file; name a repository with them"
        raise SpecError([Problem("model.path", fix, model.path)])
    return ModelFiles("hub", model.path, revision, {"revision": revision}, sum(sizes))


def _downloaded(model: ModelSpec, cache_dir: Path) -> Path | None:
    """The folder of the model in the Hub's cache, of the commit that was seen last."""
    # — a download by commit leaves no record of the branch in the Hub's own cache
    file = _commit_file(model, cache_dir)
    seen = [file.read_text(encoding="ascii")] if file.is_file() else []
    for revision in (*seen, model.revision):
        with suppress(*HUB_ERRORS):
            return Path(
                snapshot_download(
                    model.path,
                    revision=revision,
                    allow_patterns=list(_FILES),
                    local_files_only=True,
                )
            )
    return None


def _commit_file(model: ModelSpec, cache_dir: Path) -> Path:
    name = short_hash(canonical_json([model.path, model.revision]))
    return cache_dir / "hub" / f"{name}.commit"


def _write_commit(file: Path, commit: str) -> None:
    if file.is_file() and file.read_text(encoding="ascii") == commit:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "w", encoding="ascii") as stream:
        stream.write(commit)
    os.replace(partial, file)


def _unavailable(model: ModelSpec, reason: Exception) -> SpecError:
    fix = hub_fix(reason, model.path)
    if isinstance(reason, RevisionNotFoundError):
        return SpecError([Problem("model.revision", fix, model.revision)])
    if not isinstance(reason, NOT_THERE):
        fix += ", or write the path of a folder with the model"
    if not isinstance(reason, GatedRepoError):
        fix = f"no such folder here; {fix}"
    return SpecError([Problem("model.path", fix, model.path)])


def cached_model(
    files: ModelFiles,
    cache_dir: Path,
    fill: Callable[[Path], None],
    *,
    variant: str | None = None,
) -> Path:
    """The model's folder in the cache; `fill` writes the files of a new one, in one process.

    A variant, such as another number format, has a folder of its own. A folder whose files differ
    from what was written, by the hashes beside them, is named in the log and written again.
    """
    folder = cache_dir / "models" / "-".join(filter(None, (files.id, variant)))
    if _is_whole(folder):
        return folder
    lock_file = cache_dir / "locks" / folder.name
    for each in (folder, lock_file):
        each.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the engines of a machine start together
        if _is_whole(folder):
            return folder
        beginning = f"{folder.name}.partial-"
        for left in folder.parent.glob(f"{beginning}*"):  # by a process that was killed
            shutil.rmtree(left)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=beginning))
        if folder.exists():
            os.replace(folder, partial)  # — who has mapped its files keeps them
            shutil.rmtree(partial)
            partial.mkdir()
        try:
            fill(partial)
            sums = "".join(f"{digest}  {name}\n" for name, digest in _file_hashes(partial).items())
            (partial / SUMS).write_text(sums, encoding="utf-8")
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if os.strerror(errno.ENOSPC) not in str(error):  # — safetensors has it as words alone
                raise
            raise StorageError(
                f"{folder}: the model cannot be written: the disk is full; free some space, or "
                f"name another folder in ASSAY_CACHE"
            ) from error
        publish_atomically(partial, folder)
        _whole.add(folder)
        return folder


_whole: set[Path] = set()  # folders that this process has checked


def _is_whole(folder: Path) -> bool:
    """Whether the files are those that were written. Each process reads them once for this."""
    if folder in _whole or not folder.exists():
        return folder in _whole
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
        written = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        present = _file_hashes(folder)
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s: the model is made again: %s", folder, error)
        return False
    if written != present:
        pairs = written.items() ^ present.items()
        differing = sorted({name for name, _ in pairs})
        what = ", ".join(differing)
        logger.warning("%s: %s is not what was written; the model is made again", folder, what)
        return False
    _whole.add(folder)
    return True


def _file_hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of the folder but the file of hashes itself, in order."""
    hashes = {}
    for file in sorted(folder.iterdir()):
        if file.name != SUMS:
            with file.open("rb") as stream:
                hashes[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def publish_atomically(partial: Path, folder: Path) -> Path:
    """Renames a complete folder; if another process was first, its folder is kept."""
    try:
        os.replace(partial, folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(partial)
    return folder
