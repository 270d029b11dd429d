"""`make` takes PyTorch's build for CPUs from its own index, or else the build that PyPI has."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from jobs import torch_index

BUILD = "torch-2.13.0+cpu"
PYPI = "torch-2.13.0"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def put_wheel(index: Path, name: str) -> None:
    """An index of packages with one wheel, which has no content."""
    folder = index / "torch"
    folder.mkdir(parents=True)
    file = f"{name}-py3-none-any.whl"
    version = name.removeprefix("torch-")
    info = f"{name}.dist-info"
    with zipfile.ZipFile(folder / file, "w") as wheel:
        wheel.writestr("torch/__init__.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{file.replace("+", "%2B")}">{file}</a>')


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    put_wheel(tmp_path / "web/pypi", PYPI)
    put_wheel(tmp_path / "web/cpu", BUILD)
    handler = partial(Quiet, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def installed(server: str, options: list[str], target: Path) -> list[str]:
    """What pip installs with these options, where `server` has PyPI."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps"]
    pip += ["--index-url", f"{server}/pypi", "--target", str(target), *options, "torch==2.13.0"]
    subprocess.run(pip, check=True, env=own | {"PIP_CONFIG_FILE": os.devnull}, timeout=60)
    return [folder.name.removesuffix(".dist-info") for folder in target.glob("*.dist-info")]


def test_without_a_gpu_the_build_for_cpus_is_installed_and_else_that_of_pypi(
    server: str, tmp_path: Path
) -> None:
    options, words = torch_index.options(f"{server}/cpu", driver=str(tmp_path / "none"))
    assert "2.2 GB" in words
    assert installed(server, options, tmp_path / "cpu") == [BUILD]
    assert installed(server, [], tmp_path / "pypi") == [PYPI]


@pytest.mark.parametrize("is_reached", [True, False], ids=["a GPU", "no index"])
def test_with_a_gpu_or_without_its_index_pip_takes_what_pypi_has(
    is_reached: bool, server: str, tmp_path: Path
) -> None:
    index, driver = (
        (f"{server}/cpu", tmp_path) if is_reached else (f"{server}/away", tmp_path / "no")
    )
    options, words = torch_index.options(index, driver=str(driver))
    assert "6.8 GB" in words and is_reached == ("404" not in words)
    assert options == []


def test_a_name_that_is_no_url_is_an_index_that_is_not_reached(tmp_path: Path) -> None:
    assert torch_index.options("here", driver=str(tmp_path / "no"))[0] == []
