"""Laws: below an image, the tree answers as the whole model does on each prompt alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from fitted import bare_card
from numpy.testing import assert_allclose
from scipy.special import softmax
from vision import FAMILIES, encoded_picture, save_vision_model, vision_network, vision_tokenizer

from pipeline.errors import DocumentError, ModelError
from pipeline.fitted.readout import LinearMap, Readout
from pipeline.inference import images
from pipeline.inference.alternatives import answers_alone
from pipeline.inference.decoding import decode_image
from pipeline.inference.engine import LabelEngine
from pipeline.inference.images import ImageDocument, ImageReader
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.loading import load_model
from pipeline.inference.model import vision
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.model.vision import EmbeddedDocument

TOLERANCE = 1e-4
MODELLED = [family for family in FAMILIES if family != "gemma3"]
SIZES = [(40, 30), (64, 20), (33, 70), (64, 64), (1, 1)]
PREFIX = (5, 6, 7)
WORDS = {"yes": ((11, 12, 13), (14, 15)), "no": ((11, 12, 16), (17,)), "maybe": ((11, 18),)}

MakeModel = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """A tiny model of the family that sees images, loaded from its folder."""
    made: dict[str, LoadedModel] = {}

    def make(family: str) -> LoadedModel:
        if family not in made:
            folder = save_vision_model(tmp_path_factory.mktemp(family), family)
            made[family] = load_model(folder, dtype="float32", device="cpu", sees_images=True)
        return made[family]

    return make


def documents_of(model: LoadedModel) -> list[ImageDocument]:
    """Images of several sizes, the first without a text, the others with one of each length."""
    assert model.images is not None
    documents = []
    for seed, size in enumerate(SIZES):
        image = encoded_picture(*size, seed=seed)
        text = tuple(range(20, 20 + 3 * seed))
        documents.append(ImageDocument((*model.images.token_ids(image), *text), image))
    return documents


def questions() -> PromptTokens:
    """First tokens, whole labels, a search of whole labels with a beam, below one prefix."""
    first = {"yes": [(11,)], "no": [(17,)], "maybe": [(18,), (19,)]}
    return PromptTokens(
        PREFIX,
        (
            Question("first", (8, 9), first),
            Question("whole", (8, 10), WORDS),
            Question("searched", (8, 30, 31), WORDS, beam=4),
        ),
    )


def readout(pooling: Literal["last", "mean"], layer: int, layers: int) -> Readout:
    source = np.random.default_rng(layer)
    maps = {
        at: LinearMap(source.normal(0, 0.05, (3, 48)).astype(np.float32), np.zeros(3, np.float32))
        for at in range(1, layers + 1)
    }
    return Readout(bare_card(3, pooling=pooling, layer=layer), maps)


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        *product(MODELLED, [None, (3, 2)]),
        *(pytest.param(family, (1, 3), marks=pytest.mark.slow) for family in MODELLED),
        ("qwen3_vl", (1, 1)),  # its first layers read more of the image than its rows
        ("qwen3_vl", (2, 2)),
    ],
    ids=str,
)
def test_the_tree_equals_independent_prompts_in_any_batch(
    family: str, layers: tuple[int, int] | None, seeing: MakeModel
) -> None:
    model = seeing(family)
    documents, prompt, readouts = [(40, 41, 42), *documents_of(model), (43,) * 30], questions(), {}
    if layers:
        asked, of_image = layers
        readouts = {
            "asked": readout("last", asked, model.layers),
            "of_image": readout("mean", of_image, model.layers),
        }
        labels = {f"l{i}": () for i in range(3)}
        prompt = PromptTokens(PREFIX, tuple(Question(name, (8, 9), labels) for name in readouts))
    expected = [answers_alone(model, prompt, each, readouts=readouts) for each in documents]
    for llama, max_batch_tokens in product({model.llama, None}, (1, 10_000)):
        engine = LabelEngine(
            replace(model, llama=llama),
            prompt,
            max_batch_tokens=max_batch_tokens,
            readouts=readouts,
        )
        answers = engine.label(documents).log_probs
        for row, alone in enumerate(expected):
            for question, of_row in zip(answers, alone, strict=True):
                assert_allclose(softmax(question[row]), softmax(of_row), rtol=0, atol=TOLERANCE)
    # — the image matters: two images have other answers
    if not layers:
        assert np.abs(softmax(answers[0][1]) - softmax(answers[0][4])).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_the_vision_tower_runs_once_a_document(
    family: str, seeing: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = seeing(family), 0
    features = type(model.network.base_model).get_image_features

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return features(*args, **kwargs)

    monkeypatch.setattr(type(model.network.base_model), "get_image_features", counted)
    documents = documents_of(model)
    LabelEngine(model, questions(), max_batch_tokens=1).label(documents)
    assert calls == len(documents)


@pytest.mark.parametrize("most_bytes, made", [(1 << 29, 5), (0, 10)])
def test_what_is_read_of_images_is_kept_within_a_limit_of_bytes(
    most_bytes: int, made: int, seeing: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_KEPT_BYTES", most_bytes)
    reader = seeing(MODELLED[0]).images
    assert reader is not None
    decoded: list[bytes] = []
    monkeypatch.setattr(
        images, "decode_image", lambda data: decoded.append(data) or decode_image(data)
    )
    pictures = [encoded_picture(*size, seed=50 * made + seed) for seed, size in enumerate(SIZES)]
    for picture in (*pictures, *pictures):
        reader.inputs(picture)
        assert reader._kept_bytes <= most_bytes
    assert len(decoded) == made


def same_shape(model: LoadedModel, documents: list[ImageDocument]) -> bool:
    """Whether the processor makes the same of images of all sizes."""
    assert model.images is not None
    inputs = [model.images.inputs(document.image) for document in documents]
    return len({tuple(x.shape for x in each.values()) for each in inputs}) == 1


@pytest.mark.parametrize("family", MODELLED)
def test_images_of_one_shape_go_through_the_tower_together(
    family: str, seeing: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = seeing(family), []
    assert model.images is not None
    shown = [(*SIZES[0], 3), (*SIZES[1], 0), (*SIZES[0], 0), (*SIZES[0], 9), (*SIZES[1], 5)]
    documents = []
    for seed, (width, height, words) in enumerate(shown):
        image = encoded_picture(width, height, seed=seed)
        ids = (*model.images.token_ids(image), *range(20, 20 + words))
        documents.append(ImageDocument(ids, image))
    network = model.network.base_model
    forward = type(network).forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(network), "forward", counted)
    monkeypatch.setattr(vision, "IMAGES_AT_ONCE", 2)
    together = model.with_images([(1, 2), *documents, (3,)])
    assert rows == ([2, 2, 1] if same_shape(model, documents) else [2, 1, 2])
    assert [together[0], together[-1]] == [(1, 2), (3,)]
    for document, read in zip(documents, together[1:-1], strict=True):
        [alone] = model.with_images([document])
        assert isinstance(read, EmbeddedDocument) and isinstance(alone, EmbeddedDocument)
        assert read == alone == document
        own_rows, alone_rows = read.rows, alone.rows
        for name in ("positions", "is_image"):
            np.testing.assert_array_equal(getattr(own_rows, name), getattr(alone_rows, name))
        pairs = zip(
            (own_rows.embeddings, *own_rows.deep),
            (alone_rows.embeddings, *alone_rows.deep),
            strict=True,
        )
        for together_states, alone_states in pairs:
            torch.testing.assert_close(together_states, alone_states, rtol=0, atol=1e-5)


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("side"), ZeroDivisionError("side")])
def test_an_image_that_a_processor_cannot_enlarge_is_a_problem_of_its_document(
    error: Exception, seeing: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_inputs: object) -> None:
        raise error

    reader = seeing(MODELLED[0]).images
    assert reader is not None and reader.token_ids(encoded_picture(9, 9))
    monkeypatch.setattr(reader, "_processor", refuse)
    reason = str(error) or type(error).__name__
    with pytest.raises(DocumentError, match=f"the model's processor refuses the image: {reason}"):
        reader.token_ids(encoded_picture(9, 10))


def test_why_a_processor_of_images_cannot_be_loaded_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> None:
        raise OSError("no such file\nsee the manual")

    folder = save_vision_model(tmp_path, MODELLED[0])
    monkeypatch.setattr(images, "_processor", lacking)
    with pytest.raises(ModelError, match=r"cannot be loaded: no such file see the manual; copy "):
        ImageReader(folder)


def test_gemma3_is_refused_by_name(tmp_path: Path) -> None:
    vision_network("gemma3", vision_tokenizer("gemma3")).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="family 'gemma3': the tokens of an image attend to later"):
        load_model(tmp_path, dtype="float32", device="cpu", sees_images=True)


def test_a_model_without_a_vision_tower_is_refused(model_folder: Path) -> None:
    with pytest.raises(ModelError, match="family 'llama' has no vision tower, and"):
        load_model(model_folder, dtype="float32", device="cpu", sees_images=True)
