"""Readouts that are fitted to scores of a teacher, judged by labels of people.

    python -m benchmarks.perspective                             # fits, labels, prints a table
    python -m benchmarks.perspective --write out/perspective     # writes the scores alone

The spec is `jobs/specs/perspective.yaml`. The scores are synthetic: people's labels of the comments
in `toxicity_en.csv`, on the logistic scale, with normal noise. They are not those of the API.
Comments of the demo's corpus are labelled and compared; the readouts are fitted to the others.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import spearmanr

from jobs.corpus.build import read_comments
from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import score
from pipeline.ledger.dataset import open_labels

JOBS = Path(__file__).parents[1] / "jobs"
SPEC = JOBS / "specs" / "perspective.yaml"
COMMENTS = JOBS / "corpus" / "source" / "toxicity_en.csv"
PARTS = JOBS / "corpus" / "parts"
LAYER = 8
SEED = 0


@dataclass(frozen=True, slots=True)
class Attribute:
    """How the scores of an attribute depend on people's label, on the logistic scale."""

    middle: float  # halfway between toxic and clean comments
    distance: float  # of either from the middle
    noise: float  # standard deviation


# Without noise: TOXICITY .77 of toxic comments and .14 of clean ones; THREAT .06 and .02.
ATTRIBUTES = {
    "TOXICITY": Attribute(-0.3, 1.5, 1.3),
    "SEVERE_TOXICITY": Attribute(-3.0, 1.5, 1.5),
    "IDENTITY_ATTACK": Attribute(-2.5, 1.0, 1.5),
    "INSULT": Attribute(-0.6, 1.5, 1.5),
    "PROFANITY": Attribute(-1.0, 1.5, 1.8),
    "THREAT": Attribute(-3.5, 0.7, 0.8),
}


@dataclass(frozen=True, slots=True)
class Comments:
    """Comments with people's labels and synthetic scores."""

    ids: tuple[str, ...]  # in the demo's corpus
    texts: tuple[str, ...]
    toxic: NDArray[np.bool_]  # [comments]
    scores: NDArray[np.float64]  # [comments, attributes]

    def write(self, file: Path) -> None:
        """A CSV file as a user saves one, and people's labels in the column `people`."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.writer(lines)
            writer.writerow(["text", "people", *ATTRIBUTES])
            for text, toxic, scores in zip(self.texts, self.toxic, self.scores, strict=True):
                people = "toxicity" if toxic else "other"
                writer.writerow([text, people, *(f"{score:.6f}" for score in scores)])


def scored_comments() -> tuple[Comments, Comments]:
    """The comments to fit to, and those of the demo's corpus."""
    comments = list({each.id: each for each in read_comments(COMMENTS)}.values())
    toxic = np.array([dict(each.gold)["toxic"] == "toxic" for each in comments])
    middle, distance, noise = np.array([astuple(each) for each in ATTRIBUTES.values()]).T
    normal = np.random.default_rng(SEED).normal(size=(len(comments), len(ATTRIBUTES)))
    scores = expit(middle + distance * np.where(toxic, 1, -1)[:, None] + noise * normal)
    lines = f"read_json('{PARTS}/*.jsonl.zst', format='nd')"
    query = f"select id from {lines} union all select id from '{PARTS}/*.parquet'"
    corpus = {id for (id,) in duckdb.connect().execute(query).fetchall()}
    in_corpus = np.array([each.id in corpus for each in comments])

    def part(rows: NDArray[np.intp]) -> Comments:
        chosen = [comments[row] for row in rows]
        ids, texts = tuple(each.id for each in chosen), tuple(each.text for each in chosen)
        return Comments(ids, texts, toxic[rows], scores[rows])

    return part(np.flatnonzero(~in_corpus)), part(np.flatnonzero(in_corpus))


@dataclass(frozen=True, slots=True)
class Figures:
    """One attribute, on comments that its readout was not fitted to."""

    people: Figure  # AUROC of the readout against people's labels
    scores: float | None = None  # AUROC of the scores themselves against people's labels
    rank: float | None = None  # correlation of the readout's probabilities with the scores
    label_rank: float | None = None  # correlation of people's labels with the scores


def measure(folder: Path, *, layers: str = str(LAYER)) -> dict[str, Figures]:
    """The figures of each attribute, and of a readout that was fitted to people's labels."""
    fitted, compared = scored_comments()
    fitted.write(folder / "scores.csv")
    spec = folder / "perspective.yaml"
    spec.write_text(SPEC.read_text().replace("out/perspective", str(folder)))
    gold = ["--gold", str(folder / "scores.csv"), "--text", "text", "--layers", layers]
    words = [word for name in ATTRIBUTES for word in ("--score", f"{name.lower()}={name}")]
    started = time.perf_counter()
    _assay("fit", str(spec), *gold, *words)
    print(f"fitted to {len(fitted.texts)} comments in {time.perf_counter() - started:.0f} s")
    p = _answers(spec, compared, [name.lower() for name in ATTRIBUTES])
    figures = {
        name: Figures(
            _auroc(compared.toxic, p[name.lower()]),
            _auroc(compared.toxic, scores).value,
            float(spearmanr(scores, p[name.lower()]).statistic),
            float(spearmanr(scores, compared.toxic).statistic),
        )
        for name, scores in zip(ATTRIBUTES, compared.scores.T, strict=True)
    }
    _assay("fit", str(spec), *gold, "--column", "toxicity=people", "--task", "toxicity")
    of_labels = _answers(spec, compared, ["toxicity"])["toxicity"]
    return {**figures, "people's labels": Figures(_auroc(compared.toxic, of_labels))}


def _auroc(toxic: NDArray[np.bool_], p: NDArray[np.float64]) -> Figure:
    scores = score(toxic.astype(np.int64), np.stack([1 - p, p], axis=1), ["clean", "toxic"])
    return scores.headlines["auroc"]


def _answers(
    spec: Path, compared: Comments, tasks: Sequence[str]
) -> dict[str, NDArray[np.float64]]:  # by task: [comments]
    """The probabilities of the tasks' own labels after a run, in the order of the comments."""
    _assay("run", str(spec))
    table = open_labels(str(spec.parent / "labels")).to_table()
    row_of = {id: row for row, id in enumerate(table.column("doc_id").to_pylist())}
    rows = [row_of[id] for id in compared.ids]
    return {
        task: np.array([each["p"][task] for each in table.column(task).take(rows).to_pylist()])
        for task in tasks
    }


def _assay(*words: str) -> None:
    command = [sys.executable, "-m", "pipeline", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def main() -> None:
    """Writes the scores, or prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", metavar="FOLDER", help="write scores.csv and compare.csv alone")
    parser.add_argument("--layers", default=str(LAYER), help="of the readouts")
    options = parser.parse_args()
    if options.write is not None:
        for name, comments in zip(("scores", "compare"), scored_comments(), strict=True):
            comments.write(file := Path(options.write, f"{name}.csv"))
            print(f"{file}: {len(comments.texts)} comments")
        return
    with TemporaryDirectory() as name:
        for fitted_to, figures in measure(Path(name), layers=options.layers).items():
            of = figures.people
            assert of.value is not None and of.low is not None and of.high is not None
            more = (figures.scores, figures.rank, figures.label_rank)
            print(
                f"{fitted_to:16} AUROC {of.value:.3f} ({of.low:.2f} to {of.high:.2f})",
                *(f"{each:.3f}" for each in more if each is not None),
            )


if __name__ == "__main__":
    main()
