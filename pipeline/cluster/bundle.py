"""The upload of a submitted job: its spec, the files that it names, and this program.

Entry points: `content_id`, `write_bundle`. The nodes have what assay needs.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.hashes import sha256_hex
from pipeline.spec.portable import stages_of

SPEC_FILE = "spec.yaml"
_PACKAGE = Path(__file__).parents[1]


def content_id(bundled: Mapping[str, Any], flags: Sequence[str] = ()) -> str:
    """16 hex digits of what a run depends on: its flags, and the spec as uploaded, but its filter.

    The name of a fitted file has the hash of its content: after a new fit the same spec is another
    run.
    """
    hashed = {**{key: value for key, value in bundled.items() if key != "filter"}, "flags": flags}
    return sha256_hex(json.dumps(hashed, sort_keys=True).encode(), 16)


def write_bundle(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the job's working directory: the spec, the files that it names, and the program.

    Returns the spec's content as it is uploaded.
    """
    bundled = {**content, "tasks": [_with_files(task, folder) for task in content["tasks"]]}
    gold = content.get("gold", {})
    if path := gold.get("path"):
        # — of another run, the whole output, of which the path may name a snapshot
        output, *snapshot = re.split(r"/(?=snapshots/\d+\.json$)", os.path.expanduser(path))
        if name := _copied(Path(output), folder):
            bundled["gold"] = {**gold, "path": "/".join([name, *snapshot])}
    written = yaml.dump(bundled, Dumper=_PlainDumper, sort_keys=False, allow_unicode=False)
    (folder / SPEC_FILE).write_text(written, encoding="utf-8")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(_PACKAGE, folder / _PACKAGE.name, ignore=ignored)
    return bundled


def _with_files(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The task with the local files that it names copied into the folder."""
    changed: dict[str, Any] = copy.deepcopy(dict(task))
    for own in (changed, *stages_of(changed)):
        for holder, key in ((own, "readout"), (own.get("classifier"), "path")):
            if holder and (name := holder.get(key)):
                holder[key] = _copied(Path(os.path.expanduser(name)), folder) or name
    return changed


def _copied(path: Path, folder: Path) -> str | None:
    """The name of the copy of a file, or of a folder of files; None where there is neither."""
    if not path.exists():
        return None
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    own = [file for file in files if file.is_file()]
    hashes = [str(file.relative_to(path.parent)) + sha256_hex(file.read_bytes()) for file in own]
    name = f"{sha256_hex(''.join(hashes).encode(), 16)}-{path.name}"
    if path.is_dir():
        shutil.copytree(path, folder / name, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, folder / name)
    return name


class _PlainDumper(yaml.SafeDumper):
    """YAML without anchors, which a spec must not have."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
