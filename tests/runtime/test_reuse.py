"""An answer belongs to the text: however input and spec change, nothing is asked that is known.

`test_histories` has the law; here are the changes that it makes rarely, sizes, and what each costs.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from changing_corpus import TOPIC, TOXIC, Corpus, kill, numbered, read_in_float32
from command import WITH_MODEL, assay
from transformers import PreTrainedTokenizerFast

from pipeline.ledger.dataset import open_labels
from pipeline.ledger.keys import index_key, parse_key
from pipeline.ledger.snapshots import read_snapshot
from pipeline.ledger.text_index import LEAST_SOURCES
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.plan import SMALL_INPUT_BYTES
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore
from pipeline.verbs.status import status

MOOD = {"name": "mood", "question": "mood", "labels": ["glad", "sad"]}


def step(corpus: Corpus, asked: dict[str, Sequence[str]], *, creates: bool) -> Outcome:
    """A run that asks exactly this about each text, by question, and reads no other text."""

    def objects() -> int:
        return sum(len([*corpus.store.list(folder)]) for folder in ("documents/", "labels/"))

    before, limit = objects(), corpus.max_tokens
    outcome = corpus.run()
    pairs = {(question, text[:limit]) for question, texts in asked.items() for text in texts}
    texts_read = {text for _, text in pairs}
    assert corpus.asked == Counter(pairs)
    assert outcome.complete and outcome.tally.n.asked == len(texts_read)
    assert outcome.tally.n.total_of("prefix_tokens") == sum(map(len, texts_read))
    assert outcome.tally.n["created",] == objects() - before
    assert bool(outcome.tally.n["created",]) == creates
    assert outcome.snapshot is not None
    snapshot = read_snapshot(corpus.store, outcome.snapshot)
    assert snapshot["rows"] == outcome.rows == len(corpus.texts)
    assert {*snapshot["tasks"]} == {task["name"] for task in corpus.tasks}
    corpus.check()
    return outcome


def test_nothing_is_asked_of_moved_texts_that_another_run_labels_meanwhile(plain: Corpus) -> None:
    """The other run publishes after this one has listed what is missing: both take it over."""
    plain.write("a", numbered("a", 24))
    plain.run()
    plain.move("z")

    def other_run() -> None:
        assert plain.run().complete and not plain.asked

    outcome = plain.run_until(1, other_run, folder="specs/")
    assert outcome is not None and outcome.complete and not plain.asked


def test_each_change_of_the_input_costs_what_it_changes(plain: Corpus) -> None:
    plain.others, plain.shard_bytes = [TOPIC], 10_000
    plain.write("a", numbered("a", 24))
    plain.write("b", numbered("b", 24))
    every = [*plain.texts.values()]
    first = step(plain, {"first": every, "topic": every}, creates=True)
    assert step(plain, {}, creates=False).snapshot == first.snapshot == 1
    plain.write("c", numbered("c", 24))
    step(plain, {"first": numbered("c", 24), "topic": numbered("c", 24)}, creates=True)
    edited = [*numbered("b", 24)[1:], "added to b"]
    edited[3], edited[20] = "new in b", "new in b as well"
    new = [edited[3], edited[20], edited[-1]]
    plain.write("b", edited)
    outcome = step(plain, {"first": new, "topic": new}, creates=True)
    assert outcome.tally.n.total_of("rows") == len(edited)
    plain.delete("a")
    step(plain, {}, creates=False)
    plain.write("a", numbered("a", 24))
    step(plain, {}, creates=False)
    plain.write("c", numbered("c", 24)[:-1])
    step(plain, {}, creates=True)
    plain.write("c", [*numbered("c", 24)[:-2], "edited in c"])
    plain.others = [TOPIC, MOOD]
    # — the new text is read once, for the old tasks and the new one
    every = [*plain.texts.values()]
    asked = {"first": ["edited in c"], "topic": ["edited in c"], "mood": every}
    outcome = step(plain, asked, creates=True)
    assert outcome.tally.n.total_of("rows") == outcome.tally.n.by("rows").total() == outcome.rows


def test_each_change_of_the_spec_costs_what_it_changes(
    plain: Corpus,
    tmp_path: Path,
    make_network: Callable[..., Any],
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    plain.others, plain.shard_bytes = [TOPIC], 10_000
    plain.write("a", numbered("a", 24))
    every = [*plain.texts.values()]
    step(plain, {"first": every, "topic": every}, creates=True)
    plain.task = {**TOXIC, "question": "reworded"}
    step(plain, {"reworded": every}, creates=True)
    plain.others = [TOPIC, MOOD]
    step(plain, {"mood": every}, creates=True)
    plain.task, plain.others = TOPIC, [MOOD]
    step(plain, {}, creates=False)
    plain.task, plain.others, plain.name = TOXIC, [], "another"
    step(plain, {}, creates=False)
    plain.task, plain.others, plain.name = TOPIC, [MOOD], "job"
    network = make_network("llama")
    network.lm_head.weight.data.neg_()
    network.save_pretrained(tmp_path / "revision")
    byte_tokenizer.save_pretrained(tmp_path / "revision")
    before, plain.model = plain.model, read_in_float32(tmp_path / "revision")
    step(plain, {"topic": every, "mood": every}, creates=True)
    plain.model = before
    step(plain, {}, creates=False)
    unlimited = plain.rows("topic")
    plain.settings = {"documents": {"max_tokens": 40}}
    step(plain, {"topic": every, "mood": every}, creates=True)
    plain.settings = {}
    step(plain, {}, creates=False)
    assert plain.rows("topic") == unlimited


def test_a_task_that_no_other_shard_answers_does_not_keep_the_others_from_it(plain: Corpus) -> None:
    plain.write("a", numbered("a", 6))
    plain.run()
    plain.move("elsewhere")
    plain.others = [TOPIC]
    plain.run()
    assert plain.asked == Counter(("topic", text) for text in numbered("a", 6))
    plain.check()


def test_without_its_index_an_output_reuses_the_same_answers(plain: Corpus) -> None:
    plain.write("a", numbered("a", 6))
    plain.run()
    plain.move("second")
    plain.run()
    index = plain.folder / "out" / index_key(1)
    assert not plain.asked and index.exists()
    shutil.rmtree(index.parent)
    plain.move("third")
    plain.run()
    assert not plain.asked and index.exists()
    index.write_bytes(index.read_bytes()[:-20])
    plain.move("fourth")
    plain.run()
    assert not plain.asked
    plain.check()


def test_a_text_of_another_length_with_the_same_hash_is_asked(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.write("a", ["a text", "another text"])
    plain.run()
    same_hash = "5" * 32
    monkeypatch.setattr("pipeline.sources.documents.short_hash", lambda _data: same_hash)
    plain.write("b", ["one"])
    plain.run()
    plain.write("c", ["three"])
    plain.run()
    assert plain.asked == {("first", "three"): 1}


def test_equal_texts_are_read_once_in_a_shard_and_not_again_in_a_later_run(plain: Corpus) -> None:
    corpus = plain
    corpus.others, corpus.shard_bytes = [TOPIC], 100_000
    known = numbered("all", 20)
    for number in range(5):  # 100 documents, of which each text has five
        corpus.write(str(number), [*known[number:], *known[:number]])
    planned = corpus.plan()
    assert (planned.rows, planned.distinct) == (100, 20)
    assert not corpus.store.root.exists()
    tally = corpus.run().tally
    corpus.check()
    corpus.assert_asked((question, text) for question in ("first", "topic") for text in known)
    assert 20 < tally.n.asked == planned.rows_for_model == corpus.asked.total() // 2 <= 100
    assert tally.n.total_of("rows") == 100 and tally.n.by("rows") == {"ok": 100}
    assert tally.n.labels["toxic"].total() == tally.n.labels["topic"].total() == 100
    for number in range(5, 10):
        corpus.write(str(number), [*known[number:], *known[:number]])
    planned = corpus.plan()
    outcome = corpus.run()
    corpus.check()
    tally = outcome.tally
    assert (planned.rows_for_model, tally.n.asked, corpus.asked.total()) == (0, 0, 0)
    counted = status(corpus.spec, cache_dir=corpus.cache)
    assert counted.tasks["toxic"].done == 200
    assert counted.reused == dict.fromkeys(("toxic", "topic"), tally.n["reused",])
    again = corpus.run()
    assert (again.tally.n["created",], again.snapshot) == (0, outcome.snapshot) and not corpus.asked


def test_a_shard_whose_texts_are_in_many_others_reads_few_of_their_files(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = plain
    corpus.shard_bytes = 1_500  # two rows
    known = numbered("all", 60)
    corpus.write("a", known)
    assert corpus.run().shards == 30
    corpus.shard_bytes = 100_000
    corpus.write("b", [*known[::2], "a new text"])
    reads: Counter[str] = Counter()
    read = LocalStore.read

    def counted(store: LocalStore, key: str) -> bytes:
        reads[key.partition("/")[0]] += 1
        return read(store, key)

    monkeypatch.setattr(LocalStore, "read", counted)
    outcome = corpus.run()
    # — of the sources, of the shard itself, and in the checks of the run
    assert reads["labels"] <= LEAST_SOURCES + 2
    assert outcome.tally.n["reused",] == LEAST_SOURCES
    assert corpus.asked.total() == 31 - LEAST_SOURCES
    corpus.check()


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_large_input_is_read_on_the_workers_and_known_texts_not_again(
    command: Sequence[str], write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    large = SMALL_INPUT_BYTES // 16
    known = [f"{number} says a lot. " * (large // 14) for number in range(9)]
    for name, part in (("a", known), ("b", known[::-1])):
        lines = [json.dumps({"id": f"{name}{n}", "text": text}) for n, text in enumerate(part)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    path = write_spec(
        input={"path": str(tmp_path / "[ab].jsonl"), "id": "id", "shard_bytes": 3 * large},
        documents={"max_tokens": 64},
    )
    code, result, errors = assay(path, command=command)
    assert code == 0, errors
    assert (result["documents_labelled"], result["documents_read_by_model"]) == (18, 18)
    for name, text in (("c", known), ("d", ["A new text."]), ("e", known)):
        lines = [json.dumps({"id": f"{name}{n}", "text": text}) for n, text in enumerate(text)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    path.write_text(path.read_text().replace("[ab].jsonl", "[a-e].jsonl"))
    code, result, errors = assay(path, command=command)
    assert code == 0, errors
    assert (result["documents_labelled"], result["documents_read_by_model"]) == (19, 1)
    assert "19 new documents to read" in errors
    labels = open_labels(load_spec(path).output).to_table(columns=["doc_id", "toxic"]).to_pylist()
    answers = {row["doc_id"]: row["toxic"] for row in labels}
    assert len(answers) == 37
    for n in range(9):  # — in other batches, float32 sums have another order
        assert answers[f"c{n}"] in (answers[f"a{n}"], answers[f"b{8 - n}"])


def test_a_resumed_first_run_reads_no_text_twice_and_compares_none(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.shard_bytes = 600
    for name in "abcdef":
        plain.write(name, [*numbered(name, 4), "in every file"])
    assert plain.run_until(12, kill) is None
    finished = {key.sid for item in plain.store.list("labels/") if (key := parse_key(item.key))}
    assert finished
    read: Counter[str] = Counter()

    def counted(shard: Shard, options: Any) -> Any:
        read[shard.id] += 1
        return read_documents(shard, options)

    monkeypatch.setattr("pipeline.runtime.reading.read_documents", counted)
    monkeypatch.setattr("pipeline.runtime.plan.shards_with_texts", None)
    outcome = plain.run()
    assert outcome.complete and outcome.shards > len(finished)
    left = {shard.id for shard in outcome.plan.shards} - finished
    assert read == Counter(dict.fromkeys(left, 1))
    assert not [*plain.store.list("index/")]
    plain.check()
