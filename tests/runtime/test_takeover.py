"""An answer belongs to the text: however the input moves, nothing is asked that the output has.

`test_histories` has the law; here are the changes that it makes rarely, and sizes.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable

import pytest
from changing_corpus import TOPIC, Corpus, numbered

from pipeline.ledger.keys import index_key


@pytest.mark.parametrize("part_rows", [1, 7, 1_000])
def test_a_corpus_that_changes_its_form_is_asked_about_new_texts_alone(
    new_corpus: Callable[[], Corpus], part_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.runtime.answer_sources.PART_ROWS", part_rows)
    corpus = new_corpus()
    corpus.others = [TOPIC]
    for number in range(20):
        corpus.write(str(number), numbered(str(number), 5))
    corpus.run()
    assert corpus.asked.total() == 2 * 100
    for number in range(2):  # compacted into two
        corpus.write(f"big{number}", corpus.delete(*map(str, range(number, 20, 2))))
    corpus.run()
    assert not corpus.asked
    corpus.check()
    corpus.move("elsewhere")
    corpus.shard_bytes = 700
    corpus.run()
    assert not corpus.asked
    corpus.check()
    corpus.write("day2", numbered("day2", 7))
    corpus.run()
    new = [(question, text) for question in ("first", "topic") for text in numbered("day2", 7)]
    assert corpus.asked == Counter(new)
    corpus.check()
    corpus.others = [{**TOPIC, "question": "What about?"}]
    corpus.run()
    assert {question for question, _ in corpus.asked} == {"What about?"}
    assert corpus.asked.total() == 107


def test_a_task_that_no_other_shard_answers_does_not_keep_the_others_from_it(
    new_corpus: Callable[[], Corpus],
) -> None:
    corpus = new_corpus()
    corpus.write("a", numbered("a", 6))
    corpus.run()
    corpus.move("elsewhere")
    corpus.others = [TOPIC]
    corpus.run()
    assert corpus.asked == Counter(("topic", text) for text in numbered("a", 6))
    corpus.check()


def test_without_its_index_an_output_takes_the_same_answers_over(
    new_corpus: Callable[[], Corpus],
) -> None:
    corpus = new_corpus()
    corpus.write("a", numbered("a", 6))
    corpus.run()
    corpus.move("second")
    corpus.run()
    index = corpus.folder / "out" / index_key(1)
    assert not corpus.asked and index.exists()
    shutil.rmtree(index.parent)
    corpus.move("third")
    corpus.run()
    assert not corpus.asked and index.exists()
    index.write_bytes(index.read_bytes()[:-20])
    corpus.move("fourth")
    corpus.run()
    assert not corpus.asked
    corpus.check()


def test_a_text_of_another_length_with_the_same_hash_is_asked(
    new_corpus: Callable[[], Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = new_corpus()
    corpus.write("a", ["a text", "another text"])
    corpus.run()
    known = "5" * 32
    monkeypatch.setattr("pipeline.sources.documents.short_hash", lambda _data: known)
    corpus.write("b", ["one"])
    corpus.run()
    corpus.write("c", ["three"])
    corpus.run()
    assert corpus.asked == {("first", "three"): 1}
