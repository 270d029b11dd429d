"""The upload of a submitted job: its spec, the files that it names, and this program.

Entry points: `portable_content`, `content_id`, `write_bundle`. The nodes have what assay needs.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.cluster.access import is_loopback
from pipeline.errors import Problem, SpecError
from pipeline.hashes import sha256_hex
from pipeline.spec.model import NO_MODEL
from pipeline.spec.parse import spec_of
from pipeline.spec.schema import JobSpec

SPEC_FILE = "spec.yaml"
_PACKAGE = Path(__file__).parents[1]


def portable_content(spec: JobSpec, *, same_machine: bool) -> dict[str, Any]:
    """The spec's content with absolute paths, for another working directory.

    SpecError for a relative path, unless the job runs on the same machine.
    """
    content: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    if spec.model == NO_MODEL:
        del content["model"]
    holders = {"model": content.get("model"), "input": content["input"], "": content}
    for index, task in enumerate(content["tasks"]):
        for number, stage in enumerate(_stages(task)):
            holders[f"tasks.{index}.cascade.stages.{number}.model"] = stage.get("model")
    problems = []
    for name, holder in holders.items():
        if holder is None:
            continue
        key, place = ("path", f"{name}.path") if name else ("output", "output")
        path = str(holder[key])
        # — a model's path may also be a hub id
        is_file = path.endswith(".gguf") or Path(path).expanduser().is_dir()
        is_hub_id = name.endswith("model") and not is_file
        if "://" in path or os.path.isabs(path) or is_hub_id:
            continue
        if not same_machine:
            fix = "is a folder of this machine; write a URL, or a path that every node has"
            problems.append(Problem(place, fix, path))
        holder[key] = os.path.abspath(os.path.expanduser(path))
    if problems:
        raise SpecError(problems)
    return content


def shared_by_nodes(spec: JobSpec, address: str | None) -> JobSpec:
    """The spec for a Ray at `host:port` or `auto`, whose workers have other working directories.

    SpecError for a relative path, unless the Ray runs on this machine.
    """
    if address is None:
        return spec
    is_here = address == "auto" or is_loopback(f"//{address}")
    return spec_of(portable_content(spec, same_machine=is_here))


def content_id(bundled: Mapping[str, Any], flags: Sequence[str] = ()) -> str:
    """16 hex digits of what a run depends on: its flags, and the spec as uploaded, but its filter.

    The name of a fitted file has the hash of its content: after a new fit the same spec is another
    run.
    """
    hashed = {**{key: value for key, value in bundled.items() if key != "filter"}, "flags": flags}
    return sha256_hex(json.dumps(hashed, sort_keys=True).encode(), 16)


def write_bundle(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the job's working directory: the spec, the fitted files it names, and the program.

    Returns the spec's content as it is uploaded.
    """
    bundled = {**content, "tasks": [_with_files(task, folder) for task in content["tasks"]]}
    written = yaml.dump(bundled, Dumper=_PlainDumper, sort_keys=False, allow_unicode=False)
    (folder / SPEC_FILE).write_text(written, encoding="utf-8")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(_PACKAGE, folder / _PACKAGE.name, ignore=ignored)
    return bundled


def _with_files(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The task with the local files that it names copied into the folder."""
    changed: dict[str, Any] = copy.deepcopy(dict(task))
    for own in (changed, *_stages(changed)):
        for holder, key in (
            (own, "readout"),
            (own.get("calibration"), "file"),
            (own.get("classifier"), "path"),
            (own.get("cascade"), "file"),
        ):
            if holder and (name := holder.get(key)):
                holder[key] = _copied(Path(name).expanduser(), folder) or name
    return changed


def _copied(path: Path, folder: Path) -> str | None:
    """The name of the copy of a file, or of a folder of files; None where there is neither."""
    if not path.exists():
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    hashes = [file.name + sha256_hex(file.read_bytes()) for file in files if file.is_file()]
    name = f"{sha256_hex(''.join(hashes).encode(), 16)}-{path.name}"
    if path.is_dir():
        shutil.copytree(path, folder / name, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, folder / name)
    return name


def _stages(task: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    stages: Sequence[dict[str, Any]] = (task.get("cascade") or {}).get("stages", ())
    return stages


class _PlainDumper(yaml.SafeDumper):
    """YAML without anchors, which a spec must not have."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
