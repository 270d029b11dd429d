"""`check` fetches a model once, whole; a model that cannot be had is one line.

The Hub here is a stand-in on this machine (`fake_hub`): the real one cannot be reached by a test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, use_endpoint

from pipeline.cli import main

REPO = "models/org/tiny"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def checked(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """What `assay check` prints of a model."""

    def check(**model: Any) -> dict[str, Any]:
        words = ["check", str(write_spec(model=model)), "--documents", "0", "--json"]
        assert main(words) == 0
        shown: dict[str, Any] = json.loads(capsys.readouterr().out)["model"]
        return shown

    return check


@pytest.fixture
def failing(
    write_spec: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The exit code of a verb for a model, and its one line."""

    def fail(**model: Any) -> tuple[int, str]:
        code = main(["check", str(write_spec(model=model))])
        lines = capsys.readouterr().err.splitlines()
        return code, next(iter(line for line in lines if "model" in line or "tiny" in line))

    return fail


def push(hub: FakeHub, folder: Path) -> str:
    return hub.push(REPO, {file.name: file.read_bytes() for file in folder.iterdir()})


def test_a_model_of_the_hub_is_fetched_once_and_then_there_without_a_network(
    hub: FakeHub,
    model_folder: Path,
    checked: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push(hub, model_folder)
    first = checked(path="org/tiny")
    files = [file for file in model_folder.iterdir() if file.suffix in (".json", ".safetensors")]
    for file in files:
        assert (Path(first["path"]) / file.name).read_bytes() == file.read_bytes()
    fetched = [request for request in hub.requests if request.startswith("GET /org/tiny/resolve")]
    assert fetched
    assert checked(path="org/tiny") == first
    assert [r for r in hub.requests if r.startswith("GET /org/tiny/resolve")] == fetched
    use_endpoint(monkeypatch, NOBODY)
    assert checked(path="org/tiny") == first


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_weights_that_are_not_whole_are_named(
    model_folder: Path, tmp_path: Path, kept: float, failing: Callable[..., tuple[int, str]]
) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * kept)])
    code, line = failing(path=str(tmp_path / "model"))
    assert code == 1 and line.startswith(f"assay: {weights}: is not whole: ")


def test_a_file_of_weights_that_is_missing_is_noticed(
    model_folder: Path, tmp_path: Path, failing: Callable[..., tuple[int, str]]
) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    index = {"weight_map": {"lm_head.other": "model-00002.safetensors"}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    code, line = failing(path=str(tmp_path / "model"))
    assert code == 1 and "model-00002.safetensors: lm_head.other of model.safetensors" in line


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"path": "org/none"}, "model.path: no such folder here; no such repository on the Hub; "),
        ({"path": "org/tiny", "revision": "v9"}, "model.revision: the repository on the Hub has "),
        ({"path": "a/b/c"}, "model.path: no such folder here; not a name on the Hub either; "),
        ({"path": "org/pickled"}, "model.path: the repository on the Hub holds no .safetensors "),
        ({"path": "org/gated"}, "model.path: gated on the Hub; accept its terms at http"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_one_line_and_exit_2(
    hub: FakeHub,
    model: dict[str, str],
    line: str,
    failing: Callable[..., tuple[int, str]],
) -> None:
    hub.push(REPO, {"model.safetensors": b"x"})
    hub.push("models/org/pickled", {"model.bin": b"x"})
    hub.push("models/org/gated", {"model.safetensors": b"x", "config.json": b"{}"})
    hub.gated.add("models/org/gated")
    code, shown = failing(**model)
    assert code == 2 and shown.startswith(line) and shown.count("got ") == 1


def test_a_hub_out_of_reach_is_one_line_and_exit_3(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, failing: Callable[..., tuple[int, str]]
) -> None:
    use_endpoint(monkeypatch, NOBODY)
    code, line = failing(path="org/tiny")
    assert code == 3
    assert line.startswith(
        f"assay: model.path: no such folder here; the Hub at {NOBODY} cannot be reached"
    )
    assert "check the network, or set HF_ENDPOINT to a mirror, or write the path of a " in line
