"""The condition of a task: which documents its question is asked about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pytest
from changing_corpus import TOPIC, Corpus, decided, kill, numbered
from fake_engine import p_of

from pipeline.errors import SpecError
from pipeline.runtime.conditions import accepted_by
from pipeline.runtime.readers import LoadedReader
from pipeline.sources.rule import Rule
from pipeline.stores.store import PROBE_KEY
from pipeline.verbs.run import RunResult
from pipeline.verbs.status import TaskStatus, status

LANGUAGES = ("en", "de", None)


def topic(when: str | None = None, **more: Any) -> dict[str, Any]:
    return {**TOPIC, **more, **({} if when is None else {"when": when})}


def asked_of_topic(corpus: Corpus) -> set[str]:
    return {text for question, text in corpus.asked if question == "topic"}


def accepted(corpus: Corpus, of: Callable[[str, int], bool]) -> dict[str, str]:
    """The documents for which the oracle is true, of the text and the row in its file."""
    return {
        name: text
        for name, text in corpus.texts.items()
        if text and of(text, int(name.rpartition("-")[2]))
    }


def check(corpus: Corpus, expected: Mapping[str, str]) -> None:
    """The topic of the current snapshot is that of the model for these documents, or skipped."""
    rows = corpus.rows("topic")
    assert [*rows] == [*corpus.texts]
    for name, text in corpus.texts.items():
        row = rows[name]
        if name not in expected:
            assert (row["status"], row["label"]) == ("skipped" if text else "empty", None)
            continue
        assert row["status"] == "ok"
        assert row["p"]["law"] == pytest.approx(p_of("topic", text), abs=1e-6)
    corpus.verify()


def write(corpus: Corpus, count: int = 30) -> list[str]:
    texts = ["", *numbered("a", count)]
    corpus.write("a", texts, lang=[LANGUAGES[row % 3] for row in range(len(texts))])
    return texts


WHENS: dict[str, Callable[[str, int], bool]] = {
    "toxic.p.toxic > 0.5": lambda text, _: p_of("first", text) > 0.5,
    "toxic.label = 'clean' and doc.lang = 'en'": (
        lambda text, row: p_of("first", text) <= 0.5 and row % 3 == 0
    ),
    "doc.lang is null": lambda _, row: row % 3 == 2,
    "n_chars > 100 or doc_id like '%-7'": lambda text, row: len(text) > 100 or row == 7,
    "cast(doc.lang as int) > 3": lambda *_: False,
    "toxic.margin < 2 and sample >= 0": lambda *_: True,
}


@pytest.mark.parametrize("when", WHENS)
def test_a_question_is_asked_of_the_documents_that_its_condition_accepts(
    when: str, plain: Corpus
) -> None:
    write(plain)
    plain.shard_bytes = 7_000
    plain.others = [topic(when)]
    outcome = plain.run()
    expected = accepted(plain, WHENS[when])
    assert outcome.complete and outcome.shards > 1
    assert asked_of_topic(plain) == {*expected.values()}
    check(plain, expected)
    readable = sum(map(bool, plain.texts.values()))
    skipped = readable - len(expected)
    assert outcome.tally.n.by("skipped")["topic"] == skipped
    assert RunResult.of(outcome).skipped == ({"topic": skipped} if skipped else {})
    words = sum(row % 3 < 2 for row in range(len(plain.texts)))
    assert outcome.tally.n["undecided",] == (words if "cast" in when else 0)
    counted = status(plain.spec, cache_dir=plain.cache)
    assert counted.tasks["topic"] == TaskStatus(len(plain.texts), 0, 0, skipped)
    assert plain.run().tally.n["created",] == 0


def test_a_question_that_waits_for_a_classifier_shares_the_reading_of_the_others(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    label, readings = LoadedReader.label, list[set[str]]()

    def counted(reader: LoadedReader, *others: Any) -> Any:
        readings.append({*others[3]})
        return label(reader, *others)

    monkeypatch.setattr(LoadedReader, "label", counted)
    plain.write("a", ["The weather is nice today", "Das Wetter ist heute schön", ""])
    language = {"name": "language", "classifier": {"kind": "language"}, "labels": ["en", "de"]}
    plain.before = [language]
    plain.others = [topic("language.label = 'de'")]
    assert plain.run().complete
    assert readings == [{"toxic", "topic"}]
    assert asked_of_topic(plain) == {"Das Wetter ist heute schön"}
    assert {text for question, text in plain.asked if question == "first"} == {
        "The weather is nice today",
        "Das Wetter ist heute schön",
    }


def test_a_condition_on_the_input_alone_is_computed_few_times_a_shard(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each question that is answered, and each file."""
    computed: list[str] = []

    def counted(*arguments: Any) -> Any:
        computed.append(arguments[1].name)
        return accepted_by(*arguments)

    monkeypatch.setattr("pipeline.runtime.shard_labels.accepted_by", counted)
    write(plain)
    plain.shard_bytes = 1_000_000
    plain.others = [topic("doc.lang = 'en'")]
    assert plain.run().complete
    assert len(computed) <= 3  # before the first question, after each answer, with the statuses
    check(plain, accepted(plain, lambda _, row: row % 3 == 0))


