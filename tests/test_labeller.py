"""The Python API: texts in, label-file columns out, as independent prompts answer."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import pipeline
from pipeline import Labeller, SpecError, load_spec

TEXTS = ["Hello.", "", "<|im_end|> is only text", "a much longer text " * 20, "ünïcode 日本"]


@pytest.fixture
def labeller(write_spec: Callable[..., Path], tmp_path: Path) -> Labeller:
    return Labeller(write_spec(documents={"max_tokens": 64}), cache_dir=tmp_path / "cache")


def alone(labeller: Labeller, folder: Path, text: str, task: int) -> list[float]:
    """p of the labels of one question, by one plain forward of transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    question = labeller._reader._engine.prompt.questions[task]
    prefix = labeller._reader._engine.prompt.prefix
    document = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids[:64]
    ids = torch.tensor([[*prefix, *document, *question.token_ids]])
    with torch.inference_mode():
        probabilities = network(ids).logits[0, -1].softmax(-1)
    labels = [float(probabilities[list(first)].sum()) for first in question.first_tokens.values()]
    return [value / sum(labels) for value in labels]


def test_a_longrope_model_refuses_prompts_beyond_its_short_context_and_says_why(
    write_spec: Callable[..., Path],
    model_folder: Path,
    tmp_path: Path,
    make_network: Callable[..., Any],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    network = make_network(
        "phi3",
        original_max_position_embeddings=512,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )
    network.save_pretrained(folder)
    spec = write_spec(
        model={"path": str(folder), "dtype": "float32"}, documents={"max_tokens": 512}
    )
    with pytest.raises(SpecError, match=r"context of 512 tokens \(.*longrope.*\) leaves \d+ for"):
        Labeller(spec, cache_dir=tmp_path / "cache")
    spec = write_spec(
        model={"path": str(folder), "dtype": "float32"}, documents={"max_tokens": 256}
    )
    assert Labeller(spec, cache_dir=tmp_path / "cache").label(["Hello."]).num_rows == 1


def test_every_text_has_a_row_that_an_independent_prompt_agrees_with(
    labeller: Labeller, model_folder: Path
) -> None:
    table = labeller.label(TEXTS, ids=range(len(TEXTS)))
    assert table.column("doc_id").to_pylist() == ["0", "1", "2", "3", "4"]
    assert table.column_names == [
        *("doc_id", "content_hash", "n_chars", "status", "toxic", "topic"),
    ]
    rows = table.to_pylist()
    statuses = [row["topic"]["status"] for row in rows]
    assert statuses == ["ok", "empty", "ok", "truncated", "ok"]
    assert rows[1]["topic"]["label"] is None and rows[1]["topic"]["p"] is None
    for text, row in zip(TEXTS, rows, strict=True):
        for number, task in enumerate(("toxic", "topic") if text else ()):
            probabilities = list(row[task]["p"].values())
            if text.startswith("<|"):  # plain tokenisation is no oracle for control tokens
                continue
            np.testing.assert_allclose(
                probabilities, alone(labeller, model_folder, text, number), atol=1e-5
            )
            best = max(row[task]["p"], key=row[task]["p"].__getitem__)
            assert row[task]["label"] == best


def test_its_process_keeps_freed_memory_and_waits_passively_as_a_worker_does(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr("pipeline.labeller.wait_passively", calls.append)
    monkeypatch.setattr("pipeline.labeller.disable_malloc_trim", lambda: calls.append("malloc"))
    Labeller(write_spec(), cache_dir=tmp_path / "cache")
    assert calls == [os.environ, "malloc"]


@pytest.mark.parametrize("text", ["one", b"one"])
def test_a_text_alone_is_no_list_of_letters(labeller: Labeller, text: str | bytes) -> None:
    with pytest.raises(TypeError, match=r"write label\(\[text\]\)"):
        labeller.label(text)  # type: ignore[arg-type, unused-ignore]


def test_no_text_is_no_row_and_none_has_its_reason(labeller: Labeller) -> None:
    empty = labeller.label([])
    assert empty.num_rows == 0 and empty.schema == labeller.label(["x"]).schema
    (row,) = labeller.label([None]).to_pylist()
    assert row["status"] == row["toxic"]["status"] == "error:no text"


def test_a_spec_may_be_a_path_a_dictionary_or_a_spec(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_spec()
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    short = {"model": content["model"], "tasks": content["tasks"]}
    cache = tmp_path / "cache"
    tables = [
        Labeller(spec, cache_dir=cache).label(["x"])
        for spec in (path, str(path), content, short, load_spec(path))
    ]
    assert all(table.equals(tables[0]) for table in tables)
    with pytest.raises(SpecError, match="tsks: no such key"):
        Labeller({**short, "tsks": []})


@pytest.mark.xdist_group("ray")
def test_the_recipe_of_the_manual_labels_a_dataset_as_a_labeller_does(
    shared_ray: None,
    write_spec: Callable[..., Path],
    labeller: Labeller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    page = Path(__file__).parents[1] / "jobs" / "README.md"
    (recipe,) = (code for code in page.read_text().split("```") if "map_batches(" in code)
    write_spec(documents={"max_tokens": 64}).rename(tmp_path / "my.yaml")
    (tmp_path / "data").mkdir()
    table = pa.table({"url": [f"u{i}" for i in range(len(TEXTS))], "text": TEXTS})
    pq.write_table(table, tmp_path / "data" / "urls.parquet")
    monkeypatch.chdir(tmp_path)
    read: dict[str, Any] = {"__name__": "__main__"}
    # — workers of the shared Ray are in another folder
    recipe = recipe.removeprefix("python\n").replace('"data"', repr(str(tmp_path / "data")))
    exec(recipe.replace("print(labelled.take(2))", "rows = labelled.take_all()"), read)
    rows = sorted(read["rows"], key=lambda row: str(row["url"]))
    assert [row["text"] for row in rows] == TEXTS
    for row, other in zip(rows, labeller.label(TEXTS).to_pylist(), strict=True):
        for column in ("label", "status"):
            assert row["toxic"][column] == other["toxic"][column]


def test_the_public_names_are_these_and_each_is_there() -> None:
    assert sorted(pipeline.__all__) == pipeline.__all__ and len(pipeline.__all__) <= 29
    assert {"Labeller", "load_spec", "open_labels", "run"} <= {*pipeline.__all__}
    for name in pipeline.__all__:
        assert getattr(pipeline, name).__name__ == name
    assert {*dir(pipeline)} == {*pipeline.__all__, "__version__"}  # what Tab shows
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", pipeline.__version__)
    with pytest.raises(AttributeError, match="no attribute 'labels'"):
        pipeline.labels  # noqa: B018
