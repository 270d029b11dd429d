"""A readout is taken for the spec that it was fitted for, and refused by name for another."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import safetensors.numpy
from finished import toy_spec
from fitted import card_of, write_readout

from pipeline.errors import SpecError, StorageError
from pipeline.runtime.fitted_files import find_readouts, load_readouts
from pipeline.spec.fingerprint import fingerprints
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec

WEIGHTS = {"model.safetensors": "1", "tokenizer.json": "2"}
Make = Callable[..., JobSpec]


@pytest.fixture
def fitted(tmp_path: Path) -> Make:
    """A spec whose first task has a readout that fits it, with whatever is then changed."""

    def make(card: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
        path = tmp_path / "a.safetensors"
        own = {"name": "a", "question": None, "labels": ["x", "y"], "readout": str(path)}
        asked = {"name": "b", "question": "B?", "labels": ["p", "q"]}
        content = toy_spec(tmp_path, tasks=[own, asked])
        spec = parse_spec(json.dumps(content))
        was = card_of(spec, spec.tasks[0], weights=WEIGHTS, dtype="float32", **card or {})
        write_readout(path, was, hidden=4, layers=[1, 2])
        own.update(changes.pop("task", {}))
        return parse_spec(json.dumps({**content, **changes}))  # JSON is YAML without anchors

    return make


def problems_of(spec: JobSpec, **changes: Any) -> list[str]:
    """The problems with the spec's readouts."""
    with pytest.raises(SpecError) as caught:
        find_readouts(
            spec,
            Path(spec.tasks[0].readout or "").parent,
            **{"weights": WEIGHTS, "dtype": "float32", **changes},
        )
    return str(caught.value).splitlines()


def test_a_readout_that_fits_is_found_and_loaded_whole(fitted: Make, tmp_path: Path) -> None:
    spec = fitted()
    refs = find_readouts(spec, tmp_path, weights=WEIGHTS, dtype="float32")
    readout = load_readouts(refs, spec, tmp_path)["a"]
    tensors = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert list(refs) == ["a"]
    assert readout.layers == [1, 2]
    np.testing.assert_array_equal(readout.maps[1].weight, tensors["layer1.weight"])
    np.testing.assert_array_equal(readout.maps[2].bias, tensors["layer2.bias"])


@pytest.mark.parametrize(
    "card, changes, difference",
    [
        ({}, {"task": {"labels": ["y", "x"]}}, "labels: ['x', 'y']"),
        ({}, {"task": {"labels": ["x", "y", "z"]}}, "labels: ['x', 'y']"),
        ({}, {"task": {"question": "A?"}}, "question: None"),
        ({}, {"prompt": {"instruction": "Read."}}, "prompt.instruction: 'Read the text"),
        ({}, {"documents": {"max_tokens": 9}}, "documents.max_tokens: 2048"),
        ({}, {"documents": {"too_long": "tail"}}, "documents.too_long: 'head'"),
        ({}, {"model": {"path": "m", "dtype": "int8"}}, "model.dtype: int8: False"),
        ({}, {"model": {"path": "m", "dtype": "fp8"}}, "model.dtype: fp8: False"),
        ({}, {"model": {"path": "m", "kv": "int8"}}, "model.kv: 'none'"),
        (
            {"model": {"weights": {**WEIGHTS, "tokenizer.json": "3"}, "dtype": "float32"}},
            {},
            "version of the model's files: tokenizer.json",
        ),
        ({"model": {"weights": WEIGHTS, "dtype": "bfloat16"}}, {}, "model.dtype: 'bfloat16'"),
    ],
)
def test_a_readout_fitted_for_something_else_is_refused_by_what_differs(
    card: dict[str, Any], changes: dict[str, Any], difference: str, fitted: Make, tmp_path: Path
) -> None:
    (line,) = problems_of(fitted(card, **changes))
    path = tmp_path / "a.safetensors"
    assert line.startswith(
        f"tasks.0.readout: task 'a': the readout {path} was fitted with another {difference}"
    )


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    tensors = safetensors.numpy.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    card = json.loads(header["__metadata__"]["card"])
    if how == "cut off":
        path.write_bytes(data[:-5])
    elif how == "a pickle":
        path.write_bytes(pickle.dumps(tensors))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "no card":
        path.write_bytes(safetensors.numpy.save(tensors))
    else:
        if how == "not a number":
            tensors["layer1.weight"][0, 0] = np.nan
        elif how == "no bias":
            del tensors["layer1.bias"]
        elif how == "no such layer":
            card["layer"] = 7
        elif how == "a card of tomorrow":
            card["format"] = 2
        path.write_bytes(safetensors.numpy.save(tensors, metadata={"card": json.dumps(card)}))


