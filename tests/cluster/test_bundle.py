"""The files of a submitted job: a spec that means the same elsewhere, and no secrets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cluster.submission import content_id, write_bundle
from pipeline.errors import SpecError
from pipeline.spec.parse import load_spec, parse_spec
from pipeline.spec.portable import portable_content

ODD = "yes\n'no': \U0001f642 \u2028 & *a {document}"


def test_the_uploaded_spec_is_the_spec(write_spec: Callable[..., Path], tmp_path: Path) -> None:
    spec = load_spec(
        write_spec(
            documents={"max_tokens": 7, "too_long": "chunk", "overlap_tokens": 3},
            prompt={
                "document": ODD,
                "examples": [{"document": "1", "question": "", "answer": ODD}],
            },
            storage_options={"anon": True, "config_kwargs": {"retries": {"max_attempts": 3}}},
            max_error_rate=0.00001,
        )
    )
    write_bundle(tmp_path, portable_content(spec, same_machine=False))
    assert load_spec(tmp_path / "spec.yaml") == spec


def test_the_uploaded_program_is_this_one_and_says_where_it_is_not_installed(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    write_bundle(tmp_path, portable_content(load_spec(write_spec()), same_machine=False))
    code = "import pipeline.spec; print(pipeline.spec.__file__)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    module = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert module.strip() == str(tmp_path / "pipeline" / "spec" / "__init__.py")
    # — without the folder of installed packages
    command = [sys.executable, "-S", "-m", "pipeline", "--help"]
    bare = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert bare.returncode == 1 and re.fullmatch(
        r"assay: No package metadata was found for .*; install .* on each node, as here\n",
        bare.stderr,
    )


def test_a_relative_path_is_followed_here_and_refused_elsewhere(
    write_spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    stages = [{"question": "q"}, {"question": "q", "model": {"path": "model"}}]
    task = {"name": "a", "labels": ["x", "y"], "cascade": {"stages": stages}}
    spec = load_spec(
        write_spec(
            input={"path": "in/*.jsonl"}, output="out", model={"path": "model"}, tasks=[task]
        )
    )
    content = portable_content(spec, same_machine=True)
    assert content["input"]["path"] == str(tmp_path / "in/*.jsonl")
    assert content["output"] == str(tmp_path / "out")
    stage = content["tasks"][0]["cascade"]["stages"][1]
    assert content["model"]["path"] == stage["model"]["path"] == str(tmp_path / "model")
    with pytest.raises(SpecError) as raised:
        portable_content(spec, same_machine=False)
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == [
        *("model.path", "input.path", "output", "tasks.0.cascade.stages.1.model.path")
    ]


def test_the_id_changes_with_what_is_asked_and_with_nothing_else(
    write_spec: Callable[..., Path],
) -> None:
    def id_of(**changes: object) -> str:
        return content_id(portable_content(load_spec(write_spec(**changes)), same_machine=True))

    tasks = [{"name": "toxic", "question": "Rude", "labels": ["Yes", "No"]}]
    ids = [id_of(), id_of(output="/elsewhere"), id_of(tasks=tasks), id_of(name="other")]
    # — the same words, of another place or another model's numbers
    endpoint = {"endpoint_url": "http://other:9000"}
    ids += [id_of(storage_options=endpoint), id_of(max_error_rate=0.5)]
    model, place = (
        portable_content(load_spec(write_spec()), same_machine=True)[k] for k in ("model", "input")
    )
    ids += [id_of(model={**model, "storage_options": endpoint})]
    ids += [id_of(input={**place, "storage_options": endpoint})]
    assert len(set(ids)) == 8
    content = portable_content(load_spec(write_spec()), same_machine=True)
    assert content_id(content, ["--sample=1%"]) != content_id(content) == ids[0]
    assert id_of() == id_of(filter={"keep": "toxic.label = 'clean'"}) == ids[0]


def stages_of(file: str) -> list[dict[str, object]]:
    return [{"readout": file}, {"classifier": {"kind": "onnx", "path": file}}, {"question": "q"}]


def test_small_files_that_a_task_names_go_along_and_their_content_counts(tmp_path: Path) -> None:
    readout = tmp_path / "toxic.safetensors"
    tasks = [
        {"name": "a", "readout": str(readout)},
        {"name": "c", "readout": "/nowhere/x"},
        {"name": "d", "classifier": {"kind": "onnx", "path": str(readout)}},
        {"name": "e", "cascade": {"stages": stages_of(str(readout))}},
    ]

    def bundle(weights: bytes) -> tuple[Path, dict[str, Any]]:
        readout.write_bytes(weights)
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return folder, write_bundle(folder, {"tasks": tasks})

    folder, bundled = bundle(b"weights")
    assert yaml.safe_load((folder / "spec.yaml").read_text()) == bundled
    a, c, d, e = bundled["tasks"]
    assert (folder / a["readout"]).read_bytes() == b"weights"
    assert c == tasks[1]
    assert d["classifier"] == {"kind": "onnx", "path": a["readout"]}
    assert e["cascade"] == {"stages": stages_of(a["readout"])}
    assert content_id(bundle(b"weights")[1]) == content_id(bundled)
    assert content_id(bundle(b"fitted again")[1]) != content_id(bundled)
    assert tasks[0] == {"name": "a", "readout": str(readout)}


def test_a_spec_without_a_model_is_uploaded_as_it_is(tmp_path: Path) -> None:
    content = {
        "name": "j",
        "input": {"path": str(tmp_path)},
        "output": "s3://bucket/out",
        "tasks": [{"name": "a", "labels": ["x", "y"], "classifier": {"kind": "onnx", "path": "m"}}],
    }
    spec = parse_spec(json.dumps(content))
    portable = portable_content(spec, same_machine=False)
    assert "model" not in portable and parse_spec(json.dumps(portable)) == spec


def test_the_folder_of_a_task_with_several_labels_is_uploaded(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    task = {"name": "t", "kind": "multi", "question": "{label}?", "labels": ["a", "b"]}
    (tmp_path / "readouts").mkdir()
    for label in task["labels"]:
        (tmp_path / "readouts" / f"{label}.json").write_text(f"fit of {label}")
    content = {"tasks": [task | {"readout": str(tmp_path / "readouts")}]}
    (to := tmp_path / "to").mkdir()
    (bundled,) = write_bundle(to, content)["tasks"]
    assert (to / bundled["readout"] / "a.json").read_text() == "fit of a"
    (tmp_path / "readouts" / "b.json").write_text("another fit")
    (again := tmp_path / "again").mkdir()
    assert write_bundle(again, content)["tasks"][0]["readout"] != bundled["readout"]


def test_the_gold_that_judges_a_run_is_uploaded(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    gold = tmp_path / "gold.csv"
    gold.write_text("id,toxic\na,toxic\n")
    publish = {"gates": ["toxic.f1 >= 0.5"]}
    spec = load_spec(write_spec(gold={"path": str(gold)}, publish=publish))
    (folder := tmp_path / "job").mkdir()
    bundled = write_bundle(folder, portable_content(spec, same_machine=True))
    assert (folder / bundled["gold"]["path"]).read_text() == gold.read_text()
    assert bundled["publish"] == publish


def test_an_output_that_is_gold_is_named_from_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (snapshot := tmp_path / "teacher" / "snapshots" / "00000001.json").parent.mkdir(parents=True)
    snapshot.write_text("{}")
    for path in ("teacher", "teacher/snapshots/00000001.json"):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        bundled = write_bundle(folder, {"tasks": [], "gold": {"path": path}})
        assert bundled["gold"]["path"] == str(tmp_path / path)
