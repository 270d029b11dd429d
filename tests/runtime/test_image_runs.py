"""A spec whose documents are images: the same ledger, resume, statuses, filter and commands."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import ONE_PROCESS, WITH_MODEL, assay
from PIL import Image
from scipy.special import softmax
from vision import encoded_picture, save_vision_model

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.inference.alternatives import answers_alone
from pipeline.inference.images import ImageDocument
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.loading import load_model, load_tokenizer
from pipeline.labeller import Labeller
from pipeline.ledger.dataset import open_labels
from pipeline.spec.parse import load_spec

TASKS = [
    {"name": "animal", "question": "Is it an animal?", "labels": ["Yes", "No"]},
    {"name": "kind", "question": "Which?", "labels": ["dog", "door", "cat"], "scoring": "full"},
]

LABELS = {"name": "a", "labels": ["x", "y"]}


def animated() -> bytes:
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 99, 200)]
    sink = io.BytesIO()
    frames[0].save(sink, "GIF", save_all=True, append_images=frames[1:])
    return sink.getvalue()


def deep_grey() -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8)).save(sink, "PNG")
    return sink.getvalue()


# Image, text, and the status of the row.
ROWS: list[tuple[bytes | None, str, str]] = [
    (encoded_picture(40, 30, 1), "", "ok"),
    (encoded_picture(64, 20, 2), "A picture.", "ok"),
    (encoded_picture(33, 70, 3, "JPEG"), "x" * 200, "truncated"),
    (encoded_picture(40, 30, 1), "", "ok"),  # again
    (None, "text alone", "error:no image"),
    (b"no image", "", "error:the image is none of PNG, JPEG, WEBP, GIF, BMP, TIFF"),
    (encoded_picture(50, 50, 4)[:400], "", "error:the image cannot be decoded: "),
    (animated(), "", "error:the image is animated: 3 frames"),
    (deep_grey(), "", "error:the image has the mode I;16; convert it to RGB"),
]

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


@pytest.fixture
def write(seeing: Path, tmp_path: Path) -> Write:
    """Writes the corpus and a spec with changes."""

    def write_spec(**changes: Any) -> Path:
        images, texts, _ = zip(*ROWS, strict=True)
        ids = [str(row) for row in range(len(ROWS))]
        table = pa.table({"id": ids, "image": pa.array(images, pa.binary()), "caption": texts})
        (tmp_path / "in").mkdir(exist_ok=True)
        if not list((tmp_path / "in").iterdir()):
            pq.write_table(table, tmp_path / "in" / "a.parquet")
        content = {
            "name": "job",
            "model": {"path": str(seeing), "dtype": "float32"},
            "input": {
                "path": str(tmp_path / "in"), "image": "image", "text": "caption", "id": "id",
            },
            "documents": {"max_tokens": 100},
            "output": str(tmp_path / "out"),
            "tasks": TASKS,
            **changes,
        }  # fmt: skip
        (tmp_path / "spec.yaml").write_text(json.dumps(content))
        return tmp_path / "spec.yaml"

    return write_spec


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_run_has_the_answers_of_whole_prompts_and_resumes(
    command: Sequence[str], write: Write, seeing: Path, tmp_path: Path
) -> None:
    spec_file = write()
    code, first, errors = assay(spec_file, command=command)
    assert code == 0, errors
    assert (first["documents_labelled"], first["documents_read_by_model"]) == (len(ROWS), 3)
    assert assay(spec_file, command=command)[1]["documents_labelled"] == 0
    spec = load_spec(spec_file)
    model = load_model(seeing, dtype="float32", device="cpu", sees_images=True)
    tokenizer = load_tokenizer(seeing)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    assert model.images is not None
    names = ["doc_id", "animal", "kind"]
    stored = open_labels(str(tmp_path / "out")).to_table(columns=names).to_pylist()
    by_id = {int(row["doc_id"]): row for row in stored}
    for row, (image, text, status) in enumerate(ROWS):
        assert by_id[row]["animal"]["status"].startswith(status), row
        if image is None or status.startswith("error"):
            assert by_id[row]["animal"]["p"] is None
            continue
        ids = [*model.images.token_ids(image), *tokenizer(text)["input_ids"]][:100]
        assert by_id[row]["animal"]["n_tokens"] == len(ids)
        document = ImageDocument(tuple(ids), image)
        expected = answers_alone(model, prompt, document, readouts={})
        for task, log_probs in zip(spec.tasks, expected, strict=True):
            p = by_id[row][task.name]["p"]
            np.testing.assert_allclose(list(p.values()), softmax(log_probs), rtol=0, atol=1e-4)


def test_a_moved_file_and_another_text_ask_only_what_is_new(write: Write, tmp_path: Path) -> None:
    spec = write()
    assert assay(spec, command=ONE_PROCESS)[0] == 0
    (tmp_path / "in" / "a.parquet").rename(tmp_path / "in" / "b.parquet")
    _, moved, _ = assay(spec, command=ONE_PROCESS)
    assert (moved["documents_labelled"], moved["documents_read_by_model"]) == (len(ROWS), 0)
    table = pq.read_table(tmp_path / "in" / "b.parquet").slice(0, 2)
    table = table.set_column(2, "caption", [["Another.", "A picture."]])
    pq.write_table(table, tmp_path / "in" / "b.parquet")
    _, changed, _ = assay(spec, command=ONE_PROCESS)
    assert (changed["documents_labelled"], changed["documents_read_by_model"]) == (2, 1)


def test_the_filter_keeps_rows_with_their_images(write: Write, tmp_path: Path) -> None:
    spec = write(filter={"keep": "animal.p.Yes >= 0", "on_error": "drop"})
    assert assay(spec, command=ONE_PROCESS)[0] == 0
    assert main(["filter", str(spec), "--to", str(tmp_path / "kept")]) == 0
    kept = pq.read_table(next((tmp_path / "kept" / "kept").rglob("*.parquet")))
    assert kept.column("image").to_pylist() == [image for image, *_ in ROWS[:4]]


def test_a_report_shows_small_pictures_of_the_images(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write()
    assert assay(spec, command=ONE_PROCESS)[0] == 0
    assert main(["report", str(spec), "--to", str(tmp_path / "page.html"), "--json"]) == 0
    examples = json.loads(capsys.readouterr().out)["examples"]
    pictures = {each["example"]["row"]: each["picture"] for each in examples}
    assert {row for row, picture in pictures.items() if picture} - {3} == {0, 1, 2}
    shown = Image.open(io.BytesIO(base64.b64decode(pictures[0])))
    assert shown.format == "PNG" and max(shown.size) <= 240
    assert (tmp_path / "page.html").read_text().count("src='data:image/png;base64,") > 2


def test_check_and_plan_read_images(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write()
    assert main(["check", str(spec), "--json"]) == 0
    exactness = json.loads(capsys.readouterr().out)["exactness"]
    assert exactness["exact"] and exactness["answers"] > 0 and exactness["max_abs_dp"] < 1e-4
    assert main(["plan", str(spec), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == len(ROWS)


def test_a_readout_of_the_image_itself_is_fitted_and_run(write: Write, tmp_path: Path) -> None:
    images = [encoded_picture(32, 32, seed) for seed in range(40)]
    (tmp_path / "in").mkdir()
    table = pa.table({"id": [f"{n}" for n in range(40)], "image": pa.array(images, pa.binary())})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    gold = "".join(f"{n},{'odd' if n % 2 else 'even'}\n" for n in range(40))
    (tmp_path / "gold.csv").write_text(f"id,parity\n{gold}")
    readout = tmp_path / "parity.safetensors"
    task = {"name": "parity", "labels": ["odd", "even"], "readout": str(readout)}
    source = {"path": str(tmp_path / "in"), "image": "image", "id": "id"}
    spec = write(tasks=[task], input=source)
    words = ["--gold", str(tmp_path / "gold.csv"), "--task", "parity", "--to", str(readout)]
    assert main(["fit", str(spec), *words]) == 0
    code, summary, errors = assay(spec, command=ONE_PROCESS)
    assert code == 0, errors
    assert summary["documents_read_by_model"] == 40


def test_a_model_without_a_vision_tower_is_named_before_anything_is_written(
    write: Write, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write(model={"path": str(model_folder)})
    assert main(["run", str(spec)]) == 2
    assert "model.path: this model has no vision tower" in capsys.readouterr().err
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["attempts"]  # of the probe


def test_a_labeller_and_bench_name_that_they_read_texts(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecError, match=r"input.image: a Labeller reads texts"):
        Labeller(write(), cache_dir=tmp_path / "cache")
    assert main(["bench", str(write())]) == 2
    assert "input.image: bench cuts texts to equal length" in capsys.readouterr().err