@pytest.mark.parametrize(
    "how, reason",
    [
        ("cut off", "is not a safetensors file: "),
        ("a pickle", "is not a safetensors file with the card of a readout"),
        ("empty", "is not a safetensors file with the card of a readout"),
        ("no card", "is not a safetensors file with the card of a readout"),
        ("not a number", "layer1.weight or its bias has values that are not finite"),
        (
            "no bias",
            "layer1.weight and its bias do not have the shapes of the 2 labels of the card",
        ),
        ("no such layer", "its card names layer 7, but it has the layers [1, 2]"),
        ("a card of tomorrow", "its card is invalid: format: "),
    ],
)
def test_a_broken_file_is_one_line(how: str, reason: str, fitted: Make, tmp_path: Path) -> None:
    spec = fitted()
    damaged(tmp_path / "a.safetensors", how)
    (line,) = problems_of(spec)
    assert line.startswith(f"tasks.0.readout: {reason}")


def test_other_tensors_of_a_file_are_not_read(fitted: Make, tmp_path: Path) -> None:
    spec, path = fitted(), tmp_path / "a.safetensors"
    card = card_of(spec, spec.tasks[0], weights=WEIGHTS, dtype="float32")
    others = dict.fromkeys(("layer_norm.weight", "layer.weight", "layers1.weight"), np.ones(3))
    tensors = {**safetensors.numpy.load_file(path), **others}
    path.write_bytes(safetensors.numpy.save(tensors, metadata={"card": json.dumps(card)}))
    refs = find_readouts(spec, tmp_path, weights=WEIGHTS, dtype="float32")
    assert load_readouts(refs, spec, tmp_path)["a"].layers == [1, 2]


def test_a_readout_in_another_kind_of_store_is_not_given_the_outputs_options(
    fitted: Make, tmp_path: Path
) -> None:
    url = f"memory://{tmp_path.name}/a.safetensors"
    options = {"output": "s3://bucket/out", "storage_options": {"profile": "labels"}}
    spec = fitted(task={"readout": url}, **options)
    with fsspec.open(url, "wb") as file:
        file.write((tmp_path / "a.safetensors").read_bytes())
    refs = find_readouts(spec, tmp_path, weights=WEIGHTS, dtype="float32")
    for _ in range(2):
        assert load_readouts(refs, spec, tmp_path / "cache")["a"].layers == [1, 2]
        fsspec.url_to_fs(url)[0].store.clear()  # — the copy of the machine has the right hash
    with pytest.raises(SpecError, match=r"tasks\.0\.readout: the file cannot be read"):
        load_readouts(refs, spec, tmp_path / "of another machine")


def test_a_file_that_changed_since_it_was_found_is_not_used(fitted: Make, tmp_path: Path) -> None:
    spec = fitted()
    refs = find_readouts(spec, tmp_path, weights=WEIGHTS, dtype="float32")
    card = card_of(spec, spec.tasks[0], weights=WEIGHTS, dtype="float32")
    write_readout(tmp_path / "a.safetensors", card, hidden=4, layers=[1, 2], seed=1)
    with pytest.raises(StorageError, match="changed while the job ran; run again, with"):
        load_readouts(refs, spec, tmp_path)


def fps(spec: JobSpec, readouts: dict[str, str]) -> dict[str, str]:
    versions = fingerprints(spec, weights=WEIGHTS, dtype="float32", readouts=readouts)
    return {name: version.id for name, version in versions.items()}


def test_a_readout_is_part_of_its_own_tasks_fingerprint_alone(fitted: Make) -> None:
    one, other = fps(fitted(), {"a": "1"}), fps(fitted(), {"a": "2"})
    assert one["a"] != other["a"]
    assert one["b"] == other["b"]
