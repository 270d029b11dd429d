"""`check` fetches a model once, whole; a model that is not available is one line.

The Hub here is a stand-in on this machine (`fake_hub`): the real one cannot be reached by a test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import Assay, WriteSpec
from fake_hub import FakeHub, use_endpoint

REPO = "models/org/tiny"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def failing(write_spec: WriteSpec, assay: Assay) -> Callable[..., str]:
    """The one line of `assay check` for a model, with this exit code."""

    def fail(code: int, **model: Any) -> str:
        lines = assay("check", write_spec(model=model), code=code).err.splitlines()
        return next(iter(line for line in lines if "model" in line or "tiny" in line))

    return fail


def test_a_model_of_the_hub_is_fetched_once_and_then_there_without_a_network(
    hub: FakeHub,
    model_folder: Path,
    write_spec: WriteSpec,
    assay: Assay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def checked() -> Any:
        spec = write_spec(model={"path": "org/tiny"})
        return assay("check", spec, "--documents", 0, "--json").json["model"]

    hub.push(REPO, {file.name: file.read_bytes() for file in model_folder.iterdir()})
    first = checked()
    files = [file for file in model_folder.iterdir() if file.suffix in (".json", ".safetensors")]
    for file in files:
        assert (Path(first["path"]) / file.name).read_bytes() == file.read_bytes()
    fetched = [request for request in hub.requests if request.startswith("GET /org/tiny/resolve")]
    assert fetched
    assert checked() == first
    assert [r for r in hub.requests if r.startswith("GET /org/tiny/resolve")] == fetched
    use_endpoint(monkeypatch, NOBODY)
    assert checked() == first


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
    hub: FakeHub, model: dict[str, str], line: str, failing: Callable[..., str]
) -> None:
    hub.push(REPO, {"model.safetensors": b"x"})
    hub.push("models/org/pickled", {"model.bin": b"x"})
    hub.push("models/org/gated", {"model.safetensors": b"x", "config.json": b"{}"})
    hub.gated.add("models/org/gated")
    shown = failing(2, **model)
    assert shown.startswith(line) and shown.count("got ") == 1


def test_a_hub_out_of_reach_is_one_line_and_exit_3(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, failing: Callable[..., str]
) -> None:
    use_endpoint(monkeypatch, NOBODY)
    line, start = failing(3, path="org/tiny"), "assay: model.path: no such folder here; the Hub at"
    assert line.startswith(f"{start} {NOBODY} cannot be reached")
    assert "check the network, or set HF_ENDPOINT to a mirror, or write the path of a " in line
