"""Cascades: each document is sent to as few stages as it needs, and to each of these once.

`test_histories` has the law of other thresholds, samples, killed runs and an input that moves.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changing_corpus import (
    QUESTIONS,
    TOPIC,
    Corpus,
    asked_of,
    decided,
    p_of,
    write_shared,
    write_thresholds,
)
from command import WITH_MODEL, assay
from encoders import WORDS, write_encoder
from stages import fail_reads

from pipeline.errors import SpecError
from pipeline.inference.classifiers import language_model
from pipeline.labeller import Labeller
from pipeline.ledger.dataset import open_labels
from pipeline.runtime.job import Run
from pipeline.spec.parse import load_spec
from pipeline.verbs.status import status


@pytest.mark.parametrize(("stages", "low", "high"), [(3, 0.2, 0.8), (2, 0.49, 0.51)])
def test_each_stage_is_asked_what_none_before_it_decided(
    staged: Corpus, stages: int, low: float, high: float
) -> None:
    staged.stages = [{"question": question} for question in QUESTIONS[:stages]]
    staged.others = [TOPIC]  # is answered with the first stage
    texts = write_shared(staged)
    staged.decide(low, high)
    outcome = staged.run()
    assert outcome.complete and outcome.snapshot == 1
    staged.check(low, high)
    topics = {("topic", text) for text in texts.values() if text}
    staged.assert_asked(asked_of(texts.values(), low, high, QUESTIONS[:stages]) | topics)
    tally = outcome.tally
    by_stage = Counter(
        decided(text, low, high, QUESTIONS[:stages])[0] for text in texts.values() if text
    )
    counted = tally.n.by("decided", "toxic")
    assert {int(stage): rows for stage, rows in counted.items()} == by_stage
    assert (tally.n.total_of("rows"), tally.n.by("rows")) == (
        len(texts),
        {"ok": len(texts) - 3, "empty": 3},
    )
    assert tally.n.asked == sum(n for (each, _), n in staged.asked.items() if each == "first")
    assert tally.n.labels["toxic"].total() == tally.n.labels["topic"].total() == len(texts) - 3
    done = status(staged.spec, cache_dir=staged.cache).tasks
    assert {name: task.done for name, task in done.items()} == dict.fromkeys(done, len(texts))
    again = staged.run()
    assert (again.snapshot, again.tally.n["created",], staged.asked) == (1, 0, Counter())


def test_a_task_of_the_same_question_reuses_the_answers(staged: Corpus) -> None:
    texts = write_shared(staged)
    staged.decide(0.2, 0.8)
    staged.run()
    before = set(staged.asked)
    staged.stages = [{"question": "second"}, {"question": "third"}]
    staged.decide(-1.0, 1.5)
    staged.run()
    distinct = {*texts.values()} - {""}
    expected = {(question, text) for question in ("second", "third") for text in distinct}
    staged.assert_asked(expected - before)


def test_new_thresholds_that_ask_nothing_open_no_input(
    staged: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wider choice leaves to the last stage is answered already."""
    write_shared(staged)
    staged.decide(-1.0, 1.5)
    staged.run()
    opened = fail_reads(monkeypatch, lambda *_: None)
    for low, high in ((0.2, 0.8), (0.49, 0.51), (0.1, 0.7)):
        staged.decide(low, high)
        assert staged.run().tally.n["created",] and not opened and not staged.asked
        staged.check(low, high)
    staged.write("two", ["a new text"])
    staged.run()
    assert opened and {text for _, text in staged.asked} == {"a new text"}


def test_a_plan_counts_the_documents_of_a_cascade(staged: Corpus) -> None:
    texts = write_shared(staged)
    staged.decide(0.2, 0.8)
    planned = staged.plan()
    assert planned.missing_rows == len(texts)
    assert not [*staged.store.list("inputs/"), *staged.store.list("documents/")]
    assert planned.rows_for_model == staged.run().tally.n.asked


