"""A spec for the workers of a cluster, and addresses that only this machine can reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import SpecError
from pipeline.spec.parse import load_spec
from pipeline.spec.portable import is_loopback, shared_by_nodes


@pytest.mark.parametrize("key", ["input", "output", "model"])
@pytest.mark.parametrize("address", ["10.0.0.1:6379", "head.example:6379"])
def test_a_relative_path_is_refused_where_workers_run_on_other_machines(
    key: str,
    address: str,
    write_spec: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would read and write in the working directory of `ray start`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    paths = {"input": "/in", "output": "/out", "model": "s3://b/model"}
    paths[key] = "model"
    changes: dict[str, Any] = {**paths, "input": {"path": paths["input"]}}
    spec = load_spec(write_spec(**{**changes, "model": {"path": paths["model"]}}))
    with pytest.raises(SpecError, match="is a folder of this machine; write a URL, or a path that"):
        shared_by_nodes(spec, address)
    for local in ("auto", "127.0.0.1:6379", "localhost:6379", "[::1]:6379"):
        assert str(tmp_path / "model") in shared_by_nodes(spec, local).model_dump_json()
    assert shared_by_nodes(spec, None) is spec


@pytest.mark.parametrize("prefix", ["delta+", "lance+"])
def test_the_folder_of_a_table_is_absolute_behind_its_prefix(
    prefix: str, write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = f"{prefix}tables/docs@3"
    relative = load_spec(write_spec(output="/out", input={"path": path}))
    absolute = f"{prefix}{tmp_path}/tables/docs@3"
    assert shared_by_nodes(relative, "auto").input.path == absolute
    spec = load_spec(write_spec(output="/out", input={"path": absolute}))
    assert shared_by_nodes(spec, "10.0.0.1:6379").input.path == absolute
    with pytest.raises(SpecError, match=r"input.path: is a folder of this machine"):
        shared_by_nodes(relative, "10.0.0.1:6379")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("http://127.0.0.1:8265", True),
        ("http://127.9.9.9", True),
        ("http://localhost:8265", True),
        ("https://[::1]:8265/", True),
        ("http://10.0.0.1:8265", False),
        ("http://0.0.0.0:8265", False),
        ("http://127.0.0.1.example.org", False),
        ("http://localhost.example.org", False),
        ("http://head:8265", False),
        ("http://127.0.0.1@head:8265", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
