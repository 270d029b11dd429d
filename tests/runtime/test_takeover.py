"""An answer belongs to the text: however the input moves, nothing is asked that the output has.

The laws are tested on sequences of changes, with a dictionary of texts as the oracle and an engine
that notes what it is asked. A run reads what no earlier run of the output has read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from changing_corpus import TOPIC, TOXIC, Corpus, Killed, texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.integrity.gc import collect_garbage
from pipeline.ledger.keys import index_key
from pipeline.runtime.run import run


def test_a_corpus_that_changes_its_form_is_asked_about_new_texts_alone(
    new_corpus: Callable[[], Corpus],
) -> None:
    corpus = new_corpus()
    for number in range(20):
        corpus.write(f"{number}.jsonl", texts(str(number), 5))
    outcome, asked = corpus.run()
    assert len(asked) == 2 * 100
    for number in range(20):  # compacted into two
        (corpus.root / "in" / f"{number}.jsonl").unlink()
    old, corpus.files = corpus.files, {}
    for number in range(2):
        corpus.write(
            f"big{number}.jsonl",
            [t for n in range(20) if n % 2 == number for t in old[f"{n}.jsonl"]],
        )
    outcome, asked = corpus.run()
    assert not asked
    corpus.check(outcome)
    corpus.move("elsewhere")
    corpus.shard_bytes = 700
    outcome, asked = corpus.run()
    assert not asked
    corpus.check(outcome)
    corpus.write("day2.jsonl", texts("day2", 7))
    outcome, asked = corpus.run()
    assert {text for _, text in asked} == set(texts("day2", 7)) and len(asked) == 14
    corpus.check(outcome)
    corpus.tasks = [TOXIC, {**TOPIC, "question": "What about?"}]
    _, asked = corpus.run()
    assert {task for task, _ in asked} == {"topic"} and len(asked) == 107


def test_a_task_that_no_other_shard_answers_does_not_keep_the_others_from_it(
    new_corpus: Callable[[], Corpus],
) -> None:
    corpus = new_corpus()
    corpus.tasks = [TOXIC]
    corpus.write("a.jsonl", texts("a", 6))
    corpus.run()
    corpus.move("elsewhere")
    corpus.tasks = [TOXIC, TOPIC]
    outcome, asked = corpus.run()
    assert sorted(asked) == sorted(("topic", text) for text in texts("a", 6))
    corpus.check(outcome)


def test_without_its_index_an_output_takes_the_same_answers_over(
    new_corpus: Callable[[], Corpus],
) -> None:
    corpus = new_corpus()
    corpus.write("a.jsonl", texts("a", 6))
    corpus.run()
    corpus.move("second")
    _, asked = corpus.run()
    index = corpus.root / "out" / index_key(1)
    assert not asked and index.exists()
    shutil.rmtree(index.parent)
    corpus.move("third")
    outcome, asked = corpus.run()
    assert not asked and index.exists()
    index.write_bytes(index.read_bytes()[:-20])
    corpus.move("fourth")
    outcome, asked = corpus.run()
    assert not asked
    corpus.check(outcome)


def test_a_text_of_another_length_with_the_same_hash_is_asked(
    new_corpus: Callable[[], Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = new_corpus()
    corpus.write("a.jsonl", ["a text", "another text"])
    corpus.run()
    known = "5" * 32
    monkeypatch.setattr("pipeline.sources.documents.short_hash", lambda _data: known)
    corpus.write("b.jsonl", ["one"])
    corpus.run()
    corpus.write("c.jsonl", ["three"])
    _, asked = corpus.run()
    assert asked == [("toxic", "three"), ("topic", "three")]


CHANGE = st.one_of(
    st.tuples(st.just("write"), st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=6)),
    st.tuples(st.just("delete"), st.sampled_from("abc")),
    st.tuples(st.just("move"), st.sampled_from(["x", "y", "z"])),
    st.tuples(st.just("copy"), st.sampled_from("abc"), st.sampled_from("abc")),
    st.tuples(st.just("join")),
    st.tuples(st.just("shards"), st.sampled_from([600, 1_500, 100_000])),
    st.tuples(st.just("reword"), st.sampled_from(["Rude?", "Polite?"])),
    st.tuples(st.just("gc")),
    st.tuples(st.just("kill"), st.integers(1, 25)),
    st.tuples(st.just("two runs"), st.integers(1, 25)),
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(changes=st.lists(CHANGE, min_size=1, max_size=6))
def test_whatever_changes_the_answers_are_those_of_a_fresh_run_and_nothing_is_asked_twice(
    new_corpus: Callable[[], Corpus], changes: list[tuple[Any, ...]]
) -> None:
    corpus = new_corpus()
    answered: set[tuple[str, str, str]] = set()  # task, question, text
    corpus.write("a.jsonl", [f"text {n}" for n in range(5)])
    collected = False
    for kind, *values in [("start",), *changes]:
        apply(corpus, kind, values)
        if kind == "gc":
            collect_garbage(
                corpus.spec, cache_dir=corpus.root / "cache", keep=1, delete=True, older_than_days=0
            )
            collected = True
            continue
        if not any(corpus.files.values()):
            corpus.write("a.jsonl", ["text 0"])
        wanted = wanted_of(corpus)
        begun: set[tuple[str, str, str]] = set()  # asked by a run that was killed
        lost: set[tuple[str, str, str]] = set()  # of those: in the shard that it was at
        if kind == "kill":
            corpus.run_until(values[0], kill)
            begun, lost = versions(corpus, corpus.asked), versions(corpus, corpus.last_asked)
        if kind == "two runs":
            outcome = corpus.run_until(values[0], lambda: complete(corpus))
            assert outcome is not None and outcome.complete
            asked = list(corpus.asked)
        else:
            outcome, asked = corpus.run()
            assert len(asked) == len(set(asked))
        corpus.check(outcome)
        new = versions(corpus, asked)
        assert new & begun <= lost
        assert wanted - answered <= new | begun
        if not collected:  # gc deletes what no snapshot names
            assert new <= wanted - answered
        answered |= wanted


def wanted_of(corpus: Corpus) -> set[tuple[str, str, str]]:
    """All texts of the corpus with each task and its question."""
    texts = {text for texts in corpus.files.values() for text in texts if text}
    return versions(corpus, [(task["name"], text) for task in corpus.tasks for text in texts])


def versions(corpus: Corpus, asked: list[tuple[str, str]]) -> set[tuple[str, str, str]]:
    """The tasks and texts with the questions of the tasks."""
    question = {task["name"]: task["question"] for task in corpus.tasks}
    return {(task, question[task], text) for task, text in asked}


def kill() -> None:
    raise Killed


def complete(corpus: Corpus) -> None:
    """A whole run of the same spec."""
    assert run(corpus.spec, cache_dir=corpus.root / "cache").complete


def apply(corpus: Corpus, kind: str, values: list[Any]) -> None:
    folder = corpus.root / corpus.folder
    match kind, values:
        case "write", [name, numbers]:
            corpus.write(f"{name}.jsonl", [f"text {n}" if n else "" for n in numbers])
        case "delete", [name]:
            if corpus.files.pop(f"{name}.jsonl", None) is not None:
                (folder / f"{name}.jsonl").unlink()
        case "move", [name]:
            if corpus.folder != name:
                corpus.move(name)
        case "copy", [source, target]:
            corpus.write(f"{target}.jsonl", list(corpus.files.get(f"{source}.jsonl", ["text 1"])))
        case "join", []:
            joined = [text for texts in corpus.files.values() for text in texts]
            for name in list(corpus.files):
                (folder / name).unlink()
            corpus.files.clear()
            corpus.write("a.jsonl", joined)
        case "shards", [size]:
            corpus.shard_bytes = size
        case "reword", [question]:
            corpus.tasks = [{**TOXIC, "question": question}, TOPIC]


def test_only_what_is_missing_is_work(new_corpus: Callable[[], Corpus]) -> None:
    corpus = new_corpus()
    corpus.write("a.jsonl", texts("a", 3))
    outcome, _ = corpus.run()
    assert outcome.tally.created == 3
    again, asked = corpus.run()
    assert (again.tally.created, asked, again.snapshot) == (0, [], outcome.snapshot)
