"""A run that teaches itself: what it asks, what it proves, and what is true of the whole corpus."""

from __future__ import annotations

from collections.abc import Callable

import fake_engine
import numpy as np
import pytest
from changing_corpus import Corpus

from pipeline.fitted.certificate import Certificate
from pipeline.ledger.certificates import read_certificates
from pipeline.verbs.run import RunResult, judged_run

DOCUMENTS = 6_000
STAGES = [{"question": "near whole"}, {"question": "whole"}]


def p_near(question: str, text: str, exact: Callable[[str, str], float]) -> float:
    """A question `near X` has the answer to X with noise, where that is not sure of itself."""
    if not question.startswith("near "):
        return exact(question, text)
    noise = exact(question, text) - 0.5
    p = exact(question.removeprefix("near "), text) + 0.6 * noise
    return float(np.clip(p, 0.001, 0.999))


@pytest.fixture
def corpus(plain: Corpus, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    exact = fake_engine.p_of
    monkeypatch.setattr(fake_engine, "p_of", lambda q, text: p_near(q, text, exact))
    plain.shard_bytes = 60_000
    plain.write("one", [f"text {n}" for n in range(DOCUMENTS)])
    plain.stages = STAGES
    return plain


def labelled(corpus: Corpus) -> RunResult:
    corpus.asked.clear()
    return judged_run(corpus.spec, cache_dir=corpus.cache)


def certificate(corpus: Corpus) -> Certificate:
    return next(read_certificates(corpus.store, "toxic"))


def agreement(corpus: Corpus) -> float:
    """The share of documents with the whole model's label."""
    same = [
        (row["p"]["toxic"] > 0.5) == (fake_engine.p_of("whole", corpus.texts[name]) > 0.5)
        for name, row in corpus.rows().items()
    ]
    return float(np.mean(same))


def test_a_run_proves_its_promise_and_asks_nothing_twice(corpus: Corpus) -> None:
    result = labelled(corpus)
    proved = certificate(corpus)
    assert proved.thresholds is not None and not proved.reason
    share = proved.shares["agree"]
    assert share.promised == 0.98 <= share.proved <= 1 - share.errors / share.trials
    assert agreement(corpus) >= 0.98
    assert max(corpus.asked.values()) == 1
    whole = sum(question == "whole" for question, _ in corpus.asked)
    decided = result.decided_by_stage["toxic"]
    # — the sample has the whole model's answers, and the cheap ones, too
    assert decided["2"] <= whole < decided["2"] + 0.1 * DOCUMENTS < 0.8 * DOCUMENTS
    assert decided["1"] / DOCUMENTS == pytest.approx(proved.decided, abs=0.06)
    again = labelled(corpus)
    assert not corpus.asked and again.snapshot == result.snapshot
    corpus.verify()
