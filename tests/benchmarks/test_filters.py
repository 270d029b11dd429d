"""The benchmark of filters runs on few documents, and every module of benchmarks is imported."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import filters

# Engines of their own environments, which only the process of a peer imports.
PEERS = {
    "openvino": "openvino_genai",
    "vllm": "vllm",
    "llama_cpp": "llama_cpp",
}


@pytest.mark.slow
def test_each_command_is_timed_on_few_documents(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["filters", "--documents", "60"])
    filters.main()
    first, *commands, page = capsys.readouterr().out.splitlines()
    assert first == "60 documents in 1 shards of two tasks"
    assert len(commands) == 3 and all("documents/s, peak" in line for line in commands)
    assert page.startswith("the page has")


@pytest.mark.parametrize(
    "name",
    [
        ".".join(file.relative_to(Path(filters.__file__).parents[1]).with_suffix("").parts)
        for file in sorted(Path(filters.__file__).parent.rglob("*.py"))
        if file.name != "__init__.py"
    ],
)
def test_every_module_is_imported_where_its_engine_is_installed(name: str) -> None:
    if engine := PEERS.get(name.rpartition(".")[2]):
        pytest.importorskip(engine)
    assert import_module(name).__doc__
