"""What certificates are about: partial runs, other documents, and outputs that are verified."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from certified import DOCUMENTS, agreement, asked, certificate, labelled
from changing_corpus import Corpus, acting_before
from stages import fail_reads

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.evaluation.promises import Judged
from pipeline.fitted.certificate import Certificate, hash_of
from pipeline.gold.answers import matching_snapshot
from pipeline.integrity.diff import Comparison, compare, exceeded
from pipeline.integrity.verify import Damage, verify, wrong_certificates
from pipeline.ledger.snapshots import contents
from pipeline.options import RunOptions
from pipeline.runtime.cascades import read_certificates
from pipeline.spec.gold import PublishSpec
from pipeline.verbs.certify import certify
from pipeline.verbs.run import judged_run


@pytest.fixture
def corpus(certified: Corpus) -> Corpus:
    return certified


def test_what_proves_less_than_was_promised_is_weaker_and_may_be_rejected(corpus: Corpus) -> None:
    labelled(corpus)
    snapshot, own = contents(corpus.store), certificate(corpus)
    less = replace(own, shares={"agree": replace(own.shares["agree"], proved=0.89)})

    def later(**certificates: Certificate) -> Comparison:
        return compare(corpus.store, snapshot, replace(snapshot, certificates=certificates))

    assert not later(toxic=own).weaker
    assert not later(toxic=replace(own, thresholds=None)).weaker  # the whole model answers
    assert "now it is not" in later().weaker["toxic"]
    weaker = later(toxic=less)
    assert weaker.weaker == {"toxic": "agree of 0.9 was promised, and 0.8900 is proved now"}
    [reason] = exceeded(weaker, PublishSpec(keep_promises=True))
    assert "agree of 0.9 was promised" in reason and not exceeded(weaker, PublishSpec())
    corpus.settings = {"publish": {"keep_promises": True}}
    same = labelled(corpus)
    assert same.published and same.diff is not None and not same.diff.weaker


def test_verify_computes_a_certificate_again(corpus: Corpus) -> None:
    labelled(corpus)
    snapshot, own = contents(corpus.store), certificate(corpus)
    assert not [*wrong_certificates(corpus.store, snapshot)]

    def damage_of(**changes: Any) -> Damage:
        wrong = replace(snapshot, certificates={"toxic": replace(own, **changes)})
        [damage] = wrong_certificates(corpus.store, wrong)
        return damage

    share = replace(own.shares["agree"], errors=own.shares["agree"].errors + 1)
    damage = damage_of(shares={"agree": share})
    assert damage.key == "the certificate of toxic" and "the stored answers say" in damage.what
    judged = Judged.of(["toxic", "clean"], "choice", own.promise)
    cheapest = judged.rules(np.array(own.curves))[-1]
    damage = damage_of(thresholds=cheapest, rule=200)
    assert damage.what == "has a rule that the stored answers do not prove"
    assert own.thresholds is not None
    at = {label: (low, high * (1 + 1e-12)) for label, (low, high) in own.thresholds.at.items()}
    damage = damage_of(thresholds=replace(own.thresholds, at=at))
    assert damage.what == "has other stages or thresholds than the answers"
    # — where the answers of the sample are lost, the fix makes the output intact
    published = {*snapshot.files["key"].to_pylist()}
    for stored in [*corpus.store.list("labels/toxic/")]:
        if stored.key not in published:
            (corpus.store.root / stored.key).unlink()
    [damage] = verify(corpus.store, snapshot, corpus.cache, {}).damages
    assert damage.fix == "delete cascades/toxic/, then `assay run` proves the promise again"
    shutil.rmtree(corpus.store.root / "cascades/toxic")
    labelled(corpus)
    assert verify(corpus.store, contents(corpus.store), corpus.cache, {}).intact


def test_a_store_that_does_not_answer_is_no_wrong_certificate(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> list[str]:
        raise UnavailableError("no answer")

    labelled(corpus)
    monkeypatch.setattr("pipeline.integrity.verify.stored_fps", read)
    with pytest.raises(UnavailableError, match="no answer"):
        verify(corpus.store, contents(corpus.store), corpus.cache, {})


def test_files_that_cannot_be_read_end_no_sample(corpus: Corpus) -> None:
    (corpus.input / "two.jsonl.gz").write_bytes(b"no gzip")
    result = labelled(corpus)
    assert result.unreadable and result.certificates["toxic"].thresholds is not None


def test_a_shard_that_fails_ends_no_sample_and_is_proved_of_once_it_is_labelled(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.write("two", [f"text {n}" for n in range(DOCUMENTS, 2 * DOCUMENTS)])
    with monkeypatch.context() as patch:
        fail_reads(patch, lambda name, _: StorageError("not for you") if name == "two" else None)
        result = labelled(corpus)
    first = certificate(corpus)
    assert first.thresholds is not None and not result.published
    assert "not for you" in result.failed_shards[0] and not result.certificates
    assert result.missing_shards == result.shards / 2
    result = labelled(corpus)
    second = certificate(corpus)
    assert result.certificates == {"toxic": second} and second.documents > first.documents
    assert agreement(corpus) >= 0.9
    corpus.verify()


@pytest.mark.parametrize("after", [1, 7, 8])  # of seven shards
def test_a_file_that_is_deleted_during_the_sample_proves_nothing(
    corpus: Corpus, after: int
) -> None:
    """Before, between and after the answers of the whole model."""
    corpus.write("two", [f"an odd text {n}" for n in range(100)])
    with acting_before(after, lambda: corpus.delete("two"), folder="labels/"):
        result = labelled(corpus)
    own = certificate(corpus)
    assert result.certificates == {"toxic": own} and own.thresholds is not None
    assert own.shards == hash_of(shard.id for shard in corpus.plan().shards)
    corpus.verify()


def test_the_rows_of_a_sample_that_fail_are_judged_with_those_of_the_whole_run(
    corpus: Corpus,
) -> None:
    certify(corpus.spec, cache_dir=corpus.cache)
    drawn = sorted(asked(corpus, "whole"))
    shutil.rmtree(corpus.folder / "out")
    corpus.broken.update(("whole", text) for text in drawn[:3])
    corpus.settings = {"max_error_rate": 2.5 / len(drawn)}
    assert labelled(corpus).published


def test_a_run_of_other_documents_shows_no_certificate(corpus: Corpus) -> None:
    labelled(corpus)
    corpus.write("two", [f"another text {n}" for n in range(10)])
    for options in (RunOptions(where="n_chars > 7"), RunOptions(sample="50%")):
        result = judged_run(corpus.spec, cache_dir=corpus.cache, options=options)
        assert result.complete and not result.certificates
        assert not result.outcome.contents.certificates


def test_two_specs_of_one_output_have_certificates_of_their_own(corpus: Corpus) -> None:
    labelled(corpus)
    first = certificate(corpus)
    corpus.name = "other"
    corpus.write("two", [f"text {n}" for n in range(DOCUMENTS, 2 * DOCUMENTS)])
    labelled(corpus)
    assert certificate(corpus).scope != first.scope
    corpus.name = "job"
    corpus.delete("two")
    result = labelled(corpus)
    assert not corpus.asked and result.certificates == {"toxic": first}


def test_answers_are_judged_though_a_later_certificate_is_not_published(corpus: Corpus) -> None:
    labelled(corpus)
    published = contents(corpus.store)
    corpus.write("two", [f"an odd text {n}" for n in range(DOCUMENTS // 4)])
    certify(corpus.spec, cache_dir=corpus.cache)
    assert certificate(corpus).rule != published.certificates["toxic"].rule
    current, _ = matching_snapshot(corpus.spec, corpus.store, ["toxic"], corpus.cache)
    assert current.number == published.number
    corpus.promise = {"agree": 0.91}
    with pytest.raises(SpecError, match="changed since snapshot 1"):
        matching_snapshot(corpus.spec, corpus.store, ["toxic"], corpus.cache)


def test_a_run_whose_time_ends_in_the_sample_is_one_that_stopped(corpus: Corpus) -> None:
    options = RunOptions(max_hours=1e-9)
    result = judged_run(corpus.spec, cache_dir=corpus.cache, options=options)
    assert result.stopped == "--max-hours 1e-09" and not result.published
    assert not [*read_certificates(corpus.store, "toxic")]
    assert labelled(corpus).certificates


def test_an_output_is_sound_where_a_certificate_has_retried_or_other_shards(
    corpus: Corpus,
) -> None:
    whole = [("whole", text) for text in corpus.texts.values()]
    corpus.broken.update(whole[::3])
    labelled(corpus)
    corpus.broken.clear()
    judged_run(corpus.spec, cache_dir=corpus.cache, options=RunOptions(retry_failed=True))
    corpus.verify()
    own, snapshot = certificate(corpus), contents(corpus.store)
    partly = replace(snapshot, certificates={"toxic": replace(own, shards="other", rule=0)})
    assert not [*wrong_certificates(corpus.store, partly)]


def test_a_wrong_option_is_refused_before_anything_is_asked(corpus: Corpus) -> None:
    corpus.settings = {"publish": {"keep_promises": True}}
    corpus.asked.clear()
    with pytest.raises(SpecError, match="not judged"):
        judged_run(corpus.spec, cache_dir=corpus.cache, options=RunOptions(publish_partial=True))
    assert not corpus.asked
