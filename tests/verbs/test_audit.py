"""An audit of a filter: its sample, the labels of people, and the figures of the filter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Assay
from fitted import card_of, write_readout
from gold_lines import lines
from known_corpus import TEXTS, Known
from numpy.typing import NDArray
from sklearn.metrics import precision_score, recall_score

from pipeline.errors import SpecError
from pipeline.evaluation.survey import Estimate
from pipeline.gold.labels import read_gold
from pipeline.options import ReviewOptions
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec
from pipeline.verbs.audit import FilterQuality, draw_sample

TOXIC, SPAM, ENGLISH = "toxic.p.toxic < 0.5", "spam.p.spam < 0.5", "language.label = 'English'"
DEMO = f"{TOXIC} and {SPAM} and {ENGLISH}"
MEASURES = ("precision", "recall", "prevalence")
Bools = NDArray[np.bool_]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def is_unwanted(truth: Mapping[str, str]) -> bool:
    """A person's label of a document: what the demo's rule is for."""
    return (truth["toxic"], truth["spam"], truth["language"]) != ("clean", "other", "English")


def should(known: Known) -> Bools:
    """[documents]: the labels of people."""
    return np.array([is_unwanted(known.by_text[str(text)]) for text in known.texts])


def dropped(known: Known) -> Bools:
    """[documents]: what the demo's rule drops."""
    foreign = known.p["language"].argmax(axis=1) != 0
    return np.asarray(
        (known.p["toxic"][:, 0] >= 0.5) | (known.p["spam"][:, 0] >= 0.5) | foreign, np.bool_
    )


def shares(dropped: Bools, should: Bools) -> dict[str, float]:
    return {
        "precision": precision_score(should, dropped),
        "recall": recall_score(should, dropped),
        "prevalence": float(should.mean()),
    }


def estimates(quality: FilterQuality) -> dict[str, Estimate]:
    return {name: getattr(quality, name) for name in MEASURES}


def rewrite(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("rule", "drops"),
    [
        ({"keep": DEMO}, dropped),
        ({"keep": "length(doc.source) < 4"}, lambda known: known.sources == "forum"),
        (
            {"drop_top": {"share": 0.1, "of": "spam.p.spam"}},
            lambda known: (
                known.p["spam"][:, 0]
                > np.quantile(known.p["spam"][:, 0], 0.9, method="inverted_cdf")
            ),
        ),
    ],
)
def test_labels_of_all_texts_give_what_scikit_learn_counts(
    rule: dict[str, Any], drops: Callable[[Known], Bools], known: Known, file: Path
) -> None:
    spec = known.spec(**rule)
    known.review(spec, file, is_unwanted, documents=1_000)
    quality = known.quality(spec, file)
    assert (quality.labels, quality.drawn, quality.texts, quality.lacks) == (*[TEXTS] * 3, None)
    for name, value in shares(drops(known), should(known)).items():
        of = estimates(quality)[name]
        assert of.estimate == pytest.approx(value) and of.low == of.high == of.estimate


def test_every_line_has_the_design_and_the_probability_of_its_document(
    known: Known, file: Path, tmp_path: Path
) -> None:
    spec = known.spec(keep=DEMO)
    known.review(spec, file, is_unwanted, documents=100, seed=3)
    drawn = [line["shown"].pop("audit") for line in lines(file)]
    names = ("sample", "snapshot", "rule", "texts", "drawn")
    [design] = {tuple(each[name] for name in names) for each in drawn}
    assert design[1:] == (1, DEMO, TEXTS, 100)
    sizes = {each["stratum"]: each["size"] for each in drawn}
    assert sum(sizes.values()) == TEXTS
    for each in drawn:
        of_stratum = sum(other["stratum"] == each["stratum"] for other in drawn)
        assert each["inclusion"] == pytest.approx(of_stratum / each["size"])
    # — the weights add up to the corpus
    assert sum(1 / each["inclusion"] for each in drawn) == pytest.approx(TEXTS)
    known.review(spec, tmp_path / "again.jsonl", is_unwanted, documents=100, seed=3)
    again = [line["content_hash"] for line in lines(tmp_path / "again.jsonl")]
    assert again == [line["content_hash"] for line in lines(file)]
    with pytest.raises(
        SpecError, match=r"audit.jsonl: is an audit, whose labels are drop and keep"
    ):
        read_gold(str(file), spec)