def test_a_task_with_a_condition_may_come_later(plain: Corpus) -> None:
    """The answers that it names are read from their label files."""
    write(plain)
    plain.run()
    plain.others = [topic("toxic.label = 'toxic'")]
    plain.run()
    expected = accepted(plain, lambda text, _: p_of("first", text) > 0.5)
    assert {*plain.asked} == {("topic", text) for text in expected.values()}
    check(plain, expected)


def test_a_retry_that_was_killed_between_two_tasks_is_made_whole(plain: Corpus) -> None:
    texts = write(plain)
    failed = [text for text in texts if text and p_of("first", text) > 0.5][:3]
    plain.broken |= {("first", text) for text in failed}
    plain.others = [topic("toxic.p.toxic > 0.5")]
    plain.run()
    plain.broken.clear()
    assert plain.run_until(2, kill, folder="retries/", retry_failed=True) is None
    assert plain.run(retry_failed=True).complete
    check(plain, accepted(plain, lambda text, _: p_of("first", text) > 0.5))


def test_a_cascade_may_have_a_condition_and_be_named_in_one(plain: Corpus) -> None:
    write(plain, 60)
    plain.before = [topic("doc.lang = 'en'")]
    plain.stages = [{"question": "first"}, {"question": "second"}]
    plain.others = [
        {"name": "third", "question": "third", "labels": ["no", "yes"], "when": "toxic.stage = 2"}
    ]
    plain.decide(0.3, 0.7)
    assert plain.run().complete
    texts = accepted(plain, lambda *_: True)
    doubtful = {text for text in texts.values() if decided(text, 0.3, 0.7)[0] == 2}
    english = accepted(plain, lambda _, row: row % 3 == 0)
    assert {*plain.asked} == (
        {("topic", text) for text in english.values()}
        | {("first", text) for text in texts.values()}
        | {(question, text) for question in ("second", "third") for text in doubtful}
    )
    check(plain, english)


@pytest.mark.parametrize("is_when", [True, False])
def test_a_condition_that_takes_too_long_fails_its_shard_and_quarantines_no_row(
    is_when: bool, plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # — the first file has more rows than a condition is tried on before the run
    plain.write("a", numbered("a", 120), lang=["en"] * 120)
    slow = numbered("b", 3)
    plain.write("b", slow, lang=["slow"] * 3)
    plain.shard_bytes = 1_000_000
    verdicts = Rule.verdicts

    def limited(rule: Rule, rows: pa.RecordBatch) -> pa.BooleanArray:
        if "slow" in str(rows.to_pydict()):
            raise rule._wrong("takes more than 300 s for 3 documents")
        return verdicts(rule, rows)

    options = {} if is_when else {"where": "lang is not null"}
    plain.others = [topic("doc.lang is not null")] if is_when else []
    with monkeypatch.context() as patch:
        patch.setattr(Rule, "verdicts", limited)
        outcome = plain.run(**options)
    assert not outcome.complete and outcome.missing_shards == 1
    [reason] = outcome.failed_shards
    place = "tasks.1.when" if is_when else "where"
    assert reason.startswith(f"{plain.input}/b.jsonl: rows 0 to 3: {place}: takes more than 300 s")
    left = [object.key for object in plain.store.list("attempts/")]
    assert left == [PROBE_KEY]
    assert plain.run(**options).complete and {text for _, text in plain.asked} == {*slow}
    assert {row["status"] for row in plain.rows().values()} == {"ok"}


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        ("topics.label = 'law'", r"topics is not in the scope of a condition, which has doc_id, "),
        ("later.label = 'no'", r"later is not in the scope .*a task must be one before this one"),
        ("lang = 'en'", r"lang is not in the scope of a condition.* doc\.COLUMN, toxic"),
        ("doc.langs = 'en'", r"have no value in langs; name a column of the input"),
        ("toxic.lable = 'clean'", r"lable"),
        ("toxic.p.toxic", r"is float, not a boolean"),
        ("toxic.p.toxic >", r"is not one SQL expression"),
    ],
)
def test_a_wrong_condition_is_refused_by_its_place_before_any_work(
    when: str, reason: str, plain: Corpus
) -> None:
    write(plain)
    later = {"name": "later", "question": "later", "labels": ["no", "yes"]}
    plain.others = [topic(when), later]
    with pytest.raises(SpecError, match=rf"^tasks\.1\.when: .*{reason}"):
        plain.run()
    written = {item.key.partition("/")[0] for item in plain.store.list("")}
    assert not plain.asked and written <= {"inputs"}