def test_a_probability_at_a_threshold_is_decided_by_the_stage(staged: Corpus) -> None:
    staged.write("one", ["text"])
    staged.decide(0.499, 0.501)
    staged.run()
    (row,) = staged.rows().values()
    p = row["p"]["toxic"]
    beyond = float(np.nextafter(np.float32(p), np.float32(p > 0.5)))
    for threshold, stage in ((p, 1), (beyond, 2)):
        staged.decide(*((threshold, 1.5) if p < 0.5 else (-1.0, threshold)))
        staged.run()
        assert [row["stage"] for row in staged.rows().values()] == [stage]


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_classifier_an_encoder_and_a_question_are_stages(
    command: Sequence[str], tmp_path: Path, model_folder: Path
) -> None:
    """The cascade against its stages, each as a task of its own."""
    words = [" ".join(WORDS[start : start + 6]) for start in range(0, 30, 2)]
    texts = ["The weather is nice today", "Das Wetter ist heute schön", *words, ""]
    rows = [{"id": f"{row}", "text": text} for row, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoder = write_encoder(tmp_path / "encoder")
    shutil.copy(language_model()[0], tmp_path / "lid.ftz")
    decoder = {"path": str(model_folder), "dtype": "float32"}
    encodes = {"path": str(encoder), "dtype": "float32"}
    classifier = {"kind": "fasttext", "path": str(tmp_path / "lid.ftz")}
    of_classes = {"english": ["en"], "other": ["de", "fr", "es", "it"]}
    stages: list[dict[str, Any]] = [
        {"classifier": classifier, "labels": of_classes},
        {
            "model": encodes,
            "labels": {"english": ["good"], "other": ["bad", "ugly"]},
            "documents": {"max_tokens": 4},
        },
        {"question": "Is it English?", "labels": {"english": ["yes"], "other": ["no"]}},
    ]

    def write(name: str, model: dict[str, Any], task: dict[str, Any], most: int = 40) -> Path:
        content = {
            "name": name,
            "model": model,
            "input": {"path": str(tmp_path / "in.jsonl"), "id": "id"},
            "documents": {"max_tokens": most},
            "output": str(tmp_path / name),
            "tasks": [{"name": "language", "labels": ["english", "other"], **task}],
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(content))
        return tmp_path / f"{name}.yaml"

    def rows_of(name: str) -> dict[str, dict[str, Any]]:
        columns = ["doc_id", "language"]
        table = open_labels(str(tmp_path / name)).to_table(columns=columns)
        return {row["doc_id"]: row["language"] for row in table.to_pylist()}

    alone = []
    for number, stage in enumerate(stages):
        own = {key: value for key, value in stage.items() if key not in ("model", "documents")}
        most = stage.get("documents", {}).get("max_tokens", 40)
        spec = write(f"stage{number}", stage.get("model", decoder), own, most)
        code, _, errors = assay(spec, command=command)
        assert code == 0, errors
        alone.append(rows_of(f"stage{number}"))
    spec = write("whole", decoder, {"cascade": {"stages": stages}})
    write_thresholds(load_spec(spec), "language", {"other": (0.2, 0.9)}, tmp_path / "cache")
    code, result, errors = assay(spec, command=command)
    assert code == 0, errors
    decided: Counter[str] = Counter()
    for name, row in rows_of("whole").items():
        if row["status"] == "empty":
            assert row["stage"] is None
            continue
        answers = [of_stage[name] for of_stage in alone]
        sure = (n for n, each in enumerate(answers[:-1]) if not 0.2 < each["p"]["other"] < 0.9)
        stage = next(sure, 2)
        decided[str(stage + 1)] += 1
        # — other documents are in a batch of the cascade, so float32 sums have another order
        expected = {**answers[stage], "stage": stage + 1}
        assert row.pop("p") == pytest.approx(expected.pop("p"), abs=1e-6)
        numbers = {name: pytest.approx(expected.pop(name), abs=1e-6) for name in ("mass", "margin")}
        assert row == {**expected, **numbers}
    assert result["decided_by_stage"] == {"language": decided} and len(decided) > 1


def test_a_stage_reads_the_first_tokens_and_a_later_one_the_document(staged: Corpus) -> None:
    """A task with these `documents` is the oracle; its answers are those of the stage."""
    texts = write_shared(staged)
    staged.stages, staged.settings = [], {"documents": {"max_tokens": 7}}
    staged.run()
    alone = staged.rows()
    staged.stages, staged.settings = [{"question": q} for q in QUESTIONS[:2]], {}
    for most in (7, 6):
        staged.stages[0]["documents"] = {"max_tokens": most}
        staged.decide(0.2, 0.8)
        staged.run()
        own = {text: p_of("first", text[:most]) for text in texts.values() if text}
        left = {text for text, p in own.items() if 0.2 < p < 0.8}
        again = {("second", text) for text in left}
        if most == 6:  # — another version of the stage, and the same of the last one
            again = {("first", text[:6]) for text in own} | (again & {*staged.asked})
        assert {*staged.asked} == again and 0 < len(left) < len(own)
        rows = staged.rows()
        for name, text in texts.items():
            row = rows[name]
            if not text:
                assert (row["status"], row["stage"]) == ("empty", None)
            elif text in left:
                assert (row["status"], row["stage"]) == ("ok", 2)
                assert row["p"]["toxic"] == pytest.approx(p_of("second", text), abs=1e-6)
            else:
                assert row["p"]["toxic"] == pytest.approx(own[text], abs=1e-6)
                assert most == 6 or row == {**alone[name], "stage": 1}
                assert row["status"] == ("ok" if len(text) <= most else "truncated")
    staged.verify()


def test_a_stage_that_reads_more_than_the_context_is_named(modelled: Corpus) -> None:
    modelled.write("one", ["text"])
    modelled.stages = [{"question": q} for q in QUESTIONS[:2]]
    modelled.stages[0]["documents"] = {"max_tokens": 4_096}
    modelled.decide(0.2, 0.8)
    with pytest.raises(SpecError, match=r"tasks\.0\.cascade\.stages\.0\.documents\.max_tokens"):
        modelled.run()


@pytest.mark.parametrize(
    ("number", "stage", "place"),
    [
        (1, {"readout": "nowhere"}, "readout"),
        (1, {"question": "second", "model": {"path": "no/such.gguf"}}, "model.path"),
        (1, {"question": "second", "model": {"path": "m", "device": "cuda"}}, "model.device"),
        (0, {"classifier": {"kind": "onnx", "path": "none"}}, "classifier.path"),
    ],
)
def test_what_is_wrong_with_a_stage_is_placed_in_the_whole_spec(
    number: int, stage: dict[str, Any], place: str, staged: Corpus
) -> None:
    staged.write("one", ["text"])
    staged.before = [TOPIC]
    staged.decide(0.2, 0.8)
    staged.stages[number] = stage
    with pytest.raises(SpecError) as raised:
        staged.run()
    (problem,) = raised.value.problems
    assert problem.place == f"tasks.1.cascade.stages.{number}.{place}"


def test_a_labeller_refuses_a_cascade(staged: Corpus) -> None:
    with pytest.raises(SpecError, match="a Labeller asks every question once; remove cascade"):
        Labeller(staged.spec_file)


def test_two_cascades_are_answered_side_by_side(staged: Corpus) -> None:
    texts = write_shared(staged)
    staged.decide(0.2, 0.8)
    staged.run()
    before = set(staged.asked)
    stages = [{"question": "first"}, {"question": "third"}]
    cascade = {"stages": stages}
    staged.others = [{"name": "other", "labels": ["clean", "toxic"], "cascade": cascade}]
    staged.decide(0.4, 0.6, task="other")
    staged.run()
    # — the answers of a task are found under its own name
    distinct = {text for text in texts.values() if text}
    undecided = {text for text in distinct if 0.4 < p_of("first", text) < 0.6}
    expected = {("first", text) for text in distinct} | {("third", text) for text in undecided}
    assert set(staged.asked) == expected and before
    staged.check(0.2, 0.8)


@pytest.mark.parametrize("question", ["first", "second"])
def test_a_text_that_a_stage_cannot_answer_fails_and_is_tried_again(
    staged: Corpus, question: str
) -> None:
    texts = write_shared(staged)
    staged.decide(0.2, 0.8)
    reaching = sorted(
        text for text in {*texts.values()} if text and decided(text, 0.2, 0.8)[0] == 2
    )
    staged.broken.update((question, text) for text in reaching[:2])
    staged.run()
    rows = staged.rows()
    for name, text in texts.items():
        row = rows[name]
        is_broken = text in reaching[:2]
        assert (row["status"] == "error:the model's answer is not a number") == is_broken
        if is_broken:
            assert (row["label"], row["stage"]) == (None, QUESTIONS.index(question) + 1)
    staged.run()
    assert not staged.asked
    staged.broken.discard((question, reaching[0]))
    staged.run(retry_failed=True)
    following = {("second", reaching[0])} if question == "first" else set()
    # — a retry asks about a text in each shard that has it
    assert set(staged.asked) == {*((question, text) for text in reaching[:2]), *following}
    staged.broken.clear()
    staged.run(retry_failed=True)
    following = {("second", reaching[1])} if question == "first" else set()
    assert set(staged.asked) == {(question, reaching[1]), *following}
    staged.check(0.2, 0.8)


def test_a_run_that_its_time_ends_keeps_what_is_answered(
    staged: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time ends before anything is read, then after each stage."""
    texts = write_shared(staged)
    staged.shard_bytes = 3_000
    staged.decide(0.2, 0.8)
    calls: list[Run] = []
    is_over = Run.is_over.fget
    asked: Counter[Any] = Counter()
    for checks in (0, 3, 6, 9):
        left = checks

        def is_over_after(run: Run) -> bool:
            nonlocal left
            left -= 1
            calls.append(run)
            return left < 0

        monkeypatch.setattr(Run, "is_over", property(is_over_after))
        outcome = staged.run(max_hours=1.0)
        assert not outcome.complete and outcome.stopped == "--max-hours 1"
        asked += staged.asked
    assert len(calls) > 24 and asked
    monkeypatch.setattr(Run, "is_over", property(is_over))
    assert staged.run(max_hours=1.0).complete
    asked += staged.asked
    assert {*asked} == asked_of(texts.values(), 0.2, 0.8)
    documents = Counter(texts.values())
    assert all(count <= documents[text] for (_, text), count in asked.items())
    staged.check(0.2, 0.8)
