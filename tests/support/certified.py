"""A corpus with a cascade of two questions, of which the first nearly answers the second.

The fixture `certified` makes it; other functions say what was asked, and what is true of it.
"""

from __future__ import annotations

from collections.abc import Callable

import fake_engine
import numpy as np
import pytest
from changing_corpus import Corpus

from pipeline.fitted.certificate import Certificate
from pipeline.runtime.cascades import read_certificates
from pipeline.verbs.run import RunResult, judged_run

DOCUMENTS = 1_000
STAGES = [{"question": "near whole"}, {"question": "whole"}]
AGREE = {"agree": 0.9}  # needs 36 documents


def p_near(question: str, text: str, exact: Callable[[str, str], float]) -> float:
    """A question `near X` has the answer to X with noise, and to an odd text any answer."""
    if not question.startswith("near ") or "odd" in text:
        return exact(question, text)
    noise = exact(question, text) - 0.5
    p = exact(question.removeprefix("near "), text) + 0.6 * noise
    return float(np.clip(p, 0.001, 0.999))


@pytest.fixture
def certified(plain: Corpus, same_draws: None, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    exact = fake_engine.p_of
    monkeypatch.setattr(fake_engine, "p_of", lambda q, text: p_near(q, text, exact))
    plain.shard_bytes, plain.stages, plain.promise = 100_000, STAGES, AGREE
    plain.write("one", [f"text {n}" for n in range(DOCUMENTS)])
    return plain


def labelled(corpus: Corpus) -> RunResult:
    corpus.asked.clear()
    return judged_run(corpus.spec, cache_dir=corpus.cache)


def certificate(corpus: Corpus) -> Certificate:
    return next(read_certificates(corpus.store, "toxic"))


def compared(corpus: Corpus, of: str = "") -> list[tuple[bool, bool]]:
    """Of each document with this word, whether it is called toxic, and is by the whole model."""
    texts = corpus.texts
    return [
        (row["p"]["toxic"] > 0.5, fake_engine.p_of("whole", texts[name]) > 0.5)
        for name, row in corpus.rows().items()
        if of in texts[name]
    ]


def agreement(corpus: Corpus, of: str = "") -> float:
    return float(np.mean([called == truth for called, truth in compared(corpus, of)]))


def asked(corpus: Corpus, question: str) -> set[str]:
    return {text for own, text in corpus.asked if own == question}
