"""A run that certifies a cascade: its questions, its proof, and the truth of the whole corpus."""

from __future__ import annotations

import shutil
from typing import Any

import fake_engine
import numpy as np
import pytest
from certified import DOCUMENTS, STAGES, agreement, asked, certificate, compared, labelled
from changing_corpus import Corpus, Killed, acting_before, kill

from pipeline.errors import SpecError
from pipeline.fitted.certificate import Certificate
from pipeline.ledger.keys import parse_key
from pipeline.ledger.snapshots import contents
from pipeline.runtime.cascades import read_certificates
from pipeline.verbs.certify import certify

SOURCE = 'sou"e'  # as long in JSON as `source`, by which the documents are drawn


@pytest.fixture
def corpus(certified: Corpus) -> Corpus:
    return certified


def test_a_run_proves_its_promise_and_asks_nothing_twice(corpus: Corpus) -> None:
    result = labelled(corpus)
    proved = certificate(corpus)
    assert proved.thresholds is not None and not proved.reason
    share = proved.shares["agree"]
    assert share.promised == 0.9 <= share.proved <= 1 - share.errors / share.trials
    assert agreement(corpus) >= 0.9
    assert max(corpus.asked.values()) == 1
    decided, whole = result.decided_by_stage["toxic"], len(asked(corpus, "whole"))
    # — the sample has the answers of both
    assert decided["2"] <= whole < decided["2"] + 0.1 * DOCUMENTS < 0.8 * DOCUMENTS
    assert decided["1"] / DOCUMENTS == pytest.approx(proved.decided, abs=0.12)
    assert result.certificates == {"toxic": proved}
    corpus.verify()
    again = labelled(corpus)
    assert not corpus.asked and again.snapshot == result.snapshot
    assert contents(corpus.store).certificates == {"toxic": proved}


def test_a_shard_without_a_drawn_document_is_not_read_for_the_sample(corpus: Corpus) -> None:
    corpus.write("one", [f"text {n}" for n in range(120)])
    corpus.shard_bytes, corpus.promise = 500, {"agree": 0.5, "sample": 12}
    certify(corpus.spec, cache_dir=corpus.cache)
    read = {parse_key(item.key) for item in corpus.store.list("documents/")}
    result = labelled(corpus)
    assert 0 < len(read) < result.shards and result.documents == 120
    corpus.verify()


def test_recall_and_precision_of_a_label(corpus: Corpus) -> None:
    corpus.write("one", [f"text {n}" for n in range(2 * DOCUMENTS)])
    corpus.promise = {"recall": 0.85, "precision": 0.85, "label": "toxic"}
    labelled(corpus)
    proved = certificate(corpus)
    assert proved.thresholds is not None and {*proved.shares} == {"recall", "precision"}
    pairs = compared(corpus)
    right = sum(called and truth for called, truth in pairs)
    assert right / sum(truth for _, truth in pairs) >= 0.85
    assert right / sum(called for called, _ in pairs) >= 0.85
    corpus.verify()


def test_a_promise_of_each_source_holds_where_the_cheap_stage_is_bad(corpus: Corpus) -> None:
    kinds = ["odd" if number % 4 == 0 else "usual" for number in range(2 * DOCUMENTS)]
    texts = [f"{kind} text {number}" for number, kind in enumerate(kinds)]
    corpus.write("one", texts, **{SOURCE: kinds})
    corpus.promise = {"agree": 0.8}
    labelled(corpus)
    of_all = certificate(corpus)
    assert of_all.thresholds is not None
    assert agreement(corpus) >= 0.8 > agreement(corpus, "odd")
    corpus.promise = {"agree": 0.8, "by": "sourse"}
    with pytest.raises(SpecError, match=r"tasks\.0\.cascade\.by: .* no value in sourse"):
        labelled(corpus)
    corpus.promise = {"agree": 0.8, "by": SOURCE}
    labelled(corpus)
    of_each = certificate(corpus)
    assert {*of_each.shares} == {"agree (odd)", "agree (usual)"}
    assert of_each.decided < of_all.decided / 2 and agreement(corpus, "odd") >= 0.8
    corpus.verify()


