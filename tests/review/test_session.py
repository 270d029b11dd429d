"""A session shows each person the right documents, and writes every answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gold_lines import lines
from reviews import Clock, Corpus, task_of
from sklearn.metrics import cohen_kappa_score

from pipeline.errors import SpecError, StorageError
from pipeline.gold.people import GoldFile
from pipeline.review.session import (
    DIVERSE,
    RESERVED_S,
    Document,
    RefusedAnswer,
    Session,
    uncertainty,
)
from pipeline.review.view import agreements, task_json, view_json


def hash_of(session: Session, person: str) -> str:
    asked = session.open_document(person)
    assert asked is not None
    return session.pool.documents[asked.row].hash


def test_an_answer_is_a_line_with_what_the_person_saw(corpus: Corpus, file: Path) -> None:
    clock = Clock()
    with corpus.session(file, now=clock) as session:
        text_hash = hash_of(session, "ann")
        clock.pass_(2.5)
        session.answer("ann", text_hash, "label", "toxic")
    [line] = lines(file)
    shown = line.pop("shown")
    row = corpus.pool.rows[text_hash]
    assert line == {
        "doc_id": f"d{row}",
        "content_hash": text_hash,
        "task": "tone",
        "action": "label",
        "label": "toxic",
        "by": "ann",
        "at": "2026-11-26T00:00:02.500+00:00",
        "seconds": 2.5,
    }
    assert shown["question"] == corpus.task.question and shown["labels"] == ["toxic", "clean"]
    assert (shown["p"], shown["blind"], shown["chosen"]) == (None, False, "random")


def test_people_read_the_guide_of_a_task_in_place_of_its_question(file: Path) -> None:
    asked = Corpus(task_of())
    guided = Corpus(asked.task.model_copy(update={"guide": "Rude to a person?"}))
    with guided.session(file) as session:
        assert task_json(session, "")["question"] == "Rude to a person?"
        guided.answers(session, "ann", 1)
    # — another question of the model leaves what people were asked
    with GoldFile.open(file, guided.task.model_copy(update={"question": "Impolite?"})) as gold:
        assert len(gold.lines) == 1
    with pytest.raises(SpecError, match="has an older wording of task tone: question was another"):
        GoldFile.open(file, asked.task)


def test_a_clock_that_is_set_back_refuses_no_answer(corpus: Corpus, file: Path) -> None:
    clock = Clock()
    with corpus.session(file, now=clock) as session:
        text_hash = hash_of(session, "ann")
        clock.pass_(-3600)
        session.answer("ann", text_hash, "label", "toxic")
    assert [line["seconds"] for line in lines(file)] == [0]


def test_two_people_get_different_documents_until_a_reservation_ends(
    corpus: Corpus, file: Path
) -> None:
    clock = Clock()
    with corpus.session(file, now=clock, order="random") as session:
        ann = hash_of(session, "ann")
        assert hash_of(session, "ann") == ann
        assert hash_of(session, "bob") != ann
        clock.pass_(RESERVED_S + 1)
        assert hash_of(session, "cleo") == ann
        session.answer("ann", ann, "label", "clean")  # — late, and still hers
        session.answer("cleo", ann, "skip")
        assert hash_of(session, "dan") != ann


def test_what_one_person_skips_is_shown_to_another_but_not_what_is_flagged(
    corpus: Corpus, file: Path
) -> None:
    with corpus.session(file, order="random") as session:
        skipped = hash_of(session, "ann")
        session.answer("ann", skipped, "skip")
        flagged = hash_of(session, "ann")
        session.answer("ann", flagged, "flag")
        assert hash_of(session, "ann") not in (skipped, flagged)
        assert hash_of(session, "bob") == skipped
        session.answer("bob", skipped, "label", "toxic")
        assert hash_of(session, "bob") != flagged


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("choice", "rude"),
        ("choice", ["toxic"]),
        ("choice", None),
        ("multi", "law"),
        ("multi", ["law", "law"]),
        ("multi", ["law", "sport"]),
        ("score", 1),
    ],
)
def test_a_wrong_label_is_refused_and_not_written(kind: str, label: object, file: Path) -> None:
    corpus = Corpus(task_of(kind))
    with corpus.session(file) as session:
        text_hash = hash_of(session, "ann")
        with pytest.raises(RefusedAnswer, match=r" label"):
            session.answer("ann", text_hash, "label", label)
        assert file.read_bytes() == b"" and hash_of(session, "ann") == text_hash


def test_a_document_that_was_not_shown_or_is_answered_is_refused(
    corpus: Corpus, file: Path
) -> None:
    with corpus.session(file) as session:
        text_hash = hash_of(session, "ann")
        with pytest.raises(RefusedAnswer, match="was not shown to you"):
            session.answer("bob", text_hash, "label", "toxic")
        session.answer("ann", text_hash, "label", "toxic")
        with pytest.raises(RefusedAnswer, match="answered this document already"):
            session.answer("ann", text_hash, "label", "clean")
        assert len(lines(file)) == 1


def test_undo_opens_the_document_again_and_the_next_undo_the_one_before(
    corpus: Corpus, file: Path
) -> None:
    with corpus.session(file) as session:
        with pytest.raises(RefusedAnswer, match="nothing to undo"):
            session.undo("ann")
        first, second = corpus.answers(session, "ann", 2)
        for row in (second, first):
            session.undo("ann")
            assert hash_of(session, "ann") == corpus.pool.documents[row].hash
        assert session.gold.answers == {}
        session.answer("ann", corpus.pool.documents[first].hash, "label", "clean")
        assert [line["action"] for line in lines(file)] == ["label"] * 2 + ["undo"] * 2 + ["label"]
        [answer] = session.gold.answers.values()
        assert answer.label == "clean"


@pytest.mark.parametrize("kind", ["choice", "multi", "score"])
@pytest.mark.parametrize("answered", [False, True])
def test_mixed_is_diverse_then_uncertain_and_random_in_turn(
    kind: str, answered: bool, file: Path
) -> None:
    corpus = Corpus(task_of(kind), answered=answered)
    with corpus.session(file) as session:
        rows = corpus.answers(session, "ann", 45)
    with corpus.session(file) as session:  # — goes on where the last one ended
        rows += corpus.answers(session, "ann", 15)
    reasons = [line["shown"]["chosen"] for line in lines(file)]
    later = ["uncertain", "random"] * 10 if answered else ["random"] * 20
    assert reasons == ["random", *["diverse"] * (DIVERSE - 1), *later] and len({*rows}) == 60
    for place, reason in enumerate(reasons):
        left = np.setdiff1d(np.arange(corpus.rows), rows[:place])
        if reason == "uncertain":
            unsure = uncertainty(corpus.p, session.task.kind)
            assert unsure[rows[place]] == unsure[left].max()
        elif reason == "random":
            ranks = {row: corpus.pool.documents[row].rank for row in left}
            assert rows[place] == min(ranks, key=ranks.__getitem__)


@pytest.mark.parametrize("kind", ["choice", "multi", "score"])
@pytest.mark.parametrize(
    ("order", "blind"), [("random", False), ("random", True), ("audit", False), ("audit", True)]
)
def test_the_stored_answer_is_on_the_page_and_in_the_file_unless_it_is_blind_as_in_an_audit(
    kind: str, order: str, blind: bool, file: Path
) -> None:
    corpus, hidden = Corpus(task_of(kind), answered=True), blind or order == "audit"
    with corpus.session(file, order=order, blind=blind) as session:
        rows = corpus.answers(session, "ann", 60)
        view = view_json(session, "ann")["row"]
        assert task_json(session, "")["blind"] == hidden
    shown = corpus.pool.documents[corpus.pool.rows[view["id"]]].p
    assert view["p"] == (None if hidden else shown)
    for row, line in zip(rows, lines(file), strict=True):
        p = None if hidden else dict(zip(corpus.task.labels, corpus.p[row], strict=True))
        assert (line["shown"]["p"], line["shown"]["blind"]) == (p, hidden)
        assert (line["shown"]["chosen"] == "audit") == (order == "audit")


def test_documents_that_are_read_later_are_shown_too(file: Path) -> None:
    corpus = Corpus(task_of(), rows=3)
    with corpus.session(file) as session:
        corpus.answers(session, "ann", 3)
        assert session.open_document("ann") is None
        corpus.pool.add(Document("f" * 32, "late", "read later", 0))
        corpus.pool.add(Document("f" * 32, "twin", "read later", 1))
        assert hash_of(session, "ann") == "f" * 32 and len(corpus.pool) == 4


def test_an_error_of_reading_is_shown_and_no_answer_is_written(corpus: Corpus, file: Path) -> None:
    with corpus.session(file) as session:
        text_hash = hash_of(session, "ann")
        corpus.pool.error = StorageError("the bucket is gone")
        with pytest.raises(RefusedAnswer, match="the bucket is gone"):
            session.answer("ann", text_hash, "label", "toxic")
        with pytest.raises(RefusedAnswer, match="the bucket is gone"):
            view_json(session, "ann")
    assert file.read_bytes() == b""


def test_second_shows_what_one_person_labelled_and_first_what_people_dispute(
    corpus: Corpus, file: Path
) -> None:
    with corpus.session(file, order="random") as session:
        rows = corpus.answers(session, "ann", 6)
    disputed, agreed = rows[3], rows[1]
    other = {"toxic": "clean", "clean": "toxic"}
    with corpus.session(file, second=True) as session:
        for _ in rows:
            asked = session.open_document("bob")
            assert asked is not None
            label = corpus.label(asked.row)
            if asked.row in (agreed, disputed):
                label = other[label] if asked.row == disputed else label
                session.answer("bob", hash_of(session, "bob"), "label", label)
            else:
                session.answer("bob", hash_of(session, "bob"), "skip")
    with corpus.session(file, second=True) as session:
        shown = corpus.answers(session, "eve", 5)
        assert shown[0] == disputed and {*shown} == {*rows} - {agreed}
        assert session.open_document("eve") is None
        assert session.open_document("dan") is None  # — a majority has decided, or two agree
    assert {line["shown"]["chosen"] for line in lines(file)[6:]} == {"second"}


@pytest.mark.parametrize("rows", [10, 100])
def test_second_reads_the_answers_a_few_times_whatever_their_number(
    rows: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, read = Corpus(task_of(), rows), list[GoldFile]()
    with corpus.session(file, order="random") as session:
        corpus.answers(session, "ann", rows)
    answers = GoldFile.answers.fget
    assert answers is not None
    monkeypatch.setattr(
        GoldFile, "answers", property(lambda gold: (read.append(gold), answers(gold))[1])
    )
    with corpus.session(file, second=True) as session:
        assert session.open_document("bob") is not None
    assert len(read) < 6


@pytest.mark.parametrize("kind", ["choice", "score", "multi"])
@pytest.mark.parametrize("seed", range(5))
def test_kappa_is_that_of_scikit_learn(kind: str, seed: int, file: Path) -> None:
    source, labels = np.random.default_rng(seed), ["0", "1", "2", "3"]
    corpus = Corpus(task_of(kind, labels), rows=30)
    one, other = source.integers(0, 4, (2, corpus.rows))
    other = np.where(source.random(corpus.rows) < 0.5, one, other)

    def label_of(numbers: Any) -> Any:
        return lambda row: [labels[numbers[row]]] if kind == "multi" else labels[numbers[row]]

    with corpus.session(file) as session:
        corpus.answers(session, "ann", corpus.rows, label_of(one))
    with corpus.session(file, second=True) as session:
        corpus.answers(session, "bob", corpus.rows, label_of(other))
        [pair] = agreements(session)
    if kind == "multi":
        expected = np.mean([cohen_kappa_score(one == n, other == n) for n in range(4)])
    else:
        weights = "quadratic" if kind == "score" else None
        expected = cohen_kappa_score(one, other, weights=weights, labels=range(4))
    assert (pair.documents, pair.alike) == (corpus.rows, (one == other).sum())
    assert pair.kappa == pytest.approx(expected)


def test_kappa_of_scores_counts_the_distance_over_labels_that_nobody_gave(file: Path) -> None:
    corpus = Corpus(task_of("score", ["0", "1", "2", "3", "4"]), rows=4)
    scores = {"ann": ["0", "4", "1", "1"], "bob": ["0", "1", "4", "1"]}
    for person, labels in scores.items():
        with corpus.session(file, second=person == "bob") as session:
            corpus.answers(session, person, 4, labels.__getitem__)
            pairs = agreements(session)
    assert pairs[0].kappa == pytest.approx(0)  # — 1 and 4 are three labels apart, as 0 and 3 are


def test_kappa_is_undefined_where_chance_alone_makes_people_agree(file: Path) -> None:
    corpus = Corpus(task_of(), rows=3)
    for person, second in (("ann", False), ("bob", True)):
        with corpus.session(file, second=second) as session:
            corpus.answers(session, person, 3, lambda _: "clean")
            pairs = agreements(session)
    assert [(pair.alike, pair.kappa) for pair in pairs] == [(3, None)]
