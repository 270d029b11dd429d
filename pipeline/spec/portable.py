"""A spec for another machine or another working directory.

Entry points: `portable_content`, `shared_by_nodes` and `is_loopback`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import Problem, SpecError
from pipeline.spec.locations import split_prefix
from pipeline.spec.parse import spec_of
from pipeline.spec.schema import JobSpec


def portable_content(spec: JobSpec, *, same_machine: bool) -> dict[str, Any]:
    """The spec's content with absolute paths, for another working directory.

    SpecError for a relative path, unless the job runs on the same machine.
    """
    content: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    holders = {"model": content.get("model"), "input": content["input"], "": content}
    for index, task in enumerate(content["tasks"]):
        for number, stage in enumerate(stages_of(task)):
            holders[f"tasks.{index}.cascade.stages.{number}.model"] = stage.get("model")
    problems = []
    for name, holder in holders.items():
        if holder is None:
            continue
        key = "path" if name else "output"
        if holder.get("engine") == "openai":  # — its path is a name
            key = "api_key_file"
        if key not in holder:
            continue
        place = f"{name}.{key}" if name else key
        prefix, path = split_prefix(str(holder[key]))
        # — a model's path may also be a hub id
        is_file = path.endswith(".gguf") or Path(os.path.expanduser(path)).is_dir()
        is_hub_id = name.endswith("model") and key == "path" and not is_file
        if "://" in path or os.path.isabs(path) or is_hub_id:
            continue
        if not same_machine:
            fix = "is a folder of this machine; write a URL, or a path that every node has"
            problems.append(Problem(place, fix, path))
        holder[key] = prefix + os.path.abspath(os.path.expanduser(path))
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


def stages_of(task: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The stages of a task's cascade, in the content of a spec."""
    stages: Sequence[dict[str, Any]] = (task.get("cascade") or {}).get("stages", ())
    return stages


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address, for example the end of an SSH tunnel."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
