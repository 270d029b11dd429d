"""Of equal texts one is read in a shard, and none whose answer the output has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from changing_corpus import TOPIC, Corpus, numbered
from command import WITH_MODEL, assay

from pipeline.ledger.dataset import open_labels
from pipeline.ledger.snapshots import read_snapshot
from pipeline.runtime.answer_sources import LEAST_SOURCES
from pipeline.runtime.dry_run import dry_run
from pipeline.runtime.job import SMALL_INPUT_BYTES
from pipeline.runtime.outcome import Outcome
from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore
from pipeline.verbs.status import status


@pytest.mark.parametrize("shard_bytes", [1_500, 100_000])
def test_equal_texts_are_read_once_in_a_shard_and_not_again_in_a_later_run(
    new_corpus: Callable[[], Corpus], shard_bytes: int
) -> None:
    corpus = new_corpus()
    corpus.others, corpus.shard_bytes = [TOPIC], shard_bytes
    known = numbered("all", 20)
    for number in range(5):  # 100 documents, of which each text has five
        corpus.write(str(number), [*known[number:], *known[:number]])
    planned = dry_run(corpus.spec, cache_dir=corpus.cache)
    assert (planned.rows, planned.distinct) == (100, 20)
    assert not corpus.store.root.exists()
    tally = corpus.run().tally
    corpus.check()
    corpus.assert_asked((question, text) for question in ("first", "topic") for text in known)
    assert 20 < tally.asked_rows == planned.rows_for_model == corpus.asked.total() // 2 <= 100
    assert tally.rows == 100 and tally.status == {"ok": 100}
    assert tally.labels["toxic"].total() == tally.labels["topic"].total() == 100
    for number in range(5, 10):
        corpus.write(str(number), [*known[number:], *known[:number]])
    planned = dry_run(corpus.spec, cache_dir=corpus.cache)
    outcome = corpus.run()
    corpus.check()
    tally = outcome.tally
    assert (planned.rows_for_model, tally.asked_rows, corpus.asked.total()) == (0, 0, 0)
    found = status(corpus.spec, cache_dir=corpus.cache)
    assert found.tasks["toxic"].done == 200
    assert found.reused == dict.fromkeys(("toxic", "topic"), tally.reused)
    sources = [taken_over(corpus, outcome, name) for name in ("toxic", "topic")]
    assert sources[0] == sources[1] and sum(sources[0].values()) == tally.reused == 100
    again = corpus.run()
    assert (again.tally.created, again.snapshot) == (0, outcome.snapshot) and not corpus.asked


def test_a_shard_whose_texts_are_in_many_others_reads_few_of_their_files(
    new_corpus: Callable[[], Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = new_corpus()
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
    assert outcome.tally.reused == LEAST_SOURCES
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


def taken_over(corpus: Corpus, outcome: Outcome, task: str) -> Counter[str]:
    """The rows by the shard that their answers are of, from the metadata of all label files."""
    assert outcome.snapshot is not None
    counts: Counter[str] = Counter()
    for file in read_snapshot(corpus.store, outcome.snapshot)["files"]:
        if file["task"] == task:
            metadata = pq.read_schema(corpus.folder / "out" / file["key"]).metadata
            counts.update(json.loads(metadata.get(b"assay.taken_over", b"{}")))
    return counts


def test_a_task_that_is_added_is_asked_about_new_texts_together_with_the_others(
    new_corpus: Callable[[], Corpus],
) -> None:
    corpus = new_corpus()
    corpus.write("a", numbered("old", 4))
    corpus.run()
    corpus.others = [TOPIC]
    corpus.write("b", [*numbered("new", 3), *numbered("old", 2)])
    outcome = corpus.run()
    new = [(question, text) for question in ("first", "topic") for text in numbered("new", 3)]
    corpus.assert_asked([*new, *(("topic", text) for text in numbered("old", 4))])
    # — each text was read once in a shard, whatever it was asked
    assert outcome.tally.asked_rows == 4 + 3 + 2
    corpus.check()
