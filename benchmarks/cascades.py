"""Cascades on documents whose labels are known: how often the promise holds, and the time.

    python -m benchmarks.cascades jobs/corpus/source/toxicity_en.csv --label is_toxic \
        --positive Toxic --model models/smollm2-135m-instruct.gguf --layers 4 30

Half of the documents fit a readout at each layer (a stage each), and the others are labelled. For
each of 200 seeds a sample chooses thresholds; recall and precision of the cascade are then counted
on all documents. Last, the cascade and the last stage alone label the same documents, in turns.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from pipeline.evaluation.cascade_thresholds import Promise, choose
from pipeline.ledger.dataset import open_labels

SEEDS = 200
FAST_TEXT = 0  # in place of a layer


def main() -> None:
    """Fits, labels, and prints both tables."""
    options = _options()
    csv.field_size_limit(sys.maxsize)
    with Path(options.file).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    order = np.random.default_rng(0).permutation(len(rows))[: options.documents]
    texts = [rows[i][options.text] for i in order]
    truth = np.array([rows[i][options.label] == options.positive for i in order])
    with TemporaryDirectory() as name:
        bench = _Bench(Path(name), options)
        fit = min(len(texts) // 2, options.fit)
        bench.fit(texts[:fit], truth[:fit])
        bench.write_documents(texts[fit:])
        of_people = truth[fit:]
        p = np.stack([bench.alone(layer) for layer in options.layers])  # [stages, docs]
        for layer, of_stage in zip(options.layers, p, strict=True):
            auroc = roc_auc_score(of_people, of_stage)
            print(f"{_name(layer):12} AUROC {auroc:.3f} of {p.shape[1]:,} documents")
        for recall, precision in options.promises:
            promise = Promise(recall, precision, 0.95)
            _guarantee(p[:-1], p[-1] > 0.5, p[-1] > 0.5, promise, options.sample, "the last stage")
            _guarantee(p[:-1], p[-1] > 0.5, of_people, promise, options.sample, "people")
        recall, precision = options.promises[0]
        bench.compare(recall, precision)


def _guarantee(
    scores: NDArray[np.float64],  # [stages before the last, docs]
    last: NDArray[np.bool_],
    truth: NDArray[np.bool_],
    promise: Promise,
    size: int,
    against: str,
) -> None:
    """Prints how often the promise holds over samples, and what the last stage is spared."""
    held: list[bool] = []
    decided: list[float] = []
    for seed in range(SEEDS):
        sample = np.random.default_rng(seed).choice(len(truth), min(size, len(truth) // 2), False)
        chosen = choose(scores[:, sample], last[sample], truth[sample], promise)
        if chosen is None:
            continue
        sides = np.where(scores <= chosen[0], -1, np.where(scores >= chosen[1], 1, 0))
        first = sides[(sides != 0).argmax(axis=0), np.arange(len(truth))]  # 0: none decides
        answers = np.where(first == 0, last, first == 1)
        right = (answers & truth).sum()
        is_recalled = right >= promise.recall * truth.sum()
        held.append(bool(is_recalled and right >= promise.precision * answers.sum()))
        decided.append(float((first != 0).mean()))
    counts = f"true for {held.count(True)} samples, false for {held.count(False)}"
    none = f"no thresholds for {SEEDS - len(held)}"
    spared = f"; the last stage is spared {np.mean(decided):.1%}" if decided else ""
    print(
        f"recall {promise.recall}, precision {promise.precision} against {against}: "
        f"{counts}, {none}{spared}"
    )


class _Bench:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options

    def write_documents(self, texts: Sequence[str]) -> None:
        rows = ({"id": str(row), "text": text} for row, text in enumerate(texts))
        (self.folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def fit(self, texts: Sequence[str], truth: NDArray[np.bool_]) -> None:
        """A readout at each layer, and a fastText model."""
        labels = ["positive" if each else "negative" for each in truth]
        self.write_documents(texts[:1])
        with (self.folder / "gold.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "task"), *zip(texts, labels, strict=True)])
        spec = self._spec("fit", {"question": None, "readout": "unused"})
        for layer in self.options.layers:
            to = str(self.folder / f"layer{layer}")
            if layer == FAST_TEXT:
                self._fit_fast_text(texts, labels)
                continue
            words = ["fit", spec, "--gold", str(self.folder / "gold.csv"), "--text", "text"]
            _assay(*words, "--layers", str(layer), "--to", to)

    def _fit_fast_text(self, texts: Sequence[str], labels: Sequence[str]) -> None:
        pairs = zip(labels, texts, strict=True)
        lines = [f"__label__{label} {' '.join(text.split())}\n" for label, text in pairs]
        (self.folder / "fit.txt").write_text("".join(lines), encoding="utf-8")
        words = ["fasttext", "supervised", "-input", "fit.txt", "-output", "words", "-thread", "1"]
        options = ["-epoch", "10", "-lr", "0.2", "-dim", "20", "-bucket", "200000"]
        subprocess.run([*words, *options], cwd=self.folder, check=True, capture_output=True)

    def alone(self, layer: int) -> NDArray[np.float64]:  # [docs]: p of `positive`
        """The answers of one stage to all documents."""
        result = self._run(f"alone{layer}", self._stage(layer))
        print(f"{_name(layer):12} {result['label_seconds']:.1f} s of labelling")
        rows = open_labels(result["output"]).to_table(columns=["doc_id", "task"]).to_pylist()
        p = {int(row["doc_id"]): row["task"]["p"] for row in rows}
        return np.array([p[row]["positive"] if p[row] else 0.0 for row in range(len(p))])

    def compare(self, recall: float, precision: float) -> None:
        """Chooses thresholds, and times the cascade against its last stage, in turns."""
        file = str(self.folder / "thresholds")
        stages = [self._stage(layer) for layer in self.options.layers]
        cascade = {"cascade": {"stages": stages, "file": file}}
        promise = ["--recall", str(recall), "--precision", str(precision), "--positive", "positive"]
        sample = ["--sample", str(self.options.sample), "--to", file, "--json"]
        spec = self._spec("choice", cascade)
        chosen = json.loads(_assay("cascade", spec, "--task", "task", *promise, *sample))
        print(f"thresholds {chosen['low']:.4f} and {chosen['high']:.4f}")
        ratios: list[tuple[float, float]] = []
        for turn in range(self.options.turns):
            whole = self._run(f"cascade{turn}", cascade)
            last = self._run(f"last{turn}", self._stage(self.options.layers[-1]))
            ratios.append(tuple(whole[key] / last[key] for key in ("label_seconds", "seconds")))
            decided = whole["decided_by_stage"]["task"]
            times = f"{whole['label_seconds']:.1f} s of labelling, {whole['seconds']:.1f} s"
            alone = f"{last['label_seconds']:.1f} and {last['seconds']:.1f} s"
            print(f"cascade {times}; last stage {alone}; decided {decided}")
        of_labelling, of_run = (median(column) for column in zip(*ratios, strict=True))
        print(f"ratio of labelling {of_labelling:.3f}, of the whole run {of_run:.3f}")

    def _stage(self, layer: int) -> dict[str, Any]:
        if layer == FAST_TEXT:
            return {"classifier": {"kind": "fasttext", "path": str(self.folder / "words.bin")}}
        return {"readout": str(self.folder / f"layer{layer}" / "task.safetensors")}

    def _run(self, name: str, task: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(_assay("run", self._spec(name, task), "--json"))
        return result

    def _spec(self, name: str, task: dict[str, Any]) -> str:
        content = {
            "name": name,
            "model": {"path": str(Path(self.options.model).absolute()), "dtype": "float32"},
            "input": {"path": str(self.folder / "in.jsonl"), "id": "id"},
            "documents": {"max_tokens": self.options.max_tokens},
            "output": str(self.folder / name),
            "tasks": [{"name": "task", "labels": ["negative", "positive"], **task}],
        }
        (self.folder / f"{name}.yaml").write_text(json.dumps(content))
        return str(self.folder / f"{name}.yaml")


def _assay(*words: str) -> str:
    command = [sys.executable, "-m", "pipeline", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _name(layer: int) -> str:
    return "fastText" if layer == FAST_TEXT else f"layer {layer}"


def _promise(text: str) -> tuple[float, float]:
    recall, precision = map(float, text.split(","))
    return recall, precision


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", help="CSV file with texts and labels")
    parser.add_argument("--text", default="text", help="column of the text")
    parser.add_argument("--label", required=True, help="column of the label")
    parser.add_argument("--positive", required=True, help="its value that is positive")
    parser.add_argument("--model", required=True, help="model folder or GGUF file")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[4, 30], help="of each stage; 0: fastText"
    )
    parser.add_argument("--documents", type=int, default=10_000, help="most documents")
    parser.add_argument("--fit", type=int, default=500, help="most documents that fit the readouts")
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--promises", type=_promise, nargs="+", default=[(0.9, 0.9), (0.95, 0.9)], help="R,P"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
