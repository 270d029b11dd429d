"""Readouts that a run fits to the whole model's answers, on models with random weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changing_corpus import Corpus, read_in_float32
from encoders import write_encoder
from fake_chat import FakeChat
from fitted import card_of, write_readout
from transformers import PreTrainedTokenizerFast

from pipeline.errors import SpecError
from pipeline.fitted.readout import parse_readout
from pipeline.options import EvalOptions, RunOptions, WorkOptions
from pipeline.runtime.conditions import drawn_rows
from pipeline.runtime.job import Run
from pipeline.runtime.placement import Placement, this_machine
from pipeline.runtime.progress import ignore
from pipeline.runtime.session import elsewhere
from pipeline.runtime.weights import locate
from pipeline.spec.model import ModelSpec
from pipeline.spec.parse import located
from pipeline.spec.stages import QuestionTask
from pipeline.verbs.evaluate import evaluate
from pipeline.verbs.forecast import forecast
from pipeline.verbs.run import RunResult, judged_run
from pipeline.verbs.teach import LAYERS, Texts, _states
from pipeline.verbs.uniform_sample import Sample

WORDS = ("river", "stone", "anger", "market", "quiet", "engine", "winter", "letter", "yellow")
FORM: dict[str, Any] = {"name": "form", "question": None, "labels": ["x", "y"]}
TOPICS: dict[str, Any] = {"name": "topics", "kind": "multi", "labels": ["art", "law"]}
DOCUMENTS = 640
AGREE = {"agree": 0.75, "sample": 100}  # needs 13 documents


@pytest.fixture
def corpus(modelled: Corpus, same_draws: None) -> Corpus:
    """Texts of random words, and a task whose readout reads the last layer."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, 8)) for _ in range(DOCUMENTS)]
    modelled.write("d", texts, source=[("a", "b")[n % 2] for n in range(DOCUMENTS)])
    modelled.shard_bytes = 40_000
    path = modelled.folder / "form"
    modelled.task = {**FORM, "readout": str(path)}
    spec = modelled.spec
    weights = dict(locate(spec.model, modelled.cache).hashes)
    card = card_of(spec, spec.tasks[0], weights=weights, dtype="float32", pooling="mean", layer=2)
    write_readout(path, card, hidden=48, layers=[2], seed=0)
    return modelled


def run(corpus: Corpus, **options: Any) -> RunResult:
    return judged_run(corpus.spec, cache_dir=corpus.cache, options=RunOptions(**options))


def labels_of(corpus: Corpus, task: str) -> list[Any]:
    rows = corpus.rows(task).values()
    return [row["labels" if "labels" in row else "label"] for row in rows]


def whole_labels(corpus: Corpus, task: dict[str, Any], model: dict[str, Any]) -> list[Any]:
    """What the model answers about every document."""
    folder = corpus.folder / f"whole-{task['name']}"
    folder.mkdir()
    whole = Corpus(folder, model, task=task, name="whole", shard_bytes=corpus.shard_bytes)
    whole.input = corpus.input
    whole.run()
    return labels_of(whole, task["name"])


def agreement(labels: list[Any], whole: list[Any]) -> float:
    return float(np.mean([a == b for a, b in zip(labels, whole, strict=True)]))


def test_a_run_teaches_readouts_of_an_early_layer(corpus: Corpus) -> None:
    whole, plain = dict(corpus.task), {**TOPICS, "question": "About it?"}
    corpus.task = {**whole, "cascade": AGREE}
    corpus.others = [{**plain, "cascade": {**AGREE, "agree": 0.7}}]
    result = run(corpus)
    for task, own in (("form", whole), ("topics", plain)):
        proved = result.certificates[task]
        assert proved.thresholds is not None, proved.words
        assert (proved.layer, proved.cost, proved.max_tokens) == (1, 0.5, None)
        assert result.decided_by_stage[task]["1"] > DOCUMENTS / 2
        labels = labels_of(corpus, task)
        assert agreement(labels, whole_labels(corpus, own, corpus.model)) >= proved.promise["agree"]
    readout = parse_readout(corpus.store.read(result.certificates["form"].readout))
    assert (readout.card.layer, readout.card.task) == (1, "form")
    corpus.verify()
    assert corpus.spec.task("topics").question == "About it?"
    gold = [{"id": id, "topics": row["labels"]} for id, row in corpus.rows("topics").items()]
    (path := corpus.folder / "gold.jsonl").write_text("\n".join(map(json.dumps, gold)))
    corpus.settings = {"gold": {"path": str(path)}}
    judged = evaluate(corpus.spec, EvalOptions(), cache_dir=corpus.cache).tasks
    assert {*judged} == {"topics.art", "topics.law"}
    assert all(of.rows.evaluated == DOCUMENTS for of in judged.values())
    again = run(corpus)
    assert again.snapshot == result.snapshot and not again.documents_read_by_model


