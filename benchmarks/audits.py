"""`assay audit` on documents whose labels are all known: how often its intervals hold the truth.

    python -m benchmarks.audits jobs/corpus/source/toxicity_en.csv --label is_toxic \
        --positive Toxic --model models/smollm2-135m-instruct.gguf

Some of the documents fit a readout, and a filter drops others by it. For each of 500 seeds a sample
is drawn and labelled as the file says, and the intervals are compared with the shares of all
documents, and with those of a simple random sample of the same size.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.cache import cache_dir
from pipeline.evaluation.survey import Estimate, Labelled, estimate
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.rows import TEXT_COLUMN
from pipeline.options import AuditOptions
from pipeline.spec.parse import load_spec
from pipeline.verbs.audit import audit
from pipeline.verbs.audit_sample import draw_sample

SEEDS = 500
MEASURES = ("precision", "recall", "prevalence")


def main() -> None:
    """Fits, labels, and prints coverage and half-widths of both kinds of samples."""
    options = _options()
    csv.field_size_limit(sys.maxsize)
    with Path(options.file).open(encoding="utf-8", newline="") as file:
        all_rows = list(csv.DictReader(file))
    by_text = {row[options.text]: row[options.label] == options.positive for row in all_rows}
    texts = list(by_text)
    order = np.random.default_rng(0).permutation(len(texts))[: options.documents]
    texts = [texts[row] for row in order]
    with TemporaryDirectory() as name:
        folder = Path(name)
        spec = _labelled(folder, options, by_text, texts)
        rows = open_labels(str(folder / "out")).to_table(columns=["doc_id", "task"]).to_pylist()
        known = texts[options.fit :]
        truth = np.array([by_text[known[int(row["doc_id"])]] for row in rows])
        dropped = np.array([row["task"]["p"]["positive"] >= options.threshold for row in rows])
        shares = {
            "precision": truth[dropped].mean(),
            "recall": dropped[truth].mean(),
            "prevalence": truth.mean(),
        }
        print(f"{len(truth):,} documents, {dropped.sum():,} dropped; the truth:", shares)
        of_audits = [_audit(folder, spec, seed, options.sample, by_text) for seed in range(SEEDS)]
        of_simple = [_simple(truth, dropped, seed, options.sample) for seed in range(SEEDS)]
        for kind, results in (("assay audit", of_audits), ("simple random", of_simple)):
            for measure in MEASURES:
                _show(kind, measure, [each[measure] for each in results], shares[measure])


def _labelled(
    folder: Path, options: argparse.Namespace, truth: Mapping[str, bool], texts: list[str]
) -> Path:
    """The spec of a filter whose output in `folder` has labels of all but the first texts."""
    (folder / "in.jsonl").write_text(
        "\n".join(
            json.dumps({"id": str(row), "text": text})
            for row, text in enumerate(texts[options.fit :])
        )
    )
    with (folder / "gold.csv").open("w", newline="") as file:
        labels = ((text, "positive" if truth[text] else "negative") for text in texts)
        csv.writer(file).writerows([("text", "task"), *list(labels)[: options.fit]])
    task = {"name": "task", "labels": ["negative", "positive"], "question": None}
    content = {
        "name": "audits",
        "model": {"path": str(Path(options.model).absolute()), "dtype": "float32"},
        "input": {"path": str(folder / "in.jsonl"), "id": "id"},
        "documents": {"max_tokens": options.max_tokens},
        "output": str(folder / "out"),
        "tasks": [{**task, "readout": str(folder / "fitted" / "task.safetensors")}],
        "filter": {"keep": f"task.p.positive < {options.threshold}"},
    }
    spec = folder / "spec.yaml"
    spec.write_text(json.dumps(content))
    words = ["--gold", str(folder / "gold.csv"), "--text", "text", "--to", str(folder / "fitted")]
    for command in (["fit", spec, *words, "--layers", str(options.layer)], ["run", spec]):
        words = [sys.executable, "-m", "pipeline", *map(str, command), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return spec


def _audit(
    folder: Path, path: Path, seed: int, sample: int, truth: Mapping[str, bool]
) -> dict[str, Estimate]:
    spec, file = load_spec(path), folder / f"sample{seed}.parquet"
    options = AuditOptions(to=str(file), sample=sample, seed=seed)
    draw_sample(spec, options, cache_dir=cache_dir())
    rows = pq.read_table(file)
    labels = ["positive" if truth[t] else "negative" for t in rows[TEXT_COLUMN].to_pylist()]
    pq.write_table(rows.set_column(rows.column_names.index("task"), "task", [labels]), file)
    result = audit(spec, AuditOptions(gold=str(file)), cache_dir=cache_dir())
    file.unlink()
    return {name: getattr(result, name) for name in MEASURES}


def _simple(
    truth: NDArray[np.bool_], dropped: NDArray[np.bool_], seed: int, sample: int
) -> dict[str, Estimate]:
    rows = np.random.default_rng(seed).choice(len(truth), sample, replace=False)
    ones = np.ones(sample, np.int64)
    of = Labelled(ones * 0, ones, dropped[rows].astype(np.int64), truth[rows], {0: len(truth)})
    return estimate(of, 0.05)


def _show(kind: str, measure: str, estimates: list[Estimate], truth: float) -> None:
    known = [each for each in estimates if each.low is not None and each.high is not None]
    intervals = np.array([(each.low, each.high) for each in known], np.float64)
    low, high = intervals.T
    coverage = ((low <= truth) & (truth <= high)).mean()
    half_width = (high - low).mean() / 2
    bias = np.mean([each.estimate or 0 for each in known]) - truth
    print(
        f"{kind:14} {measure:11} coverage {coverage:.3f} of {len(known)}, mean half-width "
        f"{half_width:.3f}, bias {bias:+.4f}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", help="CSV file with texts and labels")
    parser.add_argument("--text", default="text", help="column of the text")
    parser.add_argument("--label", required=True, help="column of the label")
    parser.add_argument("--positive", required=True, help="its value of documents to drop")
    parser.add_argument("--model", required=True, help="model folder or GGUF file")
    parser.add_argument("--layer", type=int, default=8, help="of the readout")
    parser.add_argument("--threshold", type=float, default=0.5, help="of what is dropped")
    parser.add_argument("--documents", type=int, default=10_000, help="most documents")
    parser.add_argument("--fit", type=int, default=200, help="documents that fit the readout")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
