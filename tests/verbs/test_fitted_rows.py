"""Rows that an answer was fitted to are no evidence, in whichever command they come again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import Assay
from changing_corpus import Corpus
from judged import write_rows

from pipeline.gold.fitted_texts import LEAST_ROWS, is_held_out

DOCUMENTS, SOURCE = 120, np.random.default_rng(0)
TEXTS = ["".join(SOURCE.choice(list("abcdefgh"), 12)) for _ in range(DOCUMENTS)]
LABELS = SOURCE.choice(["toxic", "clean"], DOCUMENTS).tolist()


@pytest.fixture
def corpus(modelled: Corpus) -> Corpus:
    """Documents with random labels, and a spec whose task has a readout of the document."""
    modelled.write("d", TEXTS)
    readout = {"question": None, "readout": str(modelled.folder / "toxic.safetensors")}
    modelled.task = {"name": "toxic", "labels": ["toxic", "clean"], **readout}
    modelled.settings = {"documents": {"max_tokens": 64}, "gold": {"text": "text"}}
    return modelled


def gold_of(corpus: Corpus, rows: range) -> str:
    """Gold labels of these documents, by text, with other ids."""
    own = [{"id": f"other-{n}", "text": TEXTS[n], "toxic": LABELS[n]} for n in rows]
    return write_rows(corpus.folder / "gold.jsonl", own)


def test_after_fit_and_run_the_same_gold_judges_nothing_in_any_command(
    corpus: Corpus, assay: Assay
) -> None:
    gold, page = gold_of(corpus, range(100)), corpus.folder / "page.html"
    assay("fit", corpus.spec_file, "--gold", gold, "--layers", 1)
    corpus.run()
    # — before, the accuracy of random labels was near 1 here
    corpus.settings["publish"] = {"gates": ["toxic.accuracy >= 0"]}
    words = corpus.spec_file, "--gold", gold
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
    corpus.write("d", [f"{text}\n" for text in TEXTS])
    of_people = [{"id": f"d-{n}", "text": TEXTS[n], "toxic": LABELS[n]} for n in range(100)]
    corpus.settings["gold"] = {"id": "id"}
    words = corpus.spec_file, "--gold", write_rows(corpus.folder / "gold.jsonl", of_people)
    assay("fit", *words, "--layers", 1)
    corpus.run()
    task = assay("eval", *words, "--json", code=1).json["tasks"]["toxic"]
    assert task["scores"] is None and task["rows"]["fitted"] == 100


def test_a_superset_is_judged_by_its_other_rows_if_there_are_enough(
    corpus: Corpus, assay: Assay
) -> None:
    assay("fit", corpus.spec_file, "--gold", gold_of(corpus, range(60)), "--layers", 1)
    corpus.run()

    def judged(*rows: int, code: int = 0) -> Any:
        words = corpus.spec_file, "--gold", gold_of(corpus, range(*rows)), "--json"
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
    words = corpus.spec_file, "--gold", gold_of(corpus, range(DOCUMENTS))
    report = assay("fit", *words, "--layers", 1, "--json", "--hold-out", 0.4).json
    held_out = report["left_out"]["held out for assay eval"]
    assert 35 <= held_out <= 61 and report["tasks"][0]["rows"] == DOCUMENTS - held_out
    corpus.run()
    task = assay("eval", *words, "--json").json["tasks"]["toxic"]
    assert task["rows"]["evaluated"] == held_out


def test_the_share_that_is_held_out_follows_from_the_texts_alone() -> None:
    hashes = [f"{n:032x}" for n in range(4_000)]
    parts = {share: {h for h in hashes if is_held_out(h, share)} for share in (0.0, 0.2, 0.5)}
    assert not parts[0.0] and parts[0.2] < parts[0.5]
    assert abs(len(parts[0.2]) - 800) < 4 * np.sqrt(4_000 * 0.2 * 0.8)
    assert {h for h in reversed(hashes) if is_held_out(h, 0.2)} == parts[0.2]