def test_a_text_that_is_cut_is_marked(
    known: Known, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.verbs.review_documents.TEXT_CHARS", 4)
    options = ReviewOptions(str(file), order="audit", documents=60)
    drawn = draw_sample(known.spec(keep=DEMO), options, cache_dir=known.folder / "cache")
    starts = {f"{text[:4]}\n[… {len(text) - 4:,} more characters]" for text in known.by_text}
    assert {document.text for document in drawn} <= starts


def test_one_sample_judges_every_later_rule(known: Known, file: Path) -> None:
    spec, looser = known.spec(keep=TOXIC), known.spec(keep="toxic.p.toxic < 0.9")
    known.review(spec, file, is_unwanted)
    first, second = known.quality(spec, file), known.quality(looser, file)
    assert first.prevalence == second.prevalence
    assert (first.recall.estimate or 0) > (second.recall.estimate or 0)
    assert second.sampled_rule == first.rule != second.rule


def test_a_sample_of_which_much_is_not_labelled_has_no_figures(known: Known, file: Path) -> None:
    spec = known.spec(keep=TOXIC)
    known.review(spec, file, is_unwanted, most=100)
    quality = known.quality(spec, file)
    assert {of.estimate for of in estimates(quality).values()} == {None}
    assert quality.lacks == "label the other 100 documents of the sample"
    known.review(spec, file, is_unwanted, most=85)
    assert known.quality(spec, file).lacks is None
    rows = lines(file)
    stratum = rows[0]["shown"]["audit"]["stratum"]
    rewrite(file, [row for row in rows if row["shown"]["audit"]["stratum"] != stratum])
    assert known.quality(spec, file).precision.estimate is None


def test_several_people_vote_and_texts_that_are_gone_are_counted(known: Known, file: Path) -> None:
    spec = known.spec(keep=TOXIC)
    known.review(spec, file, is_unwanted, documents=100)
    first, second, *others = lines(file)
    other = {"yes": "no", "no": "yes"}[first["label"]]
    wrong = [{**first, "label": other, "by": name} for name in ("bob", "eve")]
    absent = {**second, "content_hash": "0" * 32}
    rewrite(file, [first, absent, *others, *wrong])
    quality = known.quality(spec, file)
    assert (quality.labels, quality.not_in_corpus, quality.drawn) == (99, 1, 100)
    rewrite(file, [first, second, *others])
    outvoted, alone = quality.prevalence.estimate, known.quality(spec, file).prevalence.estimate
    assert outvoted is not None and alone is not None
    assert (outvoted < alone) == (first["label"] == "yes")


def with_readout(known: Known, folder: Path, texts: list[str]) -> JobSpec:
    """The spec with a readout that was fitted to these content hashes."""
    content = known.content(keep=TOXIC)
    content["tasks"][0] |= {"readout": str(folder / "toxic.safetensors")}
    spec = parse_spec(json.dumps(content))
    card = card_of(spec, spec.tasks[0], weights={}, dtype="float32", texts=texts)
    write_readout(folder / "toxic.safetensors", card, hidden=4, layers=[2])
    return spec


def test_texts_that_a_readout_was_fitted_to_are_not_drawn_and_no_evidence(
    known: Known, file: Path, tmp_path: Path
) -> None:
    known.review(known.spec(keep=TOXIC), file, is_unwanted, documents=50)
    hashes = [line["content_hash"] for line in lines(file)]
    spec = with_readout(known, tmp_path, hashes[:5])
    with pytest.raises(SpecError, match=r"fitted to 5 of its 50 texts"):
        known.quality(spec, file)
    known.review(spec, tmp_path / "new.jsonl", is_unwanted, documents=1_000)
    drawn = {line["content_hash"] for line in lines(tmp_path / "new.jsonl")}
    assert len(drawn) == TEXTS - 5 and drawn.isdisjoint(hashes[:5])


@pytest.mark.parametrize(
    "change",
    [
        {"p": {"yes": 0.9, "no": 0.1}},
        {"audit": "of another sample"},
        {"audit": None, "chosen": "uncertain"},
    ],
)
def test_labels_of_other_documents_or_in_view_of_an_answer_are_no_evidence(
    change: dict[str, Any], known: Known, file: Path
) -> None:
    spec = known.spec(keep=TOXIC)
    known.review(spec, file, is_unwanted, documents=50)
    rows = lines(file)
    shown = rows[0]["shown"]
    if change.get("audit"):
        change = {"audit": {**shown["audit"], "sample": "other"}}
    shown |= change
    rewrite(file, rows)
    with pytest.raises(SpecError, match=r"audit.jsonl: is no evidence about a filter: .* in view"):
        known.quality(spec, file)


@pytest.mark.parametrize(
    ("rule", "options", "line"),
    [
        (None, {}, "filter: missing"),
        (TOXIC, {"documents": 3}, "documents: has no room for two documents of each of"),
    ],
)
def test_a_sample_that_cannot_be_drawn_is_one_line(
    rule: str | None, options: dict[str, Any], line: str, known: Known, file: Path
) -> None:
    content = {**known.content(keep=rule), **({} if rule else {"filter": None})}
    with pytest.raises(SpecError) as refused:
        known.review(parse_spec(json.dumps(content)), file, is_unwanted, **options)
    assert str(refused.value).startswith(line) and len(str(refused.value).splitlines()) == 1


def test_eval_and_report_show_the_figures_of_the_filter(
    known: Known, file: Path, tmp_path: Path, assay: Assay
) -> None:
    spec, page = tmp_path / "spec.yaml", tmp_path / "report.html"
    spec.write_text(json.dumps(known.content(keep=DEMO)))
    known.review(known.spec(keep=DEMO), file, is_unwanted, documents=150)
    words = spec, "--gold", file
    figures = assay("eval", *words, "--json").json["filter"]
    for name in MEASURES:
        assert figures[name]["low"] <= figures[name]["estimate"] <= figures[name]["high"]
    precision = figures["precision"]
    shown = f"{precision['estimate']:.3f} ({precision['low']:.3f} to {precision['high']:.3f})"
    assert shown in assay("eval", *words).words
    assert shown in assay("report", *words, "--to", page).words
    first, _, main = page.read_text().partition("<h2 id='answers'>")
    assert shown in first and shown in main and "no gold labels" not in first
