"""Of equal texts one is read, in whatever shards they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from changing_corpus import TOPIC, TOXIC, Corpus, texts
from command import WITH_MODEL, assay

from pipeline.integrity.gc import collect_garbage
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.snapshots import read_snapshot
from pipeline.options import RunOptions
from pipeline.runtime.dry_run import dry_run
from pipeline.runtime.job import SMALL_INPUT_BYTES
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.run import run
from pipeline.spec.parse import load_spec
from pipeline.verbs.status import status


@pytest.mark.parametrize("shard_bytes", [1_500, 100_000])
def test_equal_texts_are_read_once_whatever_shards_have_them(
    new_corpus: Callable[[], Corpus], shard_bytes: int
) -> None:
    corpus = new_corpus()
    corpus.shard_bytes = shard_bytes
    known = texts("all", 20)
    for number in range(10):  # 200 documents, of which each text has ten
        corpus.write(f"{number}.jsonl", [*known[number:], *known[:number]])
    planned = dry_run(corpus.spec, cache_dir=corpus.root / "cache")
    assert (planned.rows, planned.distinct, planned.rows_for_model) == (200, 20, 20)
    assert not corpus.store.root.exists()
    outcome, asked = corpus.run()
    assert sorted(asked) == sorted((task, text) for task in ("toxic", "topic") for text in known)
    corpus.check(outcome)
    tally = outcome.tally
    assert (tally.rows, tally.asked_rows) == (200, 20) and tally.status == {"ok": 200}
    assert tally.labels["toxic"].total() == tally.labels["topic"].total() == 200
    found = status(corpus.spec, cache_dir=corpus.root / "cache")
    assert found.tasks["toxic"].done == 200
    assert found.taken_over == dict.fromkeys(("toxic", "topic"), tally.taken_over)
    sources = [taken_over(corpus, outcome, name) for name in ("toxic", "topic")]
    assert sources[0] == sources[1] and sum(sources[0].values()) == tally.taken_over > 180
    again, asked = corpus.run()
    assert (again.tally.created, asked, again.snapshot) == (0, [], outcome.snapshot)


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_large_input_is_read_on_the_workers_and_its_equal_texts_once(
    command: Sequence[str], write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    large = SMALL_INPUT_BYTES // 16
    known = [f"{number} says a lot. " * (large // 17) for number in range(9)]
    for name, part in (("a", known), ("b", known[::-1])):
        lines = [json.dumps({"id": f"{name}{n}", "text": text}) for n, text in enumerate(part)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    path = write_spec(
        input={"path": str(tmp_path / "[ab].jsonl"), "id": "id", "shard_bytes": 3 * large},
        documents={"max_tokens": 64},
    )
    code, result, errors = assay(path, command=command)
    assert code == 0, errors
    assert (result["documents_labelled"], result["documents_read_by_model"]) == (18, 9)
    assert "first 9 texts that several shards have" in errors
    labels = open_labels(load_spec(path).output).to_table(columns=["doc_id", "toxic"]).to_pylist()
    answers = {row["doc_id"]: row["toxic"] for row in labels}
    assert all(answers[f"a{n}"] == answers[f"b{8 - n}"] for n in range(9)) and len(answers) == 18


def taken_over(corpus: Corpus, outcome: Outcome, task: str) -> Counter[str]:
    """The rows by the shard that their answers are of, from the metadata of all label files."""
    assert outcome.snapshot is not None
    counts: Counter[str] = Counter()
    for file in read_snapshot(corpus.store, outcome.snapshot)["files"]:
        if file["task"] == task:
            metadata = pq.read_schema(corpus.root / "out" / file["key"]).metadata
            counts.update(json.loads(metadata.get(b"assay.taken_over", b"{}")))
    return counts


def test_a_task_that_is_added_asks_about_repeated_texts_together_with_the_others(
    new_corpus: Callable[[], Corpus],
) -> None:
    corpus = new_corpus()
    corpus.tasks = [TOXIC]
    corpus.write("a.jsonl", texts("old", 4))
    corpus.run()
    corpus.tasks = [TOXIC, TOPIC]
    for name in "bc":
        corpus.write(f"{name}.jsonl", texts("new", 6))
    outcome, asked = corpus.run()
    new = [(task, text) for task in ("toxic", "topic") for text in texts("new", 6)]
    assert sorted(asked) == sorted([*new, *(("topic", text) for text in texts("old", 4))])
    # — each new text was read once for both tasks
    assert outcome.tally.asked_rows == 10
    corpus.check(outcome)


def test_of_a_slice_repeated_texts_are_read_once(new_corpus: Callable[[], Corpus]) -> None:
    corpus = new_corpus()
    for number in range(4):
        corpus.write(f"{number}.jsonl", texts("all", 20))
    options = RunOptions(sample="50%")
    outcome = run(corpus.spec, cache_dir=corpus.root / "cache", options=options)
    assert outcome.slice_rows == outcome.tally.rows == 4 * outcome.tally.asked_rows
    assert 0 < outcome.tally.asked_rows < 20
    first = set(corpus.asked)
    outcome, asked = corpus.run()
    assert len(asked) == len(set(asked)) == 40 - len(first) and first.isdisjoint(asked)
    corpus.check(outcome)


def test_garbage_of_repeated_texts_is_collected_when_the_shards_are_whole(
    new_corpus: Callable[[], Corpus],
) -> None:
    corpus = new_corpus()
    for number in range(4):
        corpus.write(f"{number}.jsonl", texts("all", 6))
    outcome, _ = corpus.run()
    collect_garbage(
        corpus.spec, cache_dir=corpus.root / "cache", keep=1, delete=True, older_than_days=0
    )
    assert len(list(corpus.store.list("labels/"))) == 2 * outcome.shards
    assert len(list(corpus.store.list("documents/"))) == outcome.shards
    again, asked = corpus.run()
    assert (again.tally.created, asked, again.snapshot) == (0, [], outcome.snapshot)
