"""A model is found by path and named by content."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
from calls import Assay
from fake_hub import FakeHub, use_endpoint
from servers import Server

from pipeline.errors import AssayError, ModelError, SpecError, StorageError
from pipeline.runtime.model_cache import SUMS
from pipeline.runtime.weights import ModelFiles, fetch, locate
from pipeline.spec.model import ModelSpec


@dataclass(frozen=True)
class Place:
    """A model in one kind of place, which a test writes into."""

    path: str
    options: dict[str, Any]
    put: Callable[[Mapping[str, bytes]], object]  # all files of the model, and no others

    def locate(self, cache_dir: Path) -> ModelFiles:
        return locate(ModelSpec(path=self.path, storage_options=self.options), cache_dir)


@pytest.fixture(params=["folder", "s3", "hub"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "hub":
        hub: FakeHub = request.getfixturevalue("hub")
        return Place("org/tiny", {}, lambda files: hub.push("models/org/tiny", files))
    server: Server = request.getfixturevalue("moto")
    folder, options = str(tmp_path / "model"), {}
    if request.param == "s3":
        # — a secret is not in a spec: the environment has it
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret"])
        folder = server.new_url()
        options = {"endpoint_url": server.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    file_system, place = fsspec.url_to_fs(folder, **options)

    def put(files: Mapping[str, bytes]) -> None:
        if file_system.exists(place):
            file_system.rm(place, recursive=True)
        for name, data in files.items():
            file_system.makedirs(f"{place}/{name}".rpartition("/")[0], exist_ok=True)
            file_system.pipe_file(f"{place}/{name}", data)

    return Place(folder, options, put)


def in_memory(model_folder: Path, tmp_path: Path) -> tuple[str, Any, str]:
    """The URL of a copy of the model in a store of this process, the store, and the place in it."""
    url = f"memory://{tmp_path.name}/model"
    memory, place = fsspec.url_to_fs(url)
    memory.put(f"{model_folder}/", f"{place}/", recursive=True)
    return url, memory, place


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_model_is_its_content_in_a_folder_on_s3_and_on_the_hub(
    place: Place, model_folder: Path, tmp_path: Path
) -> None:
    """Files of other folders and a README belong to no model, whatever their names are."""
    files, cache = contents(model_folder), tmp_path / "cache"
    expected = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    beside = {"README.md": b"1", "onnx/config.json": b"{}", "onnx/model.safetensors": b"other"}
    place.put({**files, **beside})
    first = place.locate(cache)
    assert first.hashes == expected
    assert first.size_bytes == len(files["model.safetensors"])
    fetched = fetch(first, cache, place.options)
    assert {name: (fetched / name).read_bytes() for name in files} == files
    place.put({**files, **beside, "README.md": b"2", "onnx/config.json": b"{  }"})
    assert place.locate(cache).hashes == expected
    place.put({**files, "generation_config.json": b"{}"})
    assert place.locate(cache).id != first.id


def test_a_plan_reads_no_weights_that_the_hub_or_the_cache_has_the_hash_of(
    hub: FakeHub, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("models/org/tiny", contents(model_folder))
    locate(ModelSpec(path="org/tiny"), tmp_path / "cache")
    assert [line for line in hub.requests if "resolve" in line and "config.json" in line]
    assert not [line for line in hub.requests if "resolve" in line and "safetensors" in line]
    read: list[str] = []
    url, memory, place = in_memory(model_folder, tmp_path)
    get = type(memory).get_file
    monkeypatch.setattr(
        type(memory), "get_file", lambda self, *a: (read.append(a[0]), get(self, *a))
    )
    first = locate(ModelSpec(path=url), tmp_path / "cache")
    once = len(read)
    assert once == len(first.hashes)
    assert locate(ModelSpec(path=url), tmp_path / "cache") == first
    fetch(first, tmp_path / "cache", {})
    assert len(read) == once
    sums = "".join(f"{digest}  {name}\n" for name, digest in first.hashes.items())
    memory.pipe_file(f"{place}/{SUMS}", sums.encode())
    assert locate(ModelSpec(path=url), tmp_path / "another cache") == first
    assert len(read) == once
    memory.pipe_file(f"{place}/{SUMS}", sums.replace(sums[:4], "0000", 1).encode())
    wrong = locate(ModelSpec(path=url), tmp_path / "another cache")
    with pytest.raises(StorageError, match=r"is not what the run was planned with.*SHA256SUMS"):
        fetch(wrong, tmp_path / "another cache", {})


@pytest.mark.parametrize("verb", [["status"], ["run", "--dry-run"]])
def test_no_verb_that_only_plans_downloads_a_model(
    verb: list[str],
    write_spec: Callable[..., Path],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assay: Assay,
) -> None:
    url, memory, _ = in_memory(model_folder, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "get_file", lambda *_: pytest.fail("downloaded"))
        line = assay(*verb, write_spec(model={"path": url}), code=2).err.splitlines()[-1]
    assert line.startswith("model.path: the hashes of its files are not known here")
    assert "run `assay check` once" in line and url in line
    spec = write_spec(model={"path": url, "dtype": "float32"})
    locate(ModelSpec(path=url), tmp_path / "cache")  # as `assay check` does
    assay("status", spec)


def test_a_worker_refuses_files_that_the_plan_did_not_name(
    place: Place, model_folder: Path, tmp_path: Path
) -> None:
    """The driver and the worker are two machines: each has a cache of its own."""
    files = contents(model_folder)
    place.put(files)
    planned = place.locate(tmp_path / "driver")
    if planned.kind == "hub":  # — a commit does not change; its copy on this machine may
        copy = fetch(planned, tmp_path / "worker", {}) / "config.json"
        os.utime(copy.resolve(), (0, 0))
        copy.resolve().write_bytes(b"{}")
    else:
        place.put({**files, "config.json": b"{}"})
    with pytest.raises(StorageError, match=r"config\.json (on this machine is not what|changed)"):
        fetch(planned, tmp_path / "worker", place.options)


def test_a_model_that_is_replaced_while_it_is_fetched_is_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, memory, place = in_memory(model_folder, tmp_path)
    get = type(memory).get_file

    def replacing(self: Any, source: str, target: str) -> None:
        get(self, source, target)
        self.pipe_file(f"{place}/config.json", b"{}")

    monkeypatch.setattr(type(memory), "get_file", replacing)
    with pytest.raises(StorageError, match=r"config\.json changed while the job ran"):
        locate(ModelSpec(path=url), tmp_path / "cache")


def test_a_store_that_does_not_answer_now_is_asked_again_later(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr("pipeline.runtime.weights.retry", lambda call: call())
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", away)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    for path in ("memory://model", "org/tiny"):
        with pytest.raises(AssayError, match="run again to go on") as raised:
            locate(ModelSpec(path=path), tmp_path)
        assert raised.value.exit_code == 3, path


def test_processes_that_start_together_fetch_a_model_once(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight engines of a machine: each file is fetched by one of them, and all read it whole."""
    files = locate(ModelSpec(path=f"file://{model_folder}"), tmp_path / "driver")
    local = type(fsspec.filesystem("file"))
    get, fork = local.get_file, multiprocessing.get_context("fork")
    together = fork.Barrier(8)

    def counted(self: Any, source: str, *others: Any) -> None:
        time.sleep(0.05)  # — as a store far away: without a lock, all would fetch now
        with (tmp_path / "fetched").open("a") as log:
            log.write(f"{source}\n")
        get(self, source, *others)

    monkeypatch.setattr(local, "get_file", counted)

    def start() -> None:
        together.wait()
        fetch(files, tmp_path / "cache", {})

    engines = [fork.Process(target=start) for _ in range(8)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()
    assert [engine.exitcode for engine in engines] == [0] * 8
    fetched = (tmp_path / "fetched").read_text().split()
    assert len(fetched) == len(set(fetched)) == len(files.hashes)


def test_a_folder_that_is_gone_on_the_worker_is_a_model_error(
    model_folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    files = locate(ModelSpec(path=str(copy)), tmp_path / "cache")
    shutil.rmtree(copy)
    with pytest.raises(ModelError, match="not on this machine"):
        fetch(files, tmp_path / "cache", {})


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("no/such.gguf", "there is no such file"),
        (".", "holds no .safetensors file"),
        ("file:///nowhere/model", "no .safetensors file is in it"),
        ("nosuchprotocol://model", "cannot be opened"),
    ],
)
def test_a_path_that_names_no_model_is_a_spec_error(path: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=fix):
        locate(ModelSpec(path=path), tmp_path / "cache")
