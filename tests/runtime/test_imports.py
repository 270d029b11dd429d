"""Threads sleep at barriers, and a process imports what it needs, quickly."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from pipeline.runtime.imports import PASSIVE, UNUSED, quick_imports, wait_passively


def test_threads_sleep_at_barriers() -> None:
    environment: dict[str, str] = {"OMP_NUM_THREADS": "1"}
    wait_passively(environment)
    assert environment == {"OMP_NUM_THREADS": "1", **PASSIVE}


@pytest.mark.parametrize("name", PASSIVE)
def test_a_user_s_own_setting_is_kept_alone(name: str) -> None:
    environment = {name: "7"}
    wait_passively(environment)
    assert environment == {name: "7"}


@pytest.fixture
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_collected_after_imports_as_before(collecting: None, before: bool) -> None:
    if not before:
        gc.disable()
    with pytest.raises(ImportError), quick_imports():
        assert not gc.isenabled()
        importlib.import_module("no_such_module")
    assert gc.isenabled() is before


def test_an_unused_package_is_hidden_until_the_imports_end() -> None:
    name = "this"  # of the standard library; nothing imports it
    with quick_imports(name, "json"):
        assert find_spec(name) is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
        assert importlib.import_module("json") is json, "it was imported before"
    assert name not in sys.modules and find_spec(name) is not None
    assert sys.modules["json"] is json


WORKER = """
import json, sys
import pipeline.runtime.graph as graph

graph._worker_module()
loaded = [name for name in ("torch", "transformers", *sys.argv[1:]) if name in sys.modules]
import scipy.optimize
print(json.dumps([loaded, "scipy.optimize" in sys.modules]))
"""


def test_a_worker_imports_neither_torchao_nor_scipy_and_can_do_so_later() -> None:
    command = [sys.executable, "-c", WORKER, *UNUSED]
    assert json.loads(subprocess.check_output(command, text=True)) == [
        ["torch", "transformers"],
        True,
    ]
