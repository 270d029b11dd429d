"""Continuations of answers: which are made, that they are greedy decoding, and made once.

`test_histories` has the law of other conditions, inputs that change, slices and killed runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changing_corpus import TOPIC, TOXIC, Corpus
from command import WITH_MODEL, assay
from fake_engine import EXPLAIN, EXPLAINED_BYTES
from fitted import write_calibration
from generation import greedily_decoded
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.cli import main
from pipeline.errors import SpecError
from pipeline.inference.labels.prompt_tokens import tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer

TOKENS = 6
TEXTS = [f"text {number} says so." for number in range(20)]
LONG_TEXTS = [
    f"This is text number {number}, which says so {number % 5} times." for number in range(13)
]
RANKED = {f"{kind}/{n}": [f"{kind}{n}"] for kind in ("clean", "rude") for n in range(3)}
CHUNKS = {"max_tokens": 16, "too_long": "chunk", "overlap_tokens": 4}


def explain(corpus: Corpus, when: str = "") -> None:
    """The first task continues the answers of which the condition is true (default: all)."""
    condition = {"when": when} if when else {}
    corpus.task = {**corpus.task, "explain": {"tokens": TOKENS, **condition}}


@cache
def tokenizer_and_network(path: str) -> tuple[Any, Any]:
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(path), network


def expected(corpus: Corpus, text: str, label: str) -> tuple[str, list[str], list[float]]:
    """The greedy continuation of the whole prompt with the answer."""
    spec = corpus.spec
    tokenizer, network = tokenizer_and_network(spec.model.path)
    prompt = tokenise_prompt(tokenizer, spec.prompt, spec.tasks[:1])
    document = DocumentTokenizer(tokenizer).encode(text)[: corpus.max_tokens]
    answer = tokenizer(spec.tasks[0].labels[label][0], add_special_tokens=False)["input_ids"]
    ids = [*prompt.prefix, *document, *prompt.questions[0].token_ids, *answer]
    made = greedily_decoded(network, ids, TOKENS, [tokenizer.eos_token_id])
    decoded = tokenizer.decode(list(made.token_ids), skip_special_tokens=True)
    return decoded, [tokenizer.decode([token]) for token in made.token_ids], list(made.p)


@pytest.mark.parametrize("command", WITH_MODEL)
@pytest.mark.parametrize(
    ("task", "documents"),
    [
        ({}, {}),
        ({}, CHUNKS),
        ({"labels": RANKED, "top_k": 2, "separator": "/"}, {}),
        ({"kind": "score", "labels": ["0", "1", "2"]}, {}),
    ],
    ids=["whole", "the first of chunks", "ranked labels with levels", "a score"],
)
def test_every_answer_is_continued_as_greedy_decoding_does(
    task: dict[str, Any], documents: dict[str, Any], command: Sequence[str], modelled: Corpus
) -> None:
    modelled.task = {**TOXIC, **task}
    modelled.shard_bytes = 500
    if documents:
        modelled.settings = {"documents": documents}
    explain(modelled)
    modelled.write("a", [*LONG_TEXTS[:9], "", LONG_TEXTS[0]])
    modelled.write("b", LONG_TEXTS[7:])
    code, result, errors = assay(modelled.spec_file, command=command)
    assert code == 0 and result["snapshot"] == 1, errors
    rows = modelled.rows()
    assert [*rows] == [*modelled.texts]
    for name, document in modelled.texts.items():
        if not document:
            assert rows[name]["explanation"] is None
            continue
        text, tokens, p = expected(modelled, document, rows[name]["label"])
        explanation = rows[name]["explanation"]
        assert explanation["text"] == text
        assert [each["token"] for each in explanation["tokens"]] == tokens
        np.testing.assert_allclose([each["p"] for each in explanation["tokens"]], p, atol=1e-4)
        assert "levels" not in rows[name] or len(rows[name]["levels"]) == 2
        assert not documents or rows[name]["n_chunks"] > 1
    modelled.verify()
    _, again, _ = assay(modelled.spec_file, command=command)
    assert (again["objects_created"], again["documents_read_by_model"]) == (0, 0)


def check(corpus: Corpus, named: set[str], asked: set[str]) -> None:
    """The named documents are continued, and the last run continued these texts, each once."""
    corpus.check()
    texts, rows = corpus.texts, corpus.rows()
    for name, row in rows.items():
        text = texts[name][:EXPLAINED_BYTES] if name in named else None
        assert (row["explanation"] and row["explanation"]["text"]) == text, name
    continued = Counter({key: n for key, n in corpus.asked.items() if key[0] == EXPLAIN})
    assert continued == Counter((EXPLAIN, text) for text in asked)


def test_an_answer_is_continued_once_whatever_condition_and_input_are(plain: Corpus) -> None:
    plain.write("a", TEXTS)
    outcome = plain.run()
    assert "explanation" not in plain.rows()["a-0"] and outcome.tally.asked_rows == len(TEXTS)
    answers = plain.rows()
    margins = sorted(row["margin"] for row in answers.values())
    continued: set[str] = set()
    for bound in (margins[10], margins[15], margins[5]):
        explain(plain, f"toxic.margin < {bound}")
        plain.run()
        named = {name for name, row in answers.items() if row["margin"] < bound}
        texts = {plain.texts[name] for name in named}
        check(plain, named, texts - continued)
        continued |= texts
        plain.collect()
    assert len(named) == 5 and len(continued) == 15
    explain(plain)
    assert plain.run(sample="50%").complete
    sampled = {text for question, text in plain.asked if question == EXPLAIN}
    plain.run()
    check(plain, {*answers}, {*TEXTS} - continued - sampled)
    plain.write("b", [*plain.delete("a"), "text 77 says so."])
    plain.run()
    check(plain, {*plain.texts}, {"text 77 says so."})


def test_a_shard_that_is_read_in_parts_is_continued(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.sources.documents.SLICE_CHARS", 100)
    plain.write("a", TEXTS)
    explain(plain, "doc_id = 'a-3'")
    plain.run()
    check(plain, {"a-3"}, {TEXTS[3]})


def test_a_condition_reads_calibrated_answers_and_other_tasks_stay(plain: Corpus) -> None:
    calibration = write_calibration(plain.folder / "calibration.json", {"clean": 0.3, "toxic": 0.7})
    plain.task = {**TOXIC, "calibration": calibration}
    plain.others = [TOPIC]
    plain.write("a", TEXTS)
    explain(plain, "n_chars < 5")
    plain.run()
    check(plain, set(), set())
    rows = plain.rows()
    bound = sorted(row["calibrated"]["margin"] for row in rows.values())[3]
    assert bound not in {row["margin"] for row in rows.values()}
    explain(plain, f"toxic.calibrated.margin < {bound} and n_chars > 0")
    plain.run()
    named = {name for name, row in rows.items() if row["calibrated"]["margin"] < bound}
    assert len(named) == 3
    check(plain, named, {plain.texts[name] for name in named})
    assert all("explanation" not in row for row in plain.rows("topic").values())


def test_a_failed_continuation_leaves_the_answer(
    plain: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    plain.write("a", TEXTS)
    explain(plain)
    plain.broken.add((EXPLAIN, TEXTS[5]))
    plain.run()
    check(plain, {*plain.texts} - {"a-5"}, {*TEXTS})
    warned = [record.args for record in caplog.records if "not be continued" in record.message]
    assert warned == [(1,)]


@pytest.mark.parametrize(
    ("task", "settings", "place"),
    [
        ({"explain": {"tokens": 0}}, {}, "tasks.0.explain.tokens"),
        ({"explain": {"tokens": 4, "when": "margin <"}}, {}, "tasks.0.explain.when"),
        ({"explain": {"tokens": 4, "when": "rude.margin < 1"}}, {}, "tasks.0.explain.when"),
        ({"explain": {"tokens": 4, "when": "toxic.margin"}}, {}, "tasks.0.explain.when"),
        ({"question": None, "readout": "r"}, {}, "tasks.0.explain"),
        ({}, {"model": {"path": "m", "kind": "encoder"}}, "tasks.0.explain"),
        (
            {"explain": {"tokens": 900}},
            {"documents": {"max_tokens": 3_700}},
            "documents.max_tokens",
        ),
    ],
)
def test_a_wrong_explain_names_its_place(
    modelled: Corpus, task: dict[str, Any], settings: dict[str, Any], place: str
) -> None:
    modelled.write("a", TEXTS[:2])
    explain(modelled)
    modelled.task |= task
    modelled.settings = settings
    with pytest.raises(SpecError) as raised:
        modelled.run()
    assert place in {problem.place for problem in raised.value.problems}
    assert not [*modelled.store.root.glob("labels/**/*.parquet")]


def test_a_recurrent_model_is_refused_before_it_answers(
    modelled: Corpus, tmp_path: Path, make_network: Any, byte_tokenizer: Any
) -> None:
    modelled.write("a", TEXTS[:2])
    explain(modelled)
    modelled.model = {"path": str(tmp_path / "recurrent"), "dtype": "float32"}
    make_network("lfm2").save_pretrained(tmp_path / "recurrent")
    byte_tokenizer.save_pretrained(tmp_path / "recurrent")
    with pytest.raises(SpecError, match=r"model\.path: a lfm2 model has recurrent states"):
        modelled.run()
    assert not [*modelled.store.root.glob("labels/**/*.parquet")]


def test_show_has_the_text_of_a_continuation(
    plain: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    plain.write("a", TEXTS[:6])
    explain(plain, "doc_id = 'a-3'")
    plain.run()
    capsys.readouterr()
    assert main(["show", str(plain.spec_file), "--json"]) == 0
    shown = {row["doc_id"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert shown["a-3"]["toxic_explanation_text"] == TEXTS[3][:EXPLAINED_BYTES]
    assert len(shown["a-3"]["toxic_explanation_tokens"]) == EXPLAINED_BYTES
    assert shown["a-2"]["toxic_explanation_text"] is None
    assert main(["show", str(plain.spec_file)]) == 0
    assert capsys.readouterr().out.count("toxic, continuation: ") == 1
