"""Rows that an answer was fitted to are no evidence, in whichever command they come again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from calls import Assay, WriteSpec
from judged import write_rows
from stages import run_without_ray

from pipeline.gold.fitted_texts import LEAST_ROWS, is_held_out

DOCUMENTS = 120


class Corpus:
    """Documents with random labels, and a spec whose task has a readout of the document."""

    def __init__(self, folder: Path, write_spec: WriteSpec) -> None:
        source = np.random.default_rng(0)
        self.folder = folder
        self.texts = ["".join(source.choice(list("abcdefgh"), 12)) for _ in range(DOCUMENTS)]
        self.labels = source.choice(["toxic", "clean"], DOCUMENTS).tolist()
        self._write("corpus", [{"id": f"d{n}", "text": t} for n, t in enumerate(self.texts)])
        readout = {"question": None, "readout": str(folder / "toxic.safetensors")}
        self.spec = write_spec(
            input={"path": str(folder / "corpus.jsonl"), "id": "id"},
            documents={"max_tokens": 64},
            tasks=[{"name": "toxic", "labels": ["toxic", "clean"], **readout}],
            gold={"text": "text"},
        )

    def gold(self, name: str, rows: range) -> str:
        """Gold labels of these documents, by text: another file, with other ids."""
        own = [{"text": self.texts[n], "toxic": self.labels[n]} for n in rows]
        return self._write(name, [{"id": f"other-{n}", **row} for n, row in enumerate(own)])

    def _write(self, name: str, rows: list[dict[str, str]]) -> str:
        return write_rows(self.folder / f"{name}.jsonl", rows)


@pytest.fixture
def corpus(write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    run_without_ray(monkeypatch)
    return Corpus(tmp_path, write_spec)


def test_after_fit_and_run_the_same_gold_judges_nothing_in_any_command(
    corpus: Corpus, assay: Assay
) -> None:
    gold, page = corpus.gold("gold", range(100)), corpus.folder / "page.html"
    assay("fit", corpus.spec, "--gold", gold, "--layers", 1)
    assay("run", corpus.spec)
    # — before, the accuracy of random labels was near 1 here
    content = yaml.safe_load(corpus.spec.read_text())
    publish = {"gates": ["toxic.accuracy >= 0"]}
    corpus.spec.write_text(yaml.safe_dump({**content, "publish": publish}))
    words = corpus.spec, "--gold", gold
    task = assay("eval", *words, "--json", code=1).json["tasks"]["toxic"]
    assert task["scores"] is None and task["rows"]["fitted"] == 100
    shown = assay("eval", *words, code=1).out
    assert "100 left out, because the readout was fitted to them" in shown
    assert "warning: toxic: nothing is judged" in shown and shown.count("AUROC") == 1
    assert "toxic: by cross-validation of the fit itself: AUROC 0." in shown
    quality = assay("report", *words, "--to", page, "--json").json["quality"]["tasks"]["toxic"]
    assert quality["scores"] is None and "nothing is judged" in page.read_text()


def test_gold_texts_without_their_line_breaks_are_recognised_as_fitted(
    corpus: Corpus, assay: Assay
) -> None:
    """A spreadsheet strips them; the documents are found by their ids."""
    lines = [{"id": f"d{n}", "text": f"{text}\n"} for n, text in enumerate(corpus.texts)]
    corpus._write("corpus", lines)
    of_people = [{**row, "text": row["text"].strip()} for row in lines[:100]]
    for row, label in zip(of_people, corpus.labels, strict=False):
        row["toxic"] = label
    gold = corpus._write("gold", of_people)
    content = yaml.safe_load(corpus.spec.read_text())
    corpus.spec.write_text(yaml.safe_dump({**content, "gold": {"id": "id"}}))
    assay("fit", corpus.spec, "--gold", gold, "--layers", 1)
    assay("run", corpus.spec)
    task = assay("eval", corpus.spec, "--gold", gold, "--json", code=1).json["tasks"]["toxic"]
    assert task["scores"] is None and task["rows"]["fitted"] == 100


def test_a_superset_is_judged_by_its_other_rows_if_there_are_enough(
    corpus: Corpus, assay: Assay
) -> None:
    assay("fit", corpus.spec, "--gold", corpus.gold("fitted", range(60)), "--layers", 1)
    assay("run", corpus.spec)

    def judged(*rows: int, code: int = 0) -> Any:
        words = corpus.spec, "--gold", corpus.gold("some", range(*rows)), "--json"
        return assay("eval", *words, code=code).json["tasks"]["toxic"]

    few = judged(60 + LEAST_ROWS - 1, code=1)
    assert few["scores"] is None and few["rows"]["evaluated"] == LEAST_ROWS - 1
    assert few["cross_validated"]["auroc"]["value"] is not None
    sufficient, alone = judged(60 + LEAST_ROWS), judged(60, 60 + LEAST_ROWS)
    assert sufficient["rows"] | {"fitted": 60, "evaluated": LEAST_ROWS} == sufficient["rows"]
    assert sufficient["scores"] == alone["scores"] and alone["rows"]["fitted"] == 0
    accuracy = sufficient["scores"]["headlines"]["accuracy"]
    assert accuracy["low"] <= 0.5 <= accuracy["high"], "the labels are random"


def test_rows_that_a_fit_holds_out_are_judged_without_an_option(
    corpus: Corpus, assay: Assay
) -> None:
    words = corpus.spec, "--gold", corpus.gold("gold", range(DOCUMENTS))
    report = assay("fit", *words, "--layers", 1, "--json", "--hold-out", 0.4).json
    held_out = report["left_out"]["held out for assay eval"]
    assert 35 <= held_out <= 61 and report["tasks"][0]["rows"] == DOCUMENTS - held_out
    assay("run", corpus.spec)
    task = assay("eval", *words, "--json").json["tasks"]["toxic"]
    assert task["rows"]["evaluated"] == held_out


def test_the_share_that_is_held_out_follows_from_the_texts_alone() -> None:
    hashes = [f"{n:032x}" for n in range(4_000)]
    parts = {share: {h for h in hashes if is_held_out(h, share)} for share in (0.0, 0.2, 0.5)}
    assert not parts[0.0] and parts[0.2] < parts[0.5]
    assert abs(len(parts[0.2]) - 800) < 4 * np.sqrt(4_000 * 0.2 * 0.8)
    assert {h for h in reversed(hashes) if is_held_out(h, 0.2)} == parts[0.2]