@pytest.mark.parametrize("promise", [{"agree": 0.8}, {"agree": 0.995}])
def test_another_promise_is_proved_by_the_stored_answers(
    corpus: Corpus, promise: dict[str, Any]
) -> None:
    labelled(corpus)
    before = asked(corpus, "whole")
    corpus.promise = promise
    labelled(corpus)
    assert not asked(corpus, "near whole") and not asked(corpus, "whole") & before
    # — a hundred documents prove no share of .995
    is_proved = promise == {"agree": 0.8}
    assert (certificate(corpus).thresholds is not None) == is_proved
    assert is_proved or "needs 736 documents" in certificate(corpus).reason
    assert len(before) < len(asked(corpus, "whole") | before) or is_proved


def test_new_files_are_sampled_too_and_the_promise_is_proved_again(corpus: Corpus) -> None:
    labelled(corpus)
    first = certificate(corpus)
    corpus.write("two", [f"another text {n}" for n in range(DOCUMENTS // 2)])
    labelled(corpus)
    second = certificate(corpus)
    assert (second.thresholds, second.rule) == (first.thresholds, first.rule)
    assert (second.curves, second.draw) == (first.curves, first.draw)
    assert second.shards != first.shards and second.documents > first.documents
    assert all(text.startswith("another") for _, text in corpus.asked)
    assert agreement(corpus) >= 0.9
    corpus.verify()
    corpus.delete("two")
    labelled(corpus)
    assert not corpus.asked


def careful_after_odd_texts(corpus: Corpus) -> Certificate:
    """The certificate after a file of odd texts: of a more careful rule on the same curves."""
    labelled(corpus)
    first = certificate(corpus)
    corpus.write("two", [f"an odd text {n}" for n in range(DOCUMENTS // 4)])
    labelled(corpus)
    second = certificate(corpus)
    assert 0 <= second.rule < first.rule and second.curves == first.curves
    return second


def test_a_rule_that_new_files_do_not_prove_is_replaced_by_a_more_careful_one(
    corpus: Corpus,
) -> None:
    second = careful_after_odd_texts(corpus)
    assert second.shares["agree"].proved >= 0.9 and agreement(corpus) >= 0.9
    assert all("odd" in text for text in asked(corpus, "near whole"))
    corpus.verify()


def test_no_rule_is_taken_that_new_files_alone_refute(corpus: Corpus) -> None:
    corpus.write("one", [f"text {n}" for n in range(4 * DOCUMENTS)])
    second = careful_after_odd_texts(corpus)
    # — the first rule would be proved of all documents: the proof of this one has room
    assert second.shares["agree"].proved > 0.93
    corpus.verify()


def test_new_files_alone_refute_a_rule_though_no_shard_has_answers_by_it(corpus: Corpus) -> None:
    corpus.write("one", [f"text {n}" for n in range(4 * DOCUMENTS)])
    labelled(corpus)
    corpus.promise = {"agree": 0.8}
    corpus.write("two", [f"an odd text {n}" for n in range(DOCUMENTS // 2)])
    labelled(corpus)
    # — by the rule that all documents together prove, it is half
    assert agreement(corpus, "odd") > 0.6
    corpus.verify()


def test_a_small_corpus_is_answered_by_the_whole_model_with_the_reason(corpus: Corpus) -> None:
    corpus.write("one", [f"text {n}" for n in range(20)])
    result = labelled(corpus)
    assert "agree 0.9 needs 36 documents" in result.certificates["toxic"].words
    assert agreement(corpus) == 1 and not asked(corpus, "near whole")
    assert len(asked(corpus, "whole")) == 20 and max(corpus.asked.values()) == 1


def test_a_cheap_stage_at_chance_decides_nothing(corpus: Corpus) -> None:
    corpus.stages, corpus.promise = [{"question": "other"}, STAGES[1]], {"agree": 0.97}
    result = labelled(corpus)
    assert result.certificates["toxic"].thresholds is None
    assert agreement(corpus) == 1 and len(asked(corpus, "other")) < 0.15 * DOCUMENTS
    corpus.verify()


@pytest.mark.parametrize("after", [14, 27, 45])
def test_a_run_killed_in_any_phase_ends_with_the_same_certificate(
    corpus: Corpus, after: int
) -> None:
    corpus.promise = {"agree": 0.6}
    corpus.write("one", [f"text {n}" for n in range(400)])
    labelled(corpus)
    expected, rows = certificate(corpus), corpus.rows()
    assert expected.thresholds is not None
    shutil.rmtree(corpus.folder / "out")
    with acting_before(after, kill), pytest.raises(Killed):
        labelled(corpus)
    labelled(corpus)
    assert certificate(corpus) == expected and corpus.rows() == rows
    assert [*read_certificates(corpus.store, "toxic")] == [expected]
    corpus.verify()


def test_a_certificate_is_of_one_condition(corpus: Corpus) -> None:
    corpus.before = [{"name": "topic", "question": "topic", "labels": ["art", "law"]}]
    corpus.when = "topic.label = 'art'"
    labelled(corpus)
    art = certificate(corpus)
    corpus.when = "topic.label = 'law'"
    result = labelled(corpus)
    law = certificate(corpus)
    assert result.certificates == {"toxic": law} and law.scope != art.scope
    # — the documents of the first condition are not asked again, nor do they prove anything
    assert not asked(corpus, "topic") and asked(corpus, "whole")
    corpus.verify()
    corpus.when = "topic.label = 'art'"
    labelled(corpus)
    assert not corpus.asked and contents(corpus.store).certificates == {"toxic": art}


def test_a_condition_that_names_a_cascade_is_met_as_that_decides(corpus: Corpus) -> None:
    """The sample of the second cascade has the documents that it is asked about in the run."""
    odd = {"stages": [{"question": "near topic"}, {"question": "topic"}], "agree": 0.6}
    corpus.before = [{"name": "topic", "labels": ["art", "law"], "cascade": odd}]
    corpus.when, corpus.promise = "topic.label = 'art' and topic.stage = 1", {"agree": 0.8}
    corpus.write("one", [f"text {n}" for n in range(3 * DOCUMENTS)])
    result = labelled(corpus)
    assert all(own.thresholds is not None for own in result.certificates.values())
    met = [
        name
        for name, row in corpus.rows("topic").items()
        if (row["stage"], row["label"]) == (1, "art")
    ]
    rows = {name: row for name, row in corpus.rows().items() if row["label"] is not None}
    assert [*rows] == met
    texts = corpus.texts
    same = [
        (row["p"]["toxic"] > 0.5) == (fake_engine.p_of("whole", texts[name]) > 0.5)
        for name, row in rows.items()
    ]
    assert np.mean(same) >= 0.8
    again = labelled(corpus)
    assert not corpus.asked and again.snapshot == result.snapshot
    corpus.verify()


def test_stages_that_were_proved_with_others_are_proved_again(corpus: Corpus) -> None:
    labelled(corpus)
    first = certificate(corpus)
    corpus.stages = [{"question": "near near whole"}, *STAGES]
    labelled(corpus)
    assert len(certificate(corpus).stages) == 3
    corpus.stages = STAGES
    result = labelled(corpus)
    assert result.certificates == {"toxic": first} and agreement(corpus) >= 0.9
    corpus.verify()


def test_a_document_on_which_the_cheap_stage_fails_breaks_the_promise(corpus: Corpus) -> None:
    corpus.broken.update(("near whole", text) for text in [*corpus.texts.values()][::4])
    result = labelled(corpus)
    assert "the most careful rule proves" in result.certificates["toxic"].reason
    corpus.broken.clear()
    assert agreement(corpus) == 1


def test_a_larger_sample_is_drawn_where_the_spec_says_so(corpus: Corpus) -> None:
    corpus.promise = {"agree": 0.9, "sample": 50}
    reason = labelled(corpus).certificates["toxic"].reason
    assert "needs 36 documents" in reason and "about cascade.sample: 72 would" in reason
    corpus.promise = {"agree": 0.9, "sample": 200}
    assert labelled(corpus).certificates["toxic"].thresholds is not None
    corpus.verify()


def test_the_advice_counts_the_documents_that_a_condition_leaves_out(corpus: Corpus) -> None:
    corpus.when, corpus.promise = "sample < 0.3", {"agree": 0.9, "sample": 100}
    reason = labelled(corpus).certificates["toxic"].reason
    # — 72 documents would be enough without the condition
    assert "needs 36 documents" in reason and "documents in all would be enough" in reason