def test_a_teacher_answers_the_sample_and_what_is_uncertain(
    corpus: Corpus,
    make_network: Callable[..., Any],
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    make_network("mistral").save_pretrained(tmp_path / "teacher")
    byte_tokenizer.save_pretrained(tmp_path / "teacher")
    teacher = read_in_float32(tmp_path / "teacher")
    asked = {**FORM, "question": "Which?"}
    corpus.task = {**asked, "cascade": {**AGREE, "teacher": teacher}}
    result = run(corpus)
    proved = result.certificates["form"]
    assert proved.thresholds is not None and proved.layer == 1, proved.words
    own, whole = (locate(m, corpus.cache) for m in (corpus.spec.model, ModelSpec(**teacher)))
    assert proved.cost == 0.5 * own.size_bytes / whole.size_bytes
    labels = labels_of(corpus, "form")
    assert agreement(labels, whole_labels(corpus, asked, teacher)) >= AGREE["agree"]
    corpus.verify()
    # — readouts of one model are not those of another, with any teacher
    make_network("qwen3").save_pretrained(tmp_path / "other")
    byte_tokenizer.save_pretrained(tmp_path / "other")
    corpus.model = read_in_float32(tmp_path / "other")
    assert run(corpus).certificates["form"].scope != proved.scope
    corpus.verify()


def test_a_server_answers_the_sample_and_what_is_uncertain(corpus: Corpus, chat: FakeChat) -> None:
    teacher = chat.spec(price={"input": 2.0, "output": 4.0})
    topic = {"name": "form", "question": "About what?", "labels": ["art", "law", "sport"]}
    corpus.task = {**topic, "cascade": {**AGREE, "teacher": teacher}}
    expected = forecast(corpus.spec, WorkOptions(), cache_dir=corpus.cache)
    assert expected.server_tokens is not None and expected.server_tokens[1] == DOCUMENTS
    result = run(corpus, max_cost=10.0)
    proved = result.certificates["form"]
    assert proved.thresholds is not None and proved.cost == 0, proved.words
    # — the server answers alike about all texts, which the readout learns
    assert labels_of(corpus, "form") == ["art"] * DOCUMENTS
    assert 1 <= len(chat.paid) <= DOCUMENTS / 5 and set(chat.paid.values()) == {1}
    paid = (chat.tokens * 2 + len(chat.paid) * 4) / 1e6
    assert result.cost is not None and 0.97 * paid < result.cost < paid  # without the first request
    corpus.verify()
    again = run(corpus)
    assert again.snapshot == result.snapshot and set(chat.paid.values()) == {1}


def test_what_is_wrong_with_a_teaching_server_is_placed_where_it_is_written(
    corpus: Corpus, chat: FakeChat
) -> None:
    whole = {**FORM, "question": "Which?", "labels": ["Yes", "No"]}
    teacher = chat.spec(api_key_env="NO_SUCH_KEY")
    corpus.task = {**whole, "cascade": {**AGREE, "teacher": teacher}}
    for place in ("cascade.teacher", "cascade.stages.1.model"):
        with pytest.raises(SpecError) as raised, located(corpus.spec_file):
            run(corpus)
        assert str(raised.value).startswith(f"tasks.0.{place}.api_key_env: NO_SUCH_KEY is not set")
        stages = [{"question": "Really?"}, {"question": "Which?", "model": teacher}]
        corpus.task = {**whole, "question": None, "cascade": {**AGREE, "stages": stages}}


def test_a_classifier_is_refused_as_the_model_that_is_taught(
    corpus: Corpus, chat: FakeChat, tmp_path: Path
) -> None:
    corpus.model = {"path": str(write_encoder(tmp_path / "encoder"))}
    corpus.task = {**FORM, "question": "Which?", "cascade": {**AGREE, "teacher": chat.spec()}}
    with pytest.raises(SpecError, match=r"^model.path: only classifies, .* name a language model"):
        run(corpus)
    assert not chat.paid  # — for the sample


def test_a_promise_of_each_source(corpus: Corpus) -> None:
    # — each source has about 16 documents to prove it with, and needs 8
    corpus.task = {**corpus.task, "cascade": {**AGREE, "agree": 0.6, "by": "source"}}
    proved = run(corpus).certificates["form"]
    assert {*proved.shares} == {"agree (a)", "agree (b)"}
    assert sum(share.trials for share in proved.shares.values()) == proved.documents
    corpus.verify()


def test_long_documents_in_chunks_are_taught_by_their_first_tokens(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.verbs.teach.FIRST_TOKENS", 24)
    chunked = {"max_tokens": 32, "too_long": "chunk", "overlap_tokens": 26}
    corpus.settings = {"documents": chunked}
    corpus.task = {**FORM, "question": "Which?", "cascade": {**AGREE, "agree": 0.6}}
    proved = run(corpus).certificates["form"]
    assert proved.thresholds is not None and proved.max_tokens == 24, proved.words
    corpus.verify()


def test_run_save_gives_each_question_a_cascade(corpus: Corpus) -> None:
    corpus.task = {**FORM, "question": "Which?"}
    result = run(corpus, save=True)
    [task] = result.outcome.job.spec.tasks
    assert {*result.certificates} == {"form"}
    needed = result.certificates["form"].reason
    assert "agree 0.98 needs 183 documents" in needed and isinstance(task, QuestionTask)


def test_a_first_half_that_can_prove_no_readout_is_not_read(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_one(sid: str, rows: int, share: float) -> Any:
        own, first = drawn_rows(sid, rows, share)
        return own, first & (first.cumsum() == 1)

    monkeypatch.setattr("pipeline.verbs.uniform_sample.drawn_rows", of_one)
    monkeypatch.delattr("pipeline.verbs.teach._states")
    corpus.shard_bytes = 1_000_000
    corpus.task = {**corpus.task, "cascade": AGREE}
    reason = run(corpus).certificates["form"].reason
    assert "needs 13 documents in the first half of the sample, which has 1;" in reason


def test_states_are_read_on_no_node_that_runs_nothing(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = list[dict[str, Any]]()

    def on_a_node(call: Callable[[], Any], **own: Any) -> Any:
        needs.append(own)
        return call()

    machine = replace(this_machine(), unable=frozenset({"n1"}))
    connected = nullcontext(True)
    monkeypatch.setattr("pipeline.runtime.run.this_machine", lambda: machine)
    monkeypatch.setattr("pipeline.verbs.uniform_sample.remote_ray", lambda *_, **__: connected)
    monkeypatch.setattr("pipeline.runtime.graph.on_a_node", on_a_node)
    corpus.task = {**corpus.task, "cascade": AGREE}
    assert run(corpus).certificates["form"].readout
    assert [own["label_selector"] for own in needs] == [elsewhere({"n1"})["label_selector"]]


@pytest.mark.xdist_group("ray")
def test_states_are_read_in_a_process_of_the_cluster_that_a_run_uses(
    corpus: Corpus, shared_ray: None
) -> None:
    shards = corpus.plan().shards
    sample = Sample(
        corpus.spec, corpus.cache, None, RunOptions(), ignore, Run(), share=0.1, shards=shards
    )
    placement = Placement("cpu", "float32", actors=2, threads=1)
    assert sample.where_engines_run(os.getpid, placement) != os.getpid()
    tokens = np.where(np.arange(sample.first_half.sum()) == 3, 0, 9)
    texts = Texts(sample, tokens, placement)
    there = texts.states(None)
    here = _states(texts.reading(None), "float32", corpus.cache, texts.texts, LAYERS)
    assert 10 < len(there.rows) == len(texts.texts) - 1 and here.layers == there.layers
    assert 3 not in there.rows  # — no model has read it: it may end the process that does
    np.testing.assert_array_equal(here.states, there.states)
