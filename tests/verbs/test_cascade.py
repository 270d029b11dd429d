"""`assay fit` of a cascade: thresholds from a sample that all stages answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from calls import Assay
from changing_corpus import Corpus, p_of

from pipeline.errors import SpecError
from pipeline.evaluation.cascade_guarantee import Promise, choose
from pipeline.fitted.cascade_file import Thresholds, parse_thresholds
from pipeline.options import FitOptions
from pipeline.verbs.cascade import ChosenThresholds, choose_thresholds

TEXTS = [f"text number {row}" for row in range(400)]


def run_verb(staged: Corpus, **changes: Any) -> ChosenThresholds:
    options = {"recall": 0.6, "precision": 0.6, "documents": 200, "overwrite": True} | changes
    made = FitOptions(**options)
    assert made.chooses_thresholds()
    return choose_thresholds(staged.spec, made, cache_dir=staged.cache)


def lines_of(staged: Corpus, **changes: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        run_verb(staged, **changes)
    return str(caught.value).splitlines()


def thresholds(chosen: ChosenThresholds) -> Thresholds:
    """What the file of the thresholds has of these."""
    return Thresholds(**{name: getattr(chosen, name) for name in Thresholds.__slots__})


def test_the_thresholds_follow_from_the_answers_of_the_sample(staged: Corpus) -> None:
    staged.write("a", TEXTS)
    chosen = run_verb(staged)
    sample = [text for question, text in staged.asked if question == "first"]
    assert staged.asked == Counter({(q, t): 1 for t in sample for q in ("first", "second")})
    assert 150 < len(sample) < 250 and sum(chosen.decided) == len(sample)
    first, second = (np.array([p_of(q, t) for t in sample]) for q in ("first", "second"))
    assert chosen.positive == "toxic", "the label with the task's name"
    expected = choose(first[None], second > 0.5, Promise(0.6, 0.6))
    assert expected == pytest.approx((chosen.low, chosen.high), abs=1e-6)
    file = parse_thresholds((staged.folder / "thresholds").read_bytes())
    assert file == thresholds(chosen) and file.source["documents"] == len(sample)
    staged.run()
    assert {text for question, text in staged.asked if question == "first"} == {*TEXTS} - {*sample}
    assert not {("second", text) for text in sample} & set(staged.asked)
    again = run_verb(staged)
    assert thresholds(again) == file


def test_a_stage_that_reads_less_is_judged_by_what_it_answers(staged: Corpus) -> None:
    staged.stages[0]["documents"] = {"max_tokens": 14}
    staged.write("a", TEXTS)
    chosen = run_verb(staged)
    sample = [text for question, text in staged.asked if question == "second"]
    assert {text for q, text in staged.asked if q == "first"} == {text[:14] for text in sample}
    first = np.array([p_of("first", text[:14]) for text in sample])
    truth = np.array([p_of("second", text) for text in sample]) > 0.5
    expected = choose(first[None], truth, Promise(0.6, 0.6))
    assert expected == pytest.approx((chosen.low, chosen.high), abs=1e-6)
    staged.run()
    assert not {("second", text) for text in sample} & {*staged.asked}


def test_another_choice_from_the_same_texts_states_a_lower_confidence(staged: Corpus) -> None:
    staged.write("a", TEXTS)
    looks = lambda chosen: (chosen.source["looks"], round(chosen.source["confidence"], 4))  # noqa: E731
    assert looks(run_verb(staged)) == (1, 0.95)
    assert looks(run_verb(staged)) == (1, 0.95), "the same choice"
    assert looks(run_verb(staged, documents=300)) == (2, 0.9), "it has all texts of the first one"
    assert looks(run_verb(staged, recall=0.5)) == (3, 0.85)
    lines_of(staged, recall=0.999, precision=0.999)
    staged.stages[0] = {"question": "third"}
    assert looks(run_verb(staged)) == (1, 0.95), "of other stages"


def test_texts_that_a_readout_of_a_stage_was_fitted_to_prove_nothing(
    staged: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged.write("a", TEXTS)
    everything = run_verb(staged)
    seen = frozenset(everything.source["texts"][:50])
    assert everything.fitted == 0 and len(seen) == 50
    monkeypatch.setattr("pipeline.verbs.cascade.readout_texts", lambda _spec, _task: seen)
    chosen = run_verb(staged)
    assert chosen.fitted == 50
    assert {*chosen.source["texts"]} == {*everything.source["texts"]} - seen
    assert chosen.source["documents"] == everything.source["documents"] - 50
    monkeypatch.setattr(
        "pipeline.verbs.cascade.readout_texts",
        lambda _spec, _task: frozenset(everything.source["texts"]),
    )
    (line,) = lines_of(staged)
    assert line.startswith(
        "documents: 0 different texts of it have an answer of every stage, beside"
    )


def test_bad_options_are_named_and_nothing_is_written(staged: Corpus) -> None:
    staged.write("a", TEXTS)
    cases = {
        "tasks: name one task with a cascade; the spec has toxic": {"tasks": ("topic",)},
        "recall: write a number above 0 and below 1": {"recall": 1.0},
        "precision: missing; write a number above 0 and below 1": {"precision": None},
        "documents: write a number above 0": {"documents": 0},
        "layers: is for readouts; leave it out for a cascade": {"layers": "all"},
    }
    for start, changes in cases.items():
        (line,) = lines_of(staged, **changes)
        assert line.startswith(start), line
    (line,) = lines_of(staged, recall=0.99, precision=0.99, documents=100)
    assert "sampled texts are toxic; this guarantee needs 371: write --documents " in line
    assert not (staged.folder / "thresholds").exists()
    (staged.folder / "thresholds").write_text("of an earlier choice")
    (line,) = lines_of(staged, overwrite=False)
    assert line.startswith("to: exists; write another name, or add --overwrite")


def test_thresholds_of_other_stages_are_refused(staged: Corpus) -> None:
    staged.write("a", TEXTS[:3])
    file = staged.folder / "thresholds"
    staged.decide(0.2, 0.8)
    staged.stages[1] = {"question": "reworded"}
    for content, problem in (
        (file.read_text(), ".* for other stages, or for another version"),
        ("{}", ".* format .* `assay fit --recall --precision`"),
        (None, ".*cannot be read: No such file.*`assay fit --recall .*` makes one"),
    ):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(SpecError, match=rf"cascade\.file: {problem}"):
            staged.run()
    assert not [*(staged.folder / "out").glob("specs/*")]


def test_the_command_says_what_each_stage_decides(staged: Corpus, assay: Assay) -> None:
    staged.write("a", TEXTS)
    promise = "--recall", 0.6, "--precision", 0.6, "--documents", 200
    value = assay("fit", staged.spec_file, *promise, "--json").json
    first, second = value["decided"]
    shown = assay("fit", staged.spec_file, *promise, "--overwrite").words
    documents = first + second
    for part in (
        f"{documents} documents, of which {value['source']['positives']} are",
        "recall 0.6 and precision 0.6",
        f"at {value['low']:.4f} or below, and at {value['high']:.4f} or above",
        f"stage 1 decides {first} ({first / documents:.0%})",
        f"stage 2 decides {second} ({second / documents:.0%})",
    ):
        assert part in shown, shown
