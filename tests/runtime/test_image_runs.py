"""A spec whose documents are images: the same ledger, resume, statuses, filter and commands."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from calls import Assay
from changing_corpus import Corpus
from command import WITH_MODEL
from command import assay as run_assay
from PIL import Image
from scipy.special import softmax
from vision import encoded_picture, save_vision_model, saved

from pipeline.errors import SpecError
from pipeline.inference.alternatives import answers_alone
from pipeline.inference.decoding import decode_image
from pipeline.inference.images import ImageDocument
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.loading import load_model, load_tokenizer
from pipeline.labeller import Labeller

TASKS = [
    {"name": "animal", "question": "Is it an animal?", "labels": ["Yes", "No"]},
    {"name": "kind", "question": "Which?", "labels": ["dog", "door", "cat"]},
]


def animated() -> bytes:
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 99, 200)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


DEEP_GREY = saved(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8)), "PNG")
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
    (DEEP_GREY, "", "error:the image has the mode I;16; convert it to RGB"),
]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


@pytest.fixture
def pictures(modelled: Corpus, seeing: Path) -> Corpus:
    """A corpus of images with captions."""
    modelled.model = {"path": str(seeing), "dtype": "float32"}
    modelled.task, *modelled.others = TASKS
    source = {"path": str(modelled.input), "image": "image", "text": "caption", "id": "id"}
    modelled.settings = {"input": source, "documents": {"max_tokens": 100}}
    images, texts, _ = zip(*ROWS, strict=True)
    ids = [str(row) for row in range(len(ROWS))]
    table = pa.table({"id": ids, "image": pa.array(images, pa.binary()), "caption": texts})
    pq.write_table(table, modelled.input / "a.parquet")
    return modelled


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_run_has_the_answers_of_whole_prompts_and_resumes(
    command: Sequence[str], pictures: Corpus, seeing: Path
) -> None:
    code, first, errors = run_assay(pictures.spec_file, command=command)
    assert code == 0, errors
    assert (first["documents_labelled"], first["documents_read_by_model"]) == (len(ROWS), 3)
    assert run_assay(pictures.spec_file, command=command)[1]["documents_labelled"] == 0
    spec = pictures.spec
    model = load_model(seeing, dtype="float32", device="cpu", sees_images=True)
    tokenizer = load_tokenizer(seeing)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks)
    assert model.images is not None
    stored = {task.name: [*pictures.rows(task.name).values()] for task in spec.tasks}
    for row, (image, text, status) in enumerate(ROWS):
        animal = stored["animal"][row]
        assert animal["status"].startswith(status), row
        if image is None or status.startswith("error"):
            assert animal["p"] is None
            continue
        ids = [*model.images.token_ids(image), *tokenizer(text)["input_ids"]][:100]
        assert animal["n_tokens"] == len(ids)
        document = ImageDocument(tuple(ids), image)
        expected = answers_alone(model, prompt, document, readouts={})
        for task, log_probs in zip(spec.tasks, expected, strict=True):
            p = stored[task.name][row]["p"]
            np.testing.assert_allclose(list(p.values()), softmax(log_probs), rtol=0, atol=1e-4)


def test_the_filter_keeps_rows_with_their_images(pictures: Corpus, assay: Assay) -> None:
    pictures.settings["filter"] = {"keep": "animal.p.Yes >= 0", "on_error": "drop"}
    pictures.run()
    to = pictures.folder / "kept"
    assay("filter", pictures.spec_file, "--to", to)
    kept = pq.read_table(next((to / "kept").rglob("*.parquet")))
    assert kept.column("image").to_pylist() == [image for image, *_ in ROWS[:4]]


def test_a_report_shows_small_pictures_of_the_images(pictures: Corpus, assay: Assay) -> None:
    pictures.run()
    page = pictures.folder / "page.html"
    examples = assay("report", pictures.spec_file, "--to", page, "--json").json["examples"]
    shown = {each["example"]["row"]: each["picture"] for each in examples}
    assert {row for row, picture in shown.items() if picture} - {3} == {0, 1, 2}
    picture = Image.open(io.BytesIO(base64.b64decode(shown[0])))
    assert picture.format == "PNG" and max(picture.size) <= 240
    assert page.read_text().count("src='data:image/png;base64,") > 2


def test_check_and_a_dry_run_read_images(pictures: Corpus, assay: Assay) -> None:
    exactness = assay("check", pictures.spec_file, "--json").json["exactness"]
    assert exactness["exact"] and exactness["answers"] > 0 and exactness["max_abs_dp"] < 1e-4
    planned = assay("run", pictures.spec_file, "--dry-run", "--json").json
    assert planned["documents"] == len(ROWS)


def test_a_readout_of_the_image_itself_is_fitted_and_run(pictures: Corpus, assay: Assay) -> None:
    images = [encoded_picture(32, 32, seed) for seed in range(40)]
    table = pa.table({"id": [f"{n}" for n in range(40)], "image": pa.array(images, pa.binary())})
    pq.write_table(table, pictures.input / "a.parquet")
    labels = "".join(f"{n},{'odd' if n % 2 else 'even'}\n" for n in range(40))
    gold, readout = pictures.folder / "gold.csv", pictures.folder / "parity.safetensors"
    gold.write_text(f"id,parity\n{labels}")
    pictures.task = {"name": "parity", "labels": ["odd", "even"], "readout": str(readout)}
    pictures.others = []
    del pictures.settings["input"]["text"]
    assay("fit", pictures.spec_file, "--gold", gold, "--task", "parity", "--to", readout)
    assert pictures.run().tally.n.asked == 40


def test_a_run_decodes_each_image_once(pictures: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [encoded_picture(32, 32, seed) for seed in range(20)]  # — more than are read together
    columns = {"id": [f"{n}" for n in range(40)], "image": pa.array(images * 2, pa.binary())}
    table = pa.table({**columns, "caption": ["."] * 40})
    pq.write_table(table, pictures.input / "a.parquet")
    decoded = Counter[bytes]()

    def counted(data: bytes) -> Image.Image:
        decoded[data] += 1
        return decode_image(data)

    monkeypatch.setattr("pipeline.inference.images.decode_image", counted)
    assert pictures.run().tally.n.asked == 20
    assert [decoded[image] for image in images] == [1] * 20


def test_a_model_without_a_vision_tower_is_named_before_anything_is_written(
    pictures: Corpus, model_folder: Path, assay: Assay
) -> None:
    pictures.model = {"path": str(model_folder)}
    printed = assay("run", pictures.spec_file, code=2)
    assert "model.path: this model has no vision tower" in printed.err
    assert [each.name for each in pictures.store.root.iterdir()] == ["attempts"]  # of the probe


def test_a_labeller_says_that_it_reads_texts(pictures: Corpus) -> None:
    with pytest.raises(SpecError, match=r"input.image: a Labeller reads texts"):
        Labeller(pictures.spec_file, cache_dir=pictures.cache)
